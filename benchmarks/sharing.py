"""Bytes of expert and of context parallelism in a step: counted, at least, and by the cost model.

The minimum of a layer of experts is, for each expert of a token on another rank, the token, the result and the
gradients of both. The number of tokens of each expert comes on top and, on ranks with the same tokens, an all-gather of
the outputs and one of the tokens' gradients. The minimum of a layer of a shared sequence is an all-gather of keys and
values, a reduce-scatter of their gradients, and an all-reduce of the gradients of the parameters.

How many tokens a rank sends depends on the router. The cost model assumes the same number of tokens for all experts, so
they are given to the experts in turn here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import schedule
from benchmarks.ranks import LAYERS, LENGTH, NUMBER, ROWS, Sent, in_processes, made, mixtures, models, sent
from schedule.api.simulate import simulate
from schedule.distributed.communication.chunks import chunk_bounds
from schedule.distributed.communication.groups import Collective
from schedule.distributed.tensor_parallel.expert_proof import has_experts
from schedule.tuning import Shape
from schedule.tuning.cost_model import INDEX, context_bytes, expert_bytes

LONG = 1024
"""Tokens per row where ranks share the sequence."""
MESHES = ((2, 1), (1, 2), (2, 2))
"""Ranks with other tokens × ranks with the same tokens, over which experts are spread."""


@dataclass(frozen=True)
class Modeled:
    """Bytes of one step because ranks share experts or sequences, counted and by the cost model.

    Attributes:
        model: name of the model.
        ranks: the dimensions of the mesh.
        collectives: number by op, forward and backward.
        sent: bytes that each rank sends.
        minimum: bytes that it has to send.
        modeled: bytes by the cost model.
    """

    model: str
    ranks: str
    collectives: dict[str, int]
    sent: int
    minimum: int
    modeled: int

    @property
    def deviation(self) -> float:
        """Deviation of the modeled bytes from those counted, as a fraction of these."""
        return self.modeled / self.sent - 1

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the table row."""
        collectives = ", ".join(f"{n} {op}" for op, n in self.collectives.items())
        ratio, deviation = f"{self.sent / self.minimum:.3f}", f"{self.deviation:+.1%}".replace("%", " %")
        return (self.model, self.ranks, collectives, f"{self.sent:,}", ratio, deviation)


def table(rows: Sequence[Modeled]) -> Table:
    """Return the table of the bytes of expert and context parallelism."""
    result = Table(title=f"{LAYERS} layers, rows of {LENGTH} tokens (experts) and {LONG} (sequences), float32")
    for column in ("model", "ranks", "collectives", "bytes sent", "bytes sent / minimum", "modeled"):
        result.add_column(column)
    for row in rows:
        result.add_row(*row.cells)
    return result


def spread(name: str, mesh: DeviceMesh) -> Modeled:
    """Spread the experts of a mixture over ``"ep"`` and ``"tp"``, and count a step. All ranks must call it."""
    model, _ = made(mixtures()[name])
    torch.manual_seed(mesh.get_local_rank("ep"))
    ids = torch.randint(3, 1000, (ROWS, LENGTH))
    batch, whole, shape = {"input_ids": ids, "labels": ids}, copy.deepcopy(model), Shape.of(model)
    experts = [*filter(has_experts, model.modules())]
    schedule.create_schedule(model, batch, mesh)["model.layers.*.mlp.experts"].shard_experts()
    chosen: list[Tensor] = []
    for module in (*experts, *filter(has_experts, whole.modules())):
        module.register_forward_pre_hook(partial(_in_turn, shape=shape, chosen=chosen))
    expected = whole(**batch).loss
    least = least_of_experts(chosen, shape, mesh)
    with Sent() as seen:
        loss = model(**batch).loss
        loss.backward()
    if not torch.allclose(loss, expected, rtol=1e-4):
        raise SystemExit(f"{name}: the loss deviates")
    ep, tp = mesh["ep"].size(), mesh["tp"].size()
    modeled = sum(expert_bytes(shape, ROWS * LENGTH, ep, tp, number=NUMBER))
    return Modeled(name, f"ep {ep} × tp {tp}", dict(seen.counts), seen.nbytes, least, round(modeled))


def _in_turn(module: nn.Module, args: Any, shape: Shape, chosen: list[Tensor]) -> Any:
    """Give the tokens to the experts in turn, and note which."""
    tokens, index, weights = args
    chosen.append(torch.arange(index.numel()).view_as(index) % _count(shape))
    return tokens, chosen[-1], weights


def _count(shape: Shape) -> int:
    return shape.mixture.experts if shape.mixture else 1


def least_of_experts(chosen: Sequence[Tensor], shape: Shape, mesh: DeviceMesh) -> int:
    """Return the least bytes that this rank has to send in a step.

    Args:
        chosen: ``[tokens, k]``, the experts of each token, by layer.
        shape: of the mixture.
        mesh: the ranks over which its experts are spread.
    """
    tp, ranks, count, total = mesh["tp"].size(), mesh.size(), _count(shape), 0
    for index in chosen:
        begin, end = chunk_bounds(len(index), tp, mesh.get_local_rank("tp"))
        elsewhere = int((index[begin:end] // (count // ranks) != dist.get_rank()).sum())
        total += 4 * elsewhere * shape.hidden * NUMBER
        total += sent([Collective("all_to_all", INDEX * count)], ranks)
        total += sent([Collective("all_gather", (end - begin) * shape.hidden * NUMBER)] * 2, tp)
    return total


def shared_sequences(ranks: int) -> Modeled:
    """Share the sequences of a Llama between simulated ranks, and count a step."""
    name, config = "llama (8:2)", models()["llama (8:2)"]
    config.use_cache = False
    model, batch = made(config, LONG, "sdpa")
    plan = schedule.create_schedule(copy.deepcopy(model), batch).shard_plan(ranks, context=True)
    seen = simulate(model, batch, lambda sch: sch.apply_plan(plan), ranks)
    if not seen.equal():
        raise SystemExit(f"{name}: {seen.where} deviates")
    collectives, shape, tokens = [*seen.forward, *seen.backward], Shape.of(model), ROWS * LONG
    keys = 2 * tokens * shape.keys * NUMBER
    least = [Collective("all_gather", keys // ranks), Collective("reduce_scatter", keys)] * LAYERS
    least.append(Collective("all_reduce", (shape.parameters - shape.outside) * NUMBER))
    counts = dict(Counter(one.op for one in collectives))
    modeled = context_bytes(shape, tokens, ranks, number=NUMBER)
    return Modeled(name, f"cp {ranks}", counts, sent(collectives, ranks), sent(least, ranks), round(modeled))


def _spread_everywhere() -> Iterator[Modeled]:
    """Yield the rows of all mixtures on the meshes of as many ranks as there are."""
    for ep, tp in MESHES:
        if ep * tp == dist.get_world_size():
            mesh = init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))
            yield from (spread(name, mesh) for name in mixtures())


def rows() -> list[Modeled]:
    """Return the rows of all mixtures and meshes, and of sequences shared by two and four ranks."""
    spread_out = [row for ranks in (2, 4) for row in in_processes(_spread_everywhere, ranks)]
    return spread_out + [shared_sequences(ranks) for ranks in (2, 4)]
