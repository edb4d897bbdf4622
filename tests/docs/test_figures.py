"""The figures of README and of the page of numbers are those of the JSON files under benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from docs.generate.numbers import SECTIONS
from docs.tools.draw_numbers import BEGIN, END, PARTS, filled

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_front_page_has_the_results_as_they_are() -> None:
    assert all(README.count(mark.format(name)) == 1 for name in PARTS for mark in (BEGIN, END))
    assert filled(README) == README, "run python docs/tools/draw_numbers.py"


def test_the_front_page_is_short() -> None:
    assert len(README.split()) <= 900


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section[0])
def test_each_cell_of_a_table_has_one_number(section: tuple[Any, ...]) -> None:
    *_, head, rows = section
    found = list(rows())
    assert found and {len(row) for row in found} == {len(head)}
    first = next(i for i, cell in enumerate(found[0]) if re.fullmatch(r"\d+\.\d+", cell))
    for row in found:
        for cell in row[first:]:
            assert re.fullmatch(r"\d+(\.\d+)?|–|failed|not measured|does not fit", cell), row
