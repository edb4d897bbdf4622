"""Costs of parallelism: collectives and bytes per step, memory per rank, time with one and two processes.

    python -m benchmarks.distributed [--ranks 2] [--time] [--out benchmarks/results/distributed.json]

Collectives are counted on simulated ranks in one process. The minimum of a layer is Megatron's: two all-reduces of
[batch, seq, hidden] forward and two backward, or their sequence-parallel halves.

Expert and context parallelism are compared with a minimum and with the cost model (``benchmarks/sharing.py``).

Step times are ratios to a step of one process while the other waits; the ideal for two processes is one half. A run on
two cores shows that the work is sharded, and how much time is added by the replicated parts (norms, residual sums) and
by messages over the loopback device. Two processes with a whole model each show how much of that is due to the machine,
because its cores share caches, memory and any other load. Such a run cannot show the gain on accelerators: their matrix
products are a thousand times faster, their links ten to a hundred times, and no communication is overlapped here. The
JSON file contains the load of the machine: the ratios mean little if more than two processes were running.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import schedule
from benchmarks import sharing
from benchmarks.ranks import LAYERS, LENGTH, NUMBER, ROWS, WIDTH, in_processes, made, models, sent
from benchmarks.timing import interleaved, merge_json
from schedule.api.simulate import planned
from schedule.distributed.communication.groups import Collective
from schedule.distributed.planning.plan_data import Plan

TIMED_WIDTH, TIMED_LENGTH = 512, 256


@dataclass(frozen=True)
class Row:
    """Counts for one model.

    Attributes:
        model: name of the model.
        sequence: whether sequence parallelism is used.
        forward, backward: number of collectives by op, in the layers alone.
        sent: bytes that each rank sends per step for the layers.
        minimum: the same bytes with Megatron's four all-reduces per layer.
        held: parameters stored by one rank, as a fraction of all.
    """

    model: str
    sequence: bool
    forward: dict[str, int]
    backward: dict[str, int]
    sent: int
    minimum: int
    held: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the table row, except the last."""
        counts = (", ".join(f"{n} {op}" for op, n in of.items()) for of in (self.forward, self.backward))
        return (self.model, "yes" if self.sequence else "no", *counts, f"{self.sent / self.minimum:.2f}")


def held(model: nn.Module, plan: Plan) -> float:
    """Return the fraction of the parameters stored by one rank."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    shared = {id(model.get_submodule(step.path)._parameters[step.name]): step for step in plan.shards}
    own = 0
    for parameter in model.parameters():
        step = shared.get(id(parameter))
        own += parameter.numel() // (plan.ranks // step.replicas if step is not None and step.replicas == 1 else 1)
    return own / whole


def counted(name: str, config: Any, ranks: int, sequence: bool) -> Row:
    """Plan the model, run it on simulated ranks, and count collectives and bytes."""
    model, batch = made(config)
    _, seen = planned(model, batch, ranks, vocabulary=False, sequence=sequence)
    if not seen.equal():
        raise SystemExit(f"{name}: {seen.where} deviates")
    whole, _ = planned(model, batch, ranks)
    size = ROWS * LENGTH * WIDTH * NUMBER
    forward, backward = (dict(Counter(one.op for one in of)) for of in (seen.forward, seen.backward))
    minimum = sent([Collective("all_reduce", size)] * 4 * LAYERS, ranks)
    moved = sent([*seen.forward, *seen.backward], ranks)
    return Row(name, sequence, forward, backward, moved, minimum, held(model, whole))


def table(rows: Sequence[Row], ranks: int) -> Table:
    """Return the table of collectives per step, and bytes relative to the minimum."""
    result = Table(title=f"{LAYERS} layers on {ranks} ranks, [{ROWS}, {LENGTH}, {WIDTH}] float32")
    for column in ("model", "sequence", "forward", "backward", "bytes sent / minimum", "held / ideal"):
        result.add_column(column)
    for row in rows:
        result.add_row(*row.cells, f"{row.held:.2f} / {1 / ranks:.2f}")
    return result


@dataclass(frozen=True)
class Times:
    """Step times of one model, relative to a step of one process while the other waits.

    Attributes:
        model: name of the model.
        alone: milliseconds of the step of one process.
        each: relative time with a whole model in each of two processes.
        shared: relative time with the model sharded over two processes: median and quartiles.
        load: load average of the machine over one minute, as in ``uptime``.
    """

    model: str
    alone: float
    each: float
    shared: tuple[float, float, float]
    load: float

    def __str__(self) -> str:
        shared, low, high = self.shared
        return (
            f"{self.model}: a step of one process {self.alone:.0f} ms; of two with a whole model each {self.each:.2f} "
            f"of that; of two that share it {shared:.2f} [{low:.2f}, {high:.2f}], ideal 0.50; load {self.load:.1f}"
        )


def _step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()


def _timed() -> Iterator[Times]:
    """Time one process while the others wait, all with a whole model each, and all with the model sharded."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def together(step: Callable[[], None], here: bool = True) -> None:
        if here:
            step()
        dist.barrier()

    for name, config in models(TIMED_WIDTH).items():
        model, batch = made(config, TIMED_LENGTH)
        whole = partial(_step, copy.deepcopy(model), batch)
        sch = schedule.create_schedule(model, batch, mesh)
        sch.apply_plan(sch.shard_plan())
        times = interleaved(
            {
                "one": partial(together, whole, rank == 0),
                "each": partial(together, whole),
                "all": partial(together, partial(_step, model, batch)),
            },
            rounds=7,
        )
        alone, shared = times["one"].median, times["all"]
        ratios = (shared.median / alone, shared.low / alone, shared.high / alone)
        row = Times(name, alone * 1e3, times["each"].median / alone, ratios, os.getloadavg()[0])
        if rank == 0:
            print(row, flush=True)
        yield row


def main() -> None:
    """Print the tables and, with ``--time``, the ratios of step times, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/distributed.json"))
    arguments = parser.parse_args()
    ranks = arguments.ranks
    rows = [counted(name, config, ranks, sequence) for name, config in models().items() for sequence in (False, True)]
    modeled = sharing.rows()
    for one in (table(rows, ranks), sharing.table(modeled)):
        Console().print(one)
    found: dict[str, list[Any]] = {"counted": rows, "modeled": modeled}
    if arguments.time:
        found["timed"] = in_processes(_timed, 2)
    merge_json(arguments.out, {"ranks": ranks, **{name: [*map(asdict, each)] for name, each in found.items()}})


if __name__ == "__main__":
    main()
