"""Check of a sharded model in one process: each rank is a thread with its shards as plain tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from schedule.api.schedule import Schedule, create_schedule
from schedule.capture import as_call, tensors
from schedule.distributed.communication.chunks import part_of
from schedule.distributed.communication.groups import Collective, SimulatedRanks
from schedule.distributed.communication.mesh import SimulatedMesh
from schedule.distributed.planning.plan_data import Plan
from schedule.distributed.tensor_parallel.sharded_modules import sharding_of
from schedule.util.arguments import keywords_checked
from schedule.util.errors import ScheduleError, ShardError
from schedule.util.generators import generators_restored
from schedule.util.named_values import limit_of
from schedule.util.user_code import UserCodeError, raised_by, user_code

LIMIT = 60.0


@dataclass(frozen=True)
class Simulation:
    """Results of simulated ranks compared with the whole model.

    Attributes:
        forward: collectives of one forward.
        backward: collectives of one backward.
        output: largest deviation of an output, relative to its largest value.
        gradient: the same for the gradients; gradients of replicated parameters are compared on every rank.
        where: the rank and the value with the largest deviation.
    """

    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    output: float
    gradient: float
    where: str

    def equal(self, tolerance: float = 1e-3) -> bool:
        """Check whether the results of all ranks equal those of the whole model."""
        return max(self.output, self.gradient) <= tolerance


@keywords_checked()
def simulate(
    model: nn.Module, batch: Any, apply: Callable[[Schedule], Any], ranks: int, training: bool = False
) -> Simulation:
    """Apply ``apply`` to a copy of ``model`` for each simulated rank, and compare a step with the whole model.

    Args:
        model: the whole model; unchanged.
        batch: inputs of the model.
        apply: function to shard and synchronize a schedule with a simulated mesh.
        ranks: number of ranks.
        training: run in training mode. Random numbers must then be drawn for whole tensors only, as on every rank.

    Raises:
        ShardError: ``apply`` fails, a rank raises, or the ranks run different collectives.
    """
    with generators_restored(model):
        return _simulated(model, batch, apply, ranks, training)


def _simulated(
    model: nn.Module, batch: Any, apply: Callable[[Schedule], Any], ranks: int, training: bool
) -> Simulation:
    group = SimulatedRanks(ranks, LIMIT)
    copies = [copy.deepcopy(model).train(training) for _ in range(ranks)]
    with generators_restored(model):
        for rank, own in enumerate(copies):
            apply(create_schedule(own, batch, SimulatedMesh(group, rank)))
    whole = copy.deepcopy(model).train(training)
    expected = _step(whole, batch, lambda: None)
    at = [0]

    def between() -> None:
        at[0] = len(group.made)

    steps = [partial(_step, own, batch, between if rank == 0 else lambda: None) for rank, own in enumerate(copies)]
    seen = _on_threads(group, steps)
    worst = [_deviation(rank, whole, own, expected, seen[rank]) for rank, own in enumerate(copies)]
    output, gradient = (max(kind, key=lambda one: one[0]) for kind in zip(*worst, strict=True))
    where = max(output, gradient, key=lambda one: one[0])[1]
    made = group.made
    return Simulation(tuple(made[: at[0]]), tuple(made[at[0] :]), output[0], gradient[0], where)


def planned(
    model: nn.Module, batch: Any, ranks: int = 2, vocabulary: bool = True, sequence: bool = False
) -> tuple[Plan, Simulation]:
    """Return the sharding plan for ``model``, and its simulation in evaluation mode.

    Raises:
        TraceError: the model cannot be traced.
        ShardError: the plan cannot be applied, a rank raises, or the ranks run different collectives.
    """
    plan = create_schedule(copy.deepcopy(model), batch).shard_plan(ranks, vocabulary, sequence)
    return plan, simulate(model, batch, lambda sch: sch.apply_plan(plan), ranks)


def _step(model: nn.Module, batch: Any, between: Callable[[], None]) -> list[Tensor]:
    """Run forward and backward, and return the floating-point outputs."""
    args, kwargs = as_call(copy.deepcopy(batch))
    output = model(*args, **kwargs)
    between()
    floating = [t for t in tensors(output) if t.is_floating_point()]
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = sum(_weighted(tensor) for tensor in floating if tensor.requires_grad)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return [t.detach() for t in floating]


def _weighted(tensor: Tensor) -> Tensor:
    """Return the sum of the ordinary values of ``tensor``, weighted by fixed random numbers.

    A plain sum is constant for softmax and norms.
    """
    weight = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.ndim))
    return (torch.where(tensor.detach().abs() < limit_of(tensor.dtype), tensor, 0.0) * weight).sum()


def _on_threads(group: SimulatedRanks, steps: Sequence[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(steps)
    errors: list[Exception | None] = [None] * len(steps)

    def work(rank: int) -> None:
        try:
            with group.running(rank), user_code():
                results[rank] = steps[rank]()
        except (ScheduleError, UserCodeError) as failed:  # raised again below
            errors[rank] = raised_by(failed)
            group.leave()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if raised:
        rank, error = next((one for one in raised if "does not come" not in str(one[1])), raised[0])
        if isinstance(error, ScheduleError):
            raise error
        raise ShardError(
            f"rank {rank} raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="leave the modules that this comes from whole",
        ) from error
    return results


Worst = tuple[float, str]


def _deviation(
    rank: int, whole: nn.Module, own: nn.Module, expected: list[Tensor], got: list[Tensor]
) -> tuple[Worst, Worst]:
    """Return the worst output and the worst gradient of one rank."""
    if len(expected) != len(got):
        return (float("inf"), f"rank {rank} returns {len(got)} tensors"), (0.0, "")
    outputs = [(_apart(a, b), f"rank {rank}, output {at}") for at, (a, b) in enumerate(zip(expected, got, strict=True))]
    gradients: list[Worst] = [(0.0, "")]
    seen = [p.grad for p in whole.parameters() if p.grad is not None and p.grad.numel()]
    floor = 1e-3 * max((float(gradient.abs().max()) for gradient in seen), default=0.0)
    for path, module in own.named_modules():
        twin = whole.get_submodule(path)
        for name, parameter in module._parameters.items():
            reference = twin._parameters.get(name)
            if parameter is None or reference is None or reference.grad is None:
                continue
            label = f"rank {rank}, gradient of {path}.{name}"
            if parameter.grad is None:
                gradients.append((float("inf"), label))
                continue
            share = _share(module, name, reference.grad, rank)
            gradients.append((_apart(share, parameter.grad, max(floor, 1e-6)), label))
    return max(outputs, default=(0.0, "")), max(gradients)


def _share(module: nn.Module, name: str, gradient: Tensor, rank: int) -> Tensor:
    sharding = sharding_of(module)
    split = sharding.splits.get(name) if sharding is not None else None
    if sharding is None or split is None or split.stays_whole:
        return gradient
    return part_of(gradient, split.axis, split.parts, sharding.ranks, rank)


def _apart(expected: Tensor, got: Tensor, floor: float = 1e-6) -> float:
    """Return the largest difference, relative to the largest expected value or ``floor``."""
    if expected.shape != got.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    expected, got = expected.detach().double(), got.detach().double()
    finite = expected.abs() < 1e30  # not of NaN
    same = torch.equal(finite, got.abs() < 1e30) and torch.equal(expected.isnan(), got.isnan())
    if not same or not torch.equal(expected[~finite].nan_to_num().sign(), got[~finite].nan_to_num().sign()):
        return float("inf")
    difference = (expected - got)[finite].abs()
    scale = expected[finite].abs().max() if bool(finite.any()) else torch.tensor(1.0)
    return float(difference.max() / scale.clamp_min(floor)) if difference.numel() else 0.0
