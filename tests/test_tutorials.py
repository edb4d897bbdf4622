"""The notebooks run, top to bottom, and are what their sources say."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code"), "committed without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(TUTORIALS.parent)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_what_its_source_says(path):
    notebook = nbformat.read(path, as_version=4)
    source = jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in source.cells]
