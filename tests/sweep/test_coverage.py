"""The page of the sweep says what its results leave open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep.coverage import Page


@pytest.mark.parametrize(
    ("total", "older", "line"),
    [
        (2, 0, "2 results."),
        (5, 0, "2 results. 3 have no result yet."),
        (5, 1, "2 results. 3 have no result yet. 1 of the results are of earlier code."),
    ],
)
def test_missing_and_older_results_are_counted(tmp_path: Path, total: int, older: int, line: str) -> None:
    page = Page("{summary}\n{reasons}\n", lambda result: "", lambda results: f"{len(results)} results.")
    results = {name: {"name": name, "reasons": {}, "of": "0"} for name in ("one", "two")}
    assert page.write(results, total, older, tmp_path / "page.md", tmp_path / "data.json") == line
    assert line in (tmp_path / "page.md").read_text()
