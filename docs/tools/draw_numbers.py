"""Write README's figures: its table of numbers, what the sweeps counted, and the chart ``docs/numbers.svg``.

    python docs/tools/draw_numbers.py

All come from JSON under ``benchmarks/results`` and ``tests/sweep/results``. A test compares README with them.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate.docstrings import as_table  # noqa: E402 - it is found from the root
from docs.generate.numbers import lines  # noqa: E402
from docs.generate.sweeps import sentence  # noqa: E402

CANDIDATES = {"HF sdpa": "eager", "torch.compile": "torch.compile", "ours": "`default`", "ours, all": "`all`"}
"""Candidates of the benchmark, with their names here."""
BEGIN, END = "<!-- {}: begin, by docs/tools/draw_numbers.py -->", "<!-- {}: end -->"


def figures() -> dict[str, list[str]]:
    """What was measured of a training step of Llama, 1.2 billion parameters, on an H100: one value a candidate."""
    found = {line["candidate"]: line for line in lines("gpu_models_h100") if line.get("model") == "llama"}
    chosen = [found[name] for name in CANDIDATES]
    return {
        "training step, ms": [f"{line['us'][0] / 1e3:.0f}" for line in chosen],
        "peak memory of the step, GB": [f"{line['peak'] / 1e9:.1f}" for line in chosen],
        "first step, compiling included, s": [f"{line['first_s']:.1f}" for line in chosen],
    }


def table() -> str:
    """README's table."""
    rows = [["", *CANDIDATES.values()], *([title, *values] for title, values in figures().items())]
    return "\n".join(as_table(rows))


PARTS = {"figures": table, "sweeps": lambda: "\n".join(textwrap.wrap(sentence(), 118))}
"""What README says between marks."""


def filled(readme: str) -> str:
    """README with its figures as the results are now."""
    for name, part in PARTS.items():
        begin, end = BEGIN.format(name), END.format(name)
        written = f"{begin}\n\n{part()}\n\n{end}"
        readme = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, text=written: text, readme, flags=re.DOTALL)
    return readme


def draw(path: Path) -> None:
    """Draw a panel of bars for each row of the table."""
    plt.rcParams["svg.hashsalt"] = "numbers"  # the same file each time
    figure, axes = plt.subplots(1, len(figures()), figsize=(10, 2.9))
    names = [name.replace("`", '"') for name in CANDIDATES.values()]
    for axis, (title, values) in zip(axes, figures().items(), strict=True):
        bars = axis.bar(names, list(map(float, values)), color=("#9aa0a6", "#f29900", "#34a853", "#137333"))
        axis.bar_label(bars, values, fontsize=9)
        axis.set_title(title, fontsize=9)
        axis.set_yticks([])
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.margins(y=0.15)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw(ROOT / "docs" / "numbers.svg")
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
