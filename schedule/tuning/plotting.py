"""Plot of a search, time against memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedule.tuning.trial import STATUSES, Trial, pareto
from schedule.util.errors import NotApplicable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"measured": "#2a6fbb", "pruned": "#9db8d6", "over the bound": "#c9c9c9", "failed": "#c44e52"}
_INK, _BEST, _BOUND = "#333333", "#e07b00", "#b03a3a"


def plot(
    trials: Sequence[Trial],
    best: Trial | None,
    bound: int | None,
    title: str,
    path: str | Path | None,
    marks: Mapping[str, Mapping[str, Any]],
) -> Figure:
    """Plot ``trials``, as described in :meth:`schedule.tuning.Tuning.plot`.

    Args:
        best: the trial to mark with a star, if any.
        bound: bytes that a step may need.
        title: above the picture.
        path: file to save it in, if any.
        marks: label → knobs of a trial to mark.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise NotApplicable("a picture needs matplotlib, which is not installed", fix="pip install matplotlib")
    from matplotlib.figure import Figure

    placed = [trial for trial in trials if trial.time is not None and trial.memory is not None]
    if not placed:
        raise NotApplicable("no trial has both a time and a memory", fix="a cost that returns (time, bytes)")
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    unit, name = _unit(max(trial.memory or 0 for trial in placed))
    _points(axes, placed, unit)
    _front(axes, placed, unit)
    if bound is not None:
        _bound(axes, bound / unit)
    _marks(axes, best, placed, marks, unit)
    axes.set_xlabel(f"peak memory of a step ({name})")
    axes.set_ylabel("time of a step")
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee", zorder=0)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    if path is not None:
        _save(figure, Path(path))
    return figure


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise NotApplicable(f"{path} cannot be written: {error}", fix="a .png, .svg or .pdf in a folder") from error


def _unit(most: float) -> tuple[float, str]:
    return next((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")) if most >= unit)


def _points(axes: Axes, placed: Sequence[Trial], unit: float) -> None:
    for status in STATUSES:
        own = [trial for trial in placed if trial.status == status]
        if own:
            x, y = _coordinates(own, unit)
            axes.scatter(x, y, s=30, color=_COLORS[status], label=status, zorder=3, linewidths=0)


def _front(axes: Axes, placed: Sequence[Trial], unit: float) -> None:
    """Draw the Pareto front as steps."""
    front = pareto(placed)
    x, y = _coordinates(front, unit)
    axes.step(x, y, where="post", color=_INK, linewidth=1, alpha=0.6, zorder=2, label="Pareto front")


def _bound(axes: Axes, bound: float) -> None:
    axes.axvline(bound, color=_BOUND, linestyle="--", linewidth=1.2, zorder=2)
    right = max(axes.get_xlim()[1], bound * 1.05)
    axes.set_xlim(right=right)
    axes.axvspan(bound, right, color=_BOUND, alpha=0.05, linewidth=0, zorder=0)
    axes.annotate(
        " bound", (bound, 1), xycoords=axes.get_xaxis_transform(), color=_BOUND, fontsize=9, va="top", ha="left"
    )


def _marks(
    axes: Axes, best: Trial | None, placed: Sequence[Trial], marks: Mapping[str, Mapping[str, Any]], unit: float
) -> None:
    if best is not None and best in placed:
        x, y = _coordinates([best], unit)
        axes.scatter(x, y, s=190, marker="*", color=_BEST, zorder=5, label=f"best: {best.label}")
    for label, knobs in marks.items():
        found = next((trial for trial in placed if trial.knobs == knobs), None)
        if found is not None:
            x, y = _coordinates([found], unit)
            axes.scatter(x, y, s=80, facecolors="none", edgecolors=_INK, linewidths=1.4, zorder=4)
            left = x[0] > sum(axes.get_xlim()) / 2
            axes.annotate(
                label,
                (x[0], y[0]),
                xytext=(-7 if left else 7, 6),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=9,
                color=_INK,
            )


def _coordinates(trials: Sequence[Trial], unit: float) -> tuple[list[float], list[float]]:
    return [(trial.memory or 0) / unit for trial in trials], [trial.time or 0.0 for trial in trials]
