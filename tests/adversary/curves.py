"""Loss curves of a scheduled model and of an untouched twin that a tool trains in the same way.

A *way* is a function that builds a model from a :class:`Run`, trains it with some tool and returns a :class:`Curve`. It
calls :meth:`Run.schedule` at the point of the program where a user would schedule; for the twin that call does nothing,
so both runs execute the same lines.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import schedule
from schedule.rules import Rule
from schedule.runtime.scheduled import state_of
from schedule.verify.observe import rms
from tests.zoo import batch, build

STEPS = 20
LOSS_TOLERANCE = 1e-5
"""Relative, per step, in float32: the rounding of one step grows to 1e-6 to 5e-6 in 20, most where dropout is high."""
UPDATE_TOLERANCE = 1e-3
"""Of the size of a parameter's update: most differ by 1e-5, biases of keys, whose gradients are rounding, by 2e-4."""

Rules = str | Sequence[str | Rule] | None
Tensors = dict[str, Tensor]


@dataclass
class Curve:
    """What a training run leaves behind.

    Attributes:
        losses: of each step.
        start: parameters before the first step.
        end: parameters after the last.
        others: losses of evaluations, norms of gradients, and whatever else must agree.
        fallbacks: how many calls ran an original forward because no graph held for them.
        misses: the warnings about these, one for each module.
    """

    losses: list[float] = field(default_factory=list)
    start: Tensors = field(default_factory=dict)
    end: Tensors = field(default_factory=dict)
    others: list[float] = field(default_factory=list)
    fallbacks: int = 0
    misses: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: the architecture, of :mod:`tests.zoo`.
        rules: what to schedule with; None for the untouched twin.
        seed: of the data; ranks have different ones.
    """

    name: str
    rules: Rules
    seed: int = 0

    def build(self) -> nn.Module:
        """The model, with the same weights in every run."""
        return build(self.name)

    def schedule(self, model: nn.Module) -> nn.Module:
        """Schedule ``model``; leave a twin alone."""
        if self.rules is not None:
            report = schedule.optimize(model, self.batch(0), rules=self.rules, cost_guard=False)
            assert report.applied, f"nothing was rewritten: {report}"
            assert scheduled(model)
        return model

    def batch(self, number: int) -> Tensors:
        """The data of one step: four batches of different sizes in turns, which a model learns by heart."""
        number %= 4
        return batch(self.name, 2 + number % 2, 5 + number, 1000 * self.seed + number)


def scheduled(model: nn.Module) -> list[str]:
    """Paths of scheduled modules."""
    return [path for path, module in model.named_modules() if state_of(module) is not None]


def fallbacks(model: nn.Module) -> int:
    """How many calls of modules of ``model`` ran an original forward."""
    return sum(state.fallbacks for module in model.modules() if (state := state_of(module)) is not None)


def optimizer_for(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose epsilon keeps it from magnifying gradients that are zero but for rounding, as those of key biases."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def values(model: nn.Module) -> Tensors:
    """Copies of all parameters, shards put together."""
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {name: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone() for name, each in named}


def loss_of(model: nn.Module, run: Run, number: int) -> Tensor:
    """The loss of step ``number``, with its own random draws."""
    torch.manual_seed(number)
    loss: Tensor = model(**run.batch(number)).loss
    return loss


def evaluated(model: nn.Module, run: Run, number: int = 100) -> float:
    """The loss in evaluation; the model trains on afterwards."""
    model.eval()
    with torch.no_grad():
        loss = float(loss_of(model, run, number))
    model.train()
    return loss


Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, int], None]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
    """Backward and update."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(
    model: nn.Module,
    run: Run,
    step: Step = plain_step,
    optimizer: torch.optim.Optimizer | None = None,
    numbers: Iterable[int] = range(STEPS),
) -> Curve:
    """Train ``model`` in a plain loop."""
    optimizer = optimizer or optimizer_for(p for p in model.parameters() if p.requires_grad)
    curve = Curve(start=values(model))
    model.train()
    for number in numbers:
        loss = loss_of(model, run, number)
        curve.losses.append(float(loss.detach()))
        step(model, optimizer, loss, number)
    curve.end, curve.fallbacks = values(model), fallbacks(model)
    return curve


def worst_loss(ours: Curve, theirs: Curve) -> float:
    """The largest relative difference of two losses."""
    mine, other = [*ours.losses, *ours.others], [*theirs.losses, *theirs.others]
    assert len(mine) == len(other), (len(mine), len(other))
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(mine, other, strict=True))


def worst_update(ours: Curve, theirs: Curve) -> tuple[float, str]:
    """The largest difference of a parameter over the twin's update of it, both by RMS, and the parameter."""
    assert ours.end.keys() == theirs.end.keys(), ours.end.keys() ^ theirs.end.keys()
    found = []
    for name, expected in theirs.end.items():
        moved = rms(expected - theirs.start[name])
        found.append((rms(ours.end[name] - expected) / max(moved, 1e-6), name))
    return max(found)


def observed(way: Callable[[Run], Curve], run: Run) -> Curve:
    """The curve of a run, with the warnings about fallbacks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", schedule.FallbackWarning)
        curve = way(run)
    curve.misses = [str(each.message) for each in caught if issubclass(each.category, schedule.FallbackWarning)]
    return curve


def compare(
    ours: Curve,
    theirs: Curve,
    loss: float = LOSS_TOLERANCE,
    update: float = UPDATE_TOLERANCE,
    documented: str = r"(?!)",
) -> None:
    """Fail unless a scheduled model trained like its twin.

    Args:
        ours: of the scheduled model.
        theirs: of the twin.
        loss: tolerance of each loss, relative.
        update: tolerance of each parameter, relative to its update.
        documented: which warnings about fallbacks the documentation announces, as a regular expression.
    """
    assert all(torch.tensor(theirs.losses).isfinite())
    moved = [name for name, value in theirs.end.items() if not torch.equal(value, theirs.start[name])]
    assert len(moved) > 0.2 * len(theirs.end), "the twin hardly trains, so nothing would show"
    off = worst_loss(ours, theirs)
    assert off <= loss, f"losses differ by {off:.1e}:\n{ours.losses}\n{theirs.losses}\n{ours.others}\n{theirs.others}"
    by, name = worst_update(ours, theirs)
    assert by <= update, f"{name} differs by {by:.1e} of its update"
    unexpected = [miss for miss in ours.misses if not re.search(documented, miss)]
    assert not unexpected, unexpected[0]
    assert ours.misses or not ours.fallbacks, f"{ours.fallbacks} calls ran an original forward without a warning"
