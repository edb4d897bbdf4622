"""Draws docs/way_through.svg: what happens to a model from ``create_schedule`` to the verified, scheduled model.

Run ``python docs/tools/draw_way_through.py`` from the project's root.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

PLAIN, OURS, CHANGED = "#e7e6e6", "#bdd7ee", "#a9d18e"
WIDTH, HEIGHT, GAP = 2.3, 1.5, 0.7

STEPS = (
    ("model", "any torch module", PLAIN),
    ("schedule tree", "a node for each module; paths and globs name them", OURS),
    ("record", "one forward: the shapes that each module received", OURS),
    ("trace", "an FX graph; sizes stay open, branches become guards", OURS),
    ("match", "patterns on one vocabulary of operations", OURS),
    ("rewrite", "one call in place of many; all or nothing", CHANGED),
    ("verify", "outputs, gradients, training steps", CHANGED),
    ("the same model", "same object, parameters, hooks, state_dict", PLAIN),
)

NOTES = {
    2: "no data is kept",
    4: "where nothing matches, the nearest miss is explained",
    5: "a step of the recipe; undo() takes it back, to the bit",
    6: "also at other sizes, and with other weights",
    7: "a call that misses a guard is traced once more, or runs the original forward",
}

Point = tuple[float, float]


def corner(number: int) -> Point:
    """The lower left corner of box ``number``: four to the right, then four back below."""
    row, column = divmod(number, 4)
    return (column if row == 0 else 3 - column) * (WIDTH + GAP), -row * (HEIGHT + 1.25)


def box(axes: plt.Axes, number: int) -> None:
    """A step: its name, and what it does in a few words."""
    name, about, color = STEPS[number]
    x, y = corner(number)
    axes.add_patch(
        FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.12", fc=color, ec="#555555")
    )
    axes.text(x + WIDTH / 2, y + HEIGHT - 0.32, name, ha="center", va="center", fontsize=11, weight="bold")
    wrapped = "\n".join(textwrap.wrap(about, 24))
    axes.text(x + WIDTH / 2, y + 0.55, wrapped, ha="center", va="center", fontsize=8.5)


def arrow(axes: plt.Axes, start: Point, end: Point) -> None:
    """From one box to the next."""
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": "#333333", "lw": 1.3})


def note(axes: plt.Axes, number: int, text: str) -> None:
    """What else there is to say of a step, below it."""
    x, y = corner(number)
    wrapped = "\n".join(textwrap.wrap(text, 28))
    axes.plot([x + WIDTH / 2] * 2, [y, y - 0.2], color="#888888", linestyle="--", lw=1)
    axes.text(x + WIDTH / 2, y - 0.28, wrapped, ha="center", va="top", fontsize=8, style="italic")


def between(axes: plt.Axes, number: int) -> None:
    """The arrow from one step to the next."""
    (x, y), (to_x, to_y) = corner(number), corner(number + 1)
    if y != to_y:
        arrow(axes, (x + WIDTH / 2, y), (to_x + WIDTH / 2, to_y + HEIGHT))
    elif to_x > x:
        arrow(axes, (x + WIDTH, y + HEIGHT / 2), (to_x, to_y + HEIGHT / 2))
    else:
        arrow(axes, (x, y + HEIGHT / 2), (to_x + WIDTH, to_y + HEIGHT / 2))


def main() -> None:
    """Draw it."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "way-through"
    figure, axes = plt.subplots(figsize=(10.2, 4.6))
    for number in range(len(STEPS)):
        box(axes, number)
        if number + 1 < len(STEPS):
            between(axes, number)
    for number, text in NOTES.items():
        note(axes, number, text)
    axes.set_xlim(-0.15, corner(3)[0] + WIDTH + 0.15)
    axes.set_ylim(corner(4)[1] - 1.3, HEIGHT + 0.1)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    figure.savefig(Path(__file__).parents[1] / "way_through.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
