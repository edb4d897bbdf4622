"""Makes notebooks from their sources and runs them.

    python tutorials/render.py                    # all of them
    python tutorials/render.py 02_patterns        # one

Outputs name files as they are on the machine that ran them; the part up to ``site-packages`` is cut.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore:IProgress not found",
}

NOTE_OF_TORCH = re.compile(r"[WE]\d{4} \S+ \d+ torch/.*\s*")
"""What torch logs about a machine, such as that it has no card."""


def sources() -> list[Path]:
    """The source of every notebook."""
    return sorted(HERE.glob("[0-9]*.py"))


def executed(source: Path) -> nbformat.NotebookNode:
    """The notebook of ``source``, run in a kernel of its own, in the folder where it is, as Jupyter runs it.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = jupytext.read(source)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(source.parent)}})
    client.execute(env={**os.environ, **SETTINGS})
    return notebook


def cleaned(text: str) -> str:
    """``text`` without what is of this machine only."""
    text = re.sub(r"(?<![^\s\"'(<>])[^\s\"'(<>]*/site-packages/", "…/", text)
    text = re.sub(r"/tmp/ipykernel_\d+/\d+\.py", "this notebook", text)
    return text.replace(str(HERE.parent), "…")


def render(source: Path) -> None:
    """Write the executed notebook beside ``source``."""
    notebook = executed(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [each for each in cell.outputs if not NOTE_OF_TORCH.fullmatch(each.get("text", ""))]
        for output in cell.get("outputs", ()):
            texts = output.get("data", output)
            texts.update({kind: cleaned(texts[kind]) for kind in ("text", "text/plain", "text/html") if kind in texts})
    notebook.metadata.pop("widgets", None)
    source.with_suffix(".ipynb").write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for each in [HERE / f"{name}.py" for name in sys.argv[1:]] or sources():
        render(each)
