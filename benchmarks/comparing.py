"""Comparison of candidates model by model: the command line, the table and the JSON of ``beyond`` and ``vision``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Timing, merge_json

Figures = Mapping[str, Timing | int]
"""What was measured of a candidate: times, and bytes."""

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
    """Return one line for each model and candidate: MiB, and the least and the median time relative to the original."""
    rows = [(name, candidate, figures) for name, each in measured.items() for candidate, figures in each.items()]
    columns = {key: isinstance(figure, Timing) for *_, figures in rows for key, figure in figures.items()}
    table = Table("model", "candidate", *(f"{key} ×" if timed else f"{key}, MiB" for key, timed in columns.items()))
    for name, candidate, figures in rows:
        original = next(iter(measured[name].values()))
        table.add_row(name, candidate, *(_cell(figures.get(key), original.get(key)) for key in columns))
    return table


def _cell(figure: Timing | int | None, original: Timing | int | None) -> str:
    if not isinstance(figure, Timing):
        return "" if figure is None else f"{figure / 2**20:.0f}"
    median, low, high = figure.ratios
    least = original.least if isinstance(original, Timing) else math.nan
    return f"{figure.least / least:.2f}, {median:.2f} ({low:.2f}–{high:.2f})"
