"""What the sweeps have counted: the table of the page of support, and a sentence for the front page."""

from __future__ import annotations

import json
from pathlib import Path

from docs.generate.docstrings import as_table

RESULTS = Path(__file__).parents[2] / "tests" / "sweep" / "results"
_SWEEPS = {
    "coverage": "[transformers](coverage.md) (`make sweep`)",
    "beyond": "[timm, diffusers, x-transformers, torch.nn](beyond.md) (`make sweep-beyond`)",
}
_COLUMNS = {"all": "classes or models", "built": "built", "whole": "root traced whole"}
_COLUMNS |= {"at other shapes": "right at other shapes", "at every shape": "at every shape", "wrong": "wrong"}


def counts(sweep: str) -> dict[str, int]:
    """Return what a sweep has counted."""
    found: dict[str, int] = json.loads((RESULTS / f"{sweep}.json").read_text(encoding="utf-8"))["counts"]
    return found


def sweep_reference() -> str:
    """A row for each sweep."""
    rows = [[title, *(str(counts(sweep)[name]) for name in _COLUMNS)] for sweep, title in _SWEEPS.items()]
    return "\n".join(as_table([["", *_COLUMNS.values()], *rows]))


def sentence() -> str:
    """Say of how many architectures what is known."""
    found = counts("coverage")
    none = "none computes" if not found["wrong"] else f"{found['wrong']} compute"
    return (
        f"Of {found['all']} config classes of transformers {found['built']} can be built small: {found['whole']} are "
        f"traced whole, {none} anything wrong ([coverage](docs/coverage.md))."
    )
