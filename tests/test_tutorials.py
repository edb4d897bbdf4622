"""The notebooks run, top to bottom, in kernels of their own, and are what their sources say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

from tests.report.test_report import Page
from tutorials.render import NOTE_OF_TORCH, executed, sources

SOURCES = sources()
LONG = ("04_parallel", "05_fine_tuning", "06_tuning", "07_coming_from")
"""Executed in the long sweep only; their code is compared with the source at every change."""
every_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def committed(source: Path) -> Any:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def shown(cell: Any) -> set[str]:
    """What a cell shows, as kinds: text, a table, a picture; not the notes that torch logs about a machine."""
    shown = [each for each in cell.get("outputs", ()) if not NOTE_OF_TORCH.fullmatch(each.get("text", ""))]
    return {kind for output in shown for kind in output.get("data", {"text": None})}


def test_every_notebook_has_its_source() -> None:
    assert SOURCES
    assert {path.stem for path in SOURCES[0].parent.glob("*.ipynb")} == {path.stem for path in SOURCES}


@every_notebook
def test_notebook_is_what_its_source_says(source: Path) -> None:
    written = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    again = f"python tutorials/render.py {source.stem}"
    assert [(cell.cell_type, cell.source) for cell in committed(source).cells] == written, again


@every_notebook
def test_outputs_are_whole_and_name_no_machine(source: Path) -> None:
    for cell in committed(source).cells:
        for output in cell.get("outputs", ()):
            for kind, data in output.get("data", {"text": output.get("text", "")}).items():
                if kind != "image/png":
                    assert not re.search(r"(?<![\w.…])/(home|root|tmp|usr|work|Users)/", data), data[:500]
                if kind == "text/html":
                    assert Page(data).texts


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "source", [pytest.param(s, marks=pytest.mark.slow if s.stem in LONG else (), id=s.stem) for s in SOURCES]
)
def test_notebook_runs_and_shows_what_the_committed_one_shows(source: Path) -> None:
    cells, old = executed(source).cells, committed(source).cells
    assert any(map(shown, old)), "committed without outputs"
    for now, then in zip(cells, old, strict=True):
        assert shown(now) == shown(then), f"python tutorials/render.py {source.stem}: {now.source[:200]}"
