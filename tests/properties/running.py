"""A random schedule made step by step, with what must hold after each step and at the end."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import schedule
from schedule import Recipe, RecipeError, Schedule, ScheduleError
from tests.fingerprint import fingerprint
from tests.properties.actions import ACTIONS, Held, Numbers
from tests.recipes.checking import check_text

Step = tuple[int, Numbers]
"""(which action, which of what there is to choose from)."""

UNDO, REDO, HOLD, USE = (len(ACTIONS) + i for i in range(4))
KINDS = len(ACTIONS) + 4


def example() -> torch.Tensor:
    """What the models are called with: [rows, length, width]."""
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


@dataclass
class Run:
    """A schedule in the making.

    Attributes:
        model: the model.
        twin: a copy of it that nothing is done to.
        known: number of steps → what everything was like then.
        refused: what was refused, for the record.
    """

    model: nn.Module
    twin: nn.Module = field(init=False)
    sch: Schedule = field(init=False)
    known: dict[int, dict[str, Any]] = field(default_factory=dict)
    held: Held = field(default_factory=Held)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.twin = copy.deepcopy(self.model)
        self.sch = schedule.create_schedule(self.model, example())
        self.known[0] = fingerprint(self.sch)

    def take(self, step: Step) -> None:
        """Do it; if it is refused, everything must be as it was, and what it did is undone to the bit."""
        kind, numbers = step
        before, recipe = fingerprint(self.sch), self.recipe()
        self.known[len(self.sch.history)] = before
        undone = self.sch.tree.history.undone
        try:
            self.act(kind, numbers)
        except ScheduleError as error:
            assert str(error) and error.why, "an error says what is wrong"
            assert not changed(before, fingerprint(self.sch)), f"after {error}"
            assert self.recipe() == recipe and self.sch.tree.history.undone == undone
            self.refused.append(f"{type(error).__name__}: {error.why}")
        count = len(self.sch.history)
        if kind in (UNDO, REDO):
            self.check_known()
        self.known = {length: seen for length, seen in self.known.items() if length <= count}

    def act(self, kind: int, numbers: Numbers) -> None:
        """One of the actions, or what concerns the history."""
        if kind == UNDO:
            for _ in range(max(1, min(1 + numbers[0] % 3, len(self.sch.history)))):
                self.sch.undo()
                self.check_known()
        elif kind == REDO:
            self.sch.redo()
        elif kind == HOLD:
            self.held.find(self.sch, numbers)
        elif kind == USE:
            self.held.use(self.sch, numbers)
        else:
            ACTIONS[kind](self.sch, numbers)

    def recipe(self) -> Recipe | None:
        """What was done, as data; through JSON and Python. None if it cannot be written."""
        try:
            recipe = self.sch.recipe()
        except RecipeError:
            return None
        check_text(recipe)
        return recipe

    def check_known(self) -> None:
        """After an undo or redo everything is as it was when that many steps were done."""
        before = self.known.get(len(self.sch.history))
        assert before is None or not changed(before, fingerprint(self.sch))

    def check_equal(self) -> None:
        """Outputs and gradients are those of the twin, in training and evaluation, at other sizes too."""
        report = schedule.equivalent(self.twin, self.model, example(), steps=0)
        assert report.equal, f"{[step.description for step in self.sch.history]}\n{report}"

    def check_replayed(self) -> None:
        """The recipe does the same to the twin's copy, to the bit."""
        recipe = self.recipe()
        if recipe is None:
            return
        replayed = schedule.replay(copy.deepcopy(self.twin), recipe, example())
        assert not recipe.diff(replayed.recipe()), recipe.diff(replayed.recipe())
        assert _same(results(self.model), results(replayed.module))

    def check_undone(self) -> None:
        """Without any step the model is the twin, to the bit."""
        while self.sch.history:
            self.sch.undo()
            self.check_known()
        assert _same(results(self.twin), results(self.model))


def check(model: nn.Module, steps: Sequence[Step]) -> int:
    """Every property, of one model and one schedule; the number of steps that it ended with."""
    run = Run(model)
    for step in steps:
        run.take(step)
    count = len(run.sch.history)
    run.check_equal()
    run.check_replayed()
    run.check_undone()
    return count


def check_rules(model: nn.Module, rules: str) -> int:
    """What a set of rules makes of a model, second derivatives included; the number of rewrites."""
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, example(), rules=rules, cost_guard=False)
    found = schedule.equivalent(twin, model, example(), steps=1)
    assert found.equal, f"{report.applied}\n{found}"
    while report.schedule.history:
        report.schedule.undo()
    assert _same(results(twin), results(model))
    return sum(report.applied.values())


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What differs, by module and kind."""
    found: dict[str, Any] = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= {
                f"{key}: {k}": (old.get(k), new.get(k)) for k in old.keys() | new.keys() if old.get(k) != new.get(k)
            }
        elif old != new:
            found[key] = (old, new)
    return found


def results(model: nn.Module) -> list[torch.Tensor]:
    """Outputs in training, gradients, and outputs in evaluation."""
    found: list[torch.Tensor] = []
    for training in (True, False):
        model.train(training)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            x = example().requires_grad_()
            out = model(x)
            outputs = [out] if isinstance(out, torch.Tensor) else list(out.values() if isinstance(out, dict) else out)
            total = sum((each.square().sum() for each in outputs), torch.zeros(()))
            gradients = torch.autograd.grad(total, [x, *model.parameters()], allow_unused=True)
        found += [each.detach() for each in outputs]
        found += [each for each in gradients if each is not None]
    model.train()
    return found


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
