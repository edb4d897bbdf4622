"""Costs of tensor parallelism: collectives and bytes per step, memory per rank, time with one and two processes.

    python -m benchmarks.distributed [--ranks 2] [--time] [--out benchmarks/results/distributed.json]

Collectives are counted on simulated ranks in one process. The minimum of a layer is Megatron's: two all-reduces of
[batch, seq, hidden] forward and two backward, or their sequence-parallel halves.

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
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import schedule
from benchmarks.timing import interleaved, write_json
from schedule.api.simulate import planned
from schedule.distributed.communication.groups import Collective
from schedule.distributed.planning.plan import Plan

LAYERS, WIDTH, ROWS, LENGTH = 2, 256, 2, 64
TIMED_WIDTH, TIMED_LENGTH = 512, 256


def models(width: int = WIDTH) -> dict[str, Any]:
    """Small models of real shapes: name → configuration."""
    common: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "intermediate_size": 4 * width,
        "vocab_size": 1024,
    }
    return {
        "gpt2": transformers.GPT2Config(n_layer=LAYERS, n_embd=width, n_head=8, vocab_size=1024, n_positions=256),
        "llama (8:2)": transformers.LlamaConfig(**common, num_key_value_heads=2),
        "bert": transformers.BertConfig(**common),
        "mixtral": transformers.MixtralConfig(**common, num_key_value_heads=2, num_local_experts=4),
    }


def made(config: Any, length: int = LENGTH) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build the model of a configuration, and a batch for it."""
    auto = transformers.AutoModelForMaskedLM if config.model_type == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, 1000, (ROWS, length))
    return model, {"input_ids": ids, "labels": ids}


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


def sent(made: Sequence[Collective], ranks: int) -> int:
    """Return the bytes sent by each rank with ring algorithms, from the sizes of its inputs."""
    total = 0
    for one in made:
        part = one.nbytes * (ranks - 1)
        total += {"all_reduce": 2 * part // ranks, "all_gather": part}.get(one.op, part // ranks)
    return total


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
    size = ROWS * LENGTH * WIDTH * 4
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


def _step(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()


def _timed(rank: int, ranks: int, port: int, found: Any) -> None:
    """Time one process while the others wait, all with a whole model each, and all with the model sharded."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))

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
        if rank == 0:
            ratios = (shared.median / alone, shared.low / alone, shared.high / alone)
            row = Times(name, alone * 1e3, times["each"].median / alone, ratios, os.getloadavg()[0])
            print(row, flush=True)
            found.put(row)
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Print the table and, with ``--time``, the ratios of step times, and write both as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/distributed.json"))
    arguments = parser.parse_args()
    ranks = arguments.ranks
    rows = [counted(name, config, ranks, sequence) for name, config in models().items() for sequence in (False, True)]
    Console().print(table(rows, ranks))
    times: list[Times] = []
    if arguments.time:
        found = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(_timed, args=(2, _free_port(), found), nprocs=2)
        times = [found.get() for _ in models()]
    write_json(arguments.out, {"ranks": ranks, "counted": [*map(asdict, rows)], "timed": [*map(asdict, times)]})


if __name__ == "__main__":
    main()
