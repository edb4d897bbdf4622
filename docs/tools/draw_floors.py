"""Draws docs/floors.svg: the floors of the code, as the import contract in pyproject.toml has them.

Run ``python docs/tools/draw_floors.py`` from the project's root.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
OURS, OPS = "#bdd7ee", "#e7e6e6"


def floors() -> list[tuple[str, str]]:
    """Return (package, first line of its docstring), the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return [(name, _summary(name)) for name in layers]


def _summary(name: str) -> str:
    path = ROOT / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def draw(path: Path) -> None:
    """Write the picture to ``path``."""
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "floors", "svg.fonttype": "none"}
    found = floors()
    figure, axes = plt.subplots(figsize=(10.5, 0.36 * len(found)))
    for number, (name, about) in enumerate(reversed(found)):
        color = OPS if name == "fused" else OURS
        axes.add_patch(plt.Rectangle((0, number), 10, 0.86, facecolor=color, edgecolor="#555555", lw=0.8))
        axes.text(0.1, number + 0.43, name, va="center", fontsize=9, weight="bold")
        axes.text(2.1, number + 0.43, about, va="center", fontsize=8)
    axes.annotate("", xy=(10.25, 0), xytext=(10.25, len(found)), arrowprops={"arrowstyle": "-|>", "color": "#333333"})
    axes.text(10.35, len(found) / 2, "imports", rotation=270, va="center", fontsize=8, style="italic")
    axes.set_xlim(0, 10.7)
    axes.set_ylim(0, len(found))
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs" / "floors.svg")
