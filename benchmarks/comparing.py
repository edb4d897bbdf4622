"""Comparison of candidates model by model: the command line, the table and the JSON of ``beyond`` and ``vision``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Timing, merge_json

Figure = Timing | float | int
"""The times of several rounds, the seconds of all of them together, or a number of bytes."""

Figures = Mapping[str, Figure]
"""What was measured of a candidate."""

Measure = Callable[[int], Mapping[str, Figures]]
"""Measure a model in this number of rounds: candidate → its figures. The first candidate is the original."""


def compare(document: str, models: Mapping[str, Measure], out: Path, given: Sequence[str] | None = None) -> None:
    """Measure the models of the command line, write what is known of all so far, and print these.

    Args:
        document: the description that ``--help`` prints.
        models: name → how it is measured.
        out: the JSON of the results. Those of other models stay if they are of the same machine and versions.
        given: the arguments of the command line; those of the process by default.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(models), choices=list(models))
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args(given)
    measured: dict[str, Mapping[str, Figures]] = {}
    for name in options.only:
        measured[name] = rows = models[name](options.rounds)
        merge_json(options.out, {name: {candidate: _plain(figures) for candidate, figures in rows.items()}})
    Console().print(_table(measured))


def _plain(figures: Figures) -> dict[str, object]:
    return {key: asdict(figure) if isinstance(figure, Timing) else figure for key, figure in figures.items()}


def _table(measured: Mapping[str, Mapping[str, Figures]]) -> Table:
    """Return one line for each model and candidate: MiB, and times relative to the original."""
    rows = [(name, candidate, figures) for name, each in measured.items() for candidate, figures in each.items()]
    columns = {key: isinstance(figure, int) for *_, figures in rows for key, figure in figures.items()}
    table = Table("model", "candidate", *(f"{key}, MiB" if is_size else f"{key} ×" for key, is_size in columns.items()))
    for name, candidate, figures in rows:
        original = next(iter(measured[name].values()))
        table.add_row(name, candidate, *(_cell(figures.get(key), original.get(key)) for key in columns))
    return table


def _cell(figure: Figure | None, original: Figure | None) -> str:
    if figure is None or original is None:
        return ""
    if isinstance(figure, Timing):
        median, low, high = figure.ratios
        return f"{_seconds(figure) / _seconds(original):.2f}, {median:.2f} ({low:.2f}–{high:.2f})"
    return f"{figure / 2**20:.0f}" if isinstance(figure, int) else f"{figure / _seconds(original):.2f}"


def _seconds(figure: Figure) -> float:
    """Return the least time of all rounds."""
    return figure.least if isinstance(figure, Timing) else figure
