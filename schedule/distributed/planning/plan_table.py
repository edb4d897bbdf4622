"""A tensor-parallel plan as a table: one row for each kind of layer, regardless of the number of layers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from rich.table import Table

from schedule.distributed.planning.plan_steps import POSITIONS, Group, ShardStep, SyncStep, moved
from schedule.distributed.tensor_parallel.sharded_modules import MEANS

_COLUMNS = ("group", "size", "columns", "rows", "forward", "backward", "bytes a step")
_BACKWARD = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "scatter": "all_gather"}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def plan_table(ranks: int, groups: Sequence[Group], boundaries: Sequence[SyncStep], nbytes: int) -> Table:
    """Return the table of sharded parameters, their collectives and the bytes sent per rank and step.

    Groups that differ only in the number of their layer share one row. It shows the size, modules, collectives and
    bytes of a single group; the bytes column begins with the number of groups.

    Args:
        ranks: the number of ranks of the plan.
        groups: the groups of the plan.
        boundaries: the collectives between the groups.
        nbytes: the bytes of all steps.
    """

    def sent(steps: Iterable[ShardStep | SyncStep]) -> int:
        return sum(moved(step, ranks) for step in steps)

    kind = "Context" if any(group.kind == POSITIONS for group in groups) else "Tensor"
    table = Table(title=f"{kind} parallel over {ranks} ranks", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in ("size", "bytes a step") else "left", overflow="fold")
    for alike in _alike(groups):
        group = alike[0]
        summed = [step for step in group.syncs if step.mode == "fwd_post" and step.op != "all_gather"]
        rows = dict.fromkeys(step.path for step in summed)
        columns = dict.fromkeys(step.path for step in group.shards if step.path not in rows)
        times = f"{len(alike)} × " if len(alike) > 1 else ""
        table.add_row(
            " ".join(_merged(group.name for group in alike)),
            f"{group.size} {group.kind}",
            _short(columns, group.name),
            _short(rows, group.name),
            _counted([*group.syncs, *group.exchanges], forward=True),
            _counted([*group.syncs, *group.exchanges, *_summed(group)], forward=False),
            f"{times}{sent([*group.shards, *group.syncs, *group.exchanges]):,}",
        )
    if boundaries:
        counted = (_counted(boundaries, forward) for forward in (True, False))
        table.add_row("between them", "", "", "", *counted, f"{sent(boundaries):,}")
    table.add_section()
    table.add_row("all", "", "", "", "", "", f"{nbytes:,}")
    return table


# -- layers that are alike ----------------------------------------------------------------------------------


def _alike(groups: Sequence[Group]) -> list[list[Group]]:
    """Collect the groups differing only in the first number of their paths, in order of first appearance."""
    found: dict[Hashable, list[Group]] = {}
    for group in groups:
        found.setdefault(_kind(group), []).append(group)
    return list(found.values())


def _kind(group: Group) -> Hashable:
    shards = tuple(replace(step, path=_without_number(step.path)) for step in group.shards)
    steps = [*group.syncs, *group.exchanges]
    syncs = tuple((replace(step, path=_without_number(step.path)), step.nbytes) for step in steps)
    return _without_number(group.name), group.size, group.kind, shards, syncs


def _without_number(path: str) -> str:
    return _NUMBER.sub("#", path, count=1)


def _merged(paths: Iterable[str]) -> Iterator[str]:
    """Merge the paths differing only in their first number, such as ``h.0–3, 5.mlp``."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(_without_number(path), []).append(path)
    for alike in found.values():
        numbers = [int(number[0]) for path in alike if (number := _NUMBER.search(path))]
        yield _NUMBER.sub(_ranges(sorted(numbers)), alike[0], count=1) if len(alike) > 1 else alike[0]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


# -- cells --------------------------------------------------------------------------------------------------


def _short(paths: Iterable[str], name: str) -> str:
    return ", ".join(_merged(path.removeprefix(name).lstrip(".") or path for path in paths)) or "-"


def _summed(group: Group) -> Iterator[SyncStep]:
    """Yield the all-reduces of the gradients of parameters stored whole."""
    for step in group.shards:
        if step.replicas > 1 or step.common:
            yield SyncStep(step.path, "bwd_post", "all_reduce", argument=step.name)


def _counted(steps: Iterable[SyncStep], forward: bool) -> str:
    counts: dict[str, int] = {}
    for step in steps:
        op: str | None = step.op if step.mode.startswith("fwd") == forward else None
        if not forward and step.mode.startswith("fwd") and (step.mode, step.op) != ("fwd_post", "all_gather"):
            op = step.op if step.mode == MEANS else _BACKWARD.get(step.op)
        if op is not None:
            counts[op] = counts.get(op, 0) + 1
    return ", ".join(f"{count} {op}" for op, count in counts.items()) or "-"
