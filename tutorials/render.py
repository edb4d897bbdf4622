"""Makes each notebook from its source and runs it: ``python tutorials/render.py``, from the project's root.

Outputs name files as they are on the machine that ran them; the part up to ``site-packages`` is cut.
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbclient
import nbformat

HERE = Path(__file__).resolve().parent


def render(source: Path) -> None:
    """Write the executed notebook beside ``source``."""
    notebook = jupytext.read(source)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(HERE.parent)}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata.pop("execution", None)
    notebook.metadata.pop("widgets", None)
    text = re.sub(r"[^\s\"']*/site-packages/", "…/", nbformat.writes(notebook))
    source.with_suffix(".ipynb").write_text(text.replace(str(HERE.parent), "…") + "\n")


if __name__ == "__main__":
    for path in sorted(HERE.glob("[0-9]*.py")):
        render(path)
