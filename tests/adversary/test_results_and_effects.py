"""What a forward leaves behind besides its numbers, and when: attributes, errors, objects it returns or hands on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of
from tests.adversary.effects import Base, pair

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore::UserWarning")


def outcome(run: Callable[[], Any]) -> Any:
    """Return what ``run`` returns, or the class of its error."""
    try:
        return run()
    except (RuntimeError, IndexError) as error:
        return type(error)


# -- attributes that other code reads ------------------------------------------------------------------------------


class Reading(nn.Module):
    """Reads an attribute of the module around it."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, h: Tensor) -> Tensor:
        """Multiply by the mask."""
        return h * self.owner[0].mask


class Assigning(Base):
    """Assigns a mask for a child that reads it."""

    def __init__(self, branching: bool = False) -> None:
        super().__init__()
        self.child, self.mask, self.branching = Reading(self), torch.zeros(16), branching

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Assign before, in between and at the end."""
        self.mask = mask
        h = self.child(F.gelu(self.fc1(x)))
        self.mask = mask + 1
        if self.branching and h.sum() > 0:
            h = h * 3
        h = self.child(h)
        self.mask = self.mask * 2
        self.mask = self.mask * 2
        return self.fc2(h)


@pytest.mark.parametrize("branching", [False, True])
def test_a_child_reads_what_was_assigned_before_its_call(branching: bool) -> None:
    torch.manual_seed(0)
    model, twin = pair(Assigning(branching), torch.randn(2, 8), torch.ones(16))
    masks = [torch.full((16,), number) for number in (1.0, -2.0, 3.0, -4.0)]
    for mask in masks:
        x = torch.randn(2, 8)
        torch.testing.assert_close(model(x, mask), twin(x, mask))
        torch.testing.assert_close(model.mask, twin.mask)


class Hooked(Base):
    """Assigns a mask before it calls a layer that may get a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(16, 16), torch.zeros(16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Assign, then call."""
        self.mask = mask
        return self.fc2(self.layer(F.gelu(self.fc1(x))))


def test_a_hook_reads_what_was_assigned_before_the_call() -> None:
    model, twin = pair(Hooked(), torch.randn(2, 8), torch.ones(16))
    for each in (model, twin):
        each.layer.register_forward_hook(lambda module, args, out, owner=each: out * owner.mask)
    x, mask = torch.randn(2, 8), torch.full((16,), 3.0)
    torch.testing.assert_close(model(x, mask), twin(x, mask))


class Running(Base):
    """Keeps a running sum, and branches on data after a child was called."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.sum = nn.Linear(16, 16), torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the sum before the branch: an attempt that is given up must not count."""
        h = F.gelu(self.fc1(x))
        self.sum = self.sum + h.detach().sum(0)
        h = self.child(h + self.sum)
        return self.fc2(h * 2 if h.sum() > 0 else h * 3)


def test_an_assignment_is_undone_where_a_graph_is_given_up() -> None:
    torch.manual_seed(0)
    model, twin = pair(Running(), torch.randn(2, 8))
    for _ in range(8):
        x = torch.randn(2, 8)
        model.sum, twin.sum = torch.zeros(16), torch.zeros(16)
        for _ in range(2):
            torch.testing.assert_close(model(x), twin(x))
            torch.testing.assert_close(model.sum, twin.sum)
    assert state_of(model).adaptations, "no attempt was given up"


# -- computations that only check -----------------------------------------------------------------------------------


class Guarded(Base):
    """Computes something only for the error it may raise."""

    def __init__(self, check: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.check = check

    def forward(self, x: Tensor, data: Tensor) -> Tensor:
        """Check, and use nothing of it."""
        self.check(data)
        return self.core(x)


GOOD, BAD = 2.0, 7.0
CHECKS: dict[str, Callable[[Tensor], Any]] = {
    "_assert_async": lambda d: torch._assert_async((d < 5).all()),
    "_assert_async with a message": lambda d: torch._assert_async((d < 5).all(), "large"),
    "cholesky": lambda d: torch.linalg.cholesky(torch.eye(2) * (5 - d)),
    "Tensor.inverse": lambda d: (torch.eye(2) * (7 - d)).inverse(),
    "inverse": lambda d: torch.linalg.inv(torch.eye(2) * (7 - d)),
    "solve": lambda d: torch.linalg.solve(torch.eye(2) * (7 - d), torch.ones(2)),
    "embedding": lambda d: F.embedding(d.long()[None], torch.zeros(4, 3)),
    "index": lambda d: torch.zeros(4)[d.long()[None]],
    "index by a number": lambda d: torch.zeros(4)[d.long()],
    "index_select": lambda d: torch.zeros(4).index_select(0, d.long()[None]),
    "gather": lambda d: torch.zeros(4).gather(0, index=d.long()[None]),
    "take": lambda d: torch.zeros(4).take(d.long()[None]),
    "scatter": lambda d: torch.zeros(4).scatter(0, d.long()[None], 1.0),
    "cross entropy": lambda d: F.cross_entropy(torch.zeros(1, 4), d.long()[None]),
    "binary cross entropy": lambda d: F.binary_cross_entropy(torch.ones(1), d[None] / 4),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_computation_that_only_checks_still_raises(name: str) -> None:
    good, bad = torch.tensor(GOOD), torch.tensor(BAD)
    model, twin = pair(Guarded(CHECKS[name]), torch.randn(2, 8), good)
    x = torch.randn(2, 8)
    torch.testing.assert_close(model(x, good), twin(x, good))
    assert isinstance(outcome(lambda: twin(x, bad)), type), "it raises"
    assert outcome(lambda: model(x, bad)) is outcome(lambda: twin(x, bad))
    assert not state_of(model).fallbacks


UNUSED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda d: (d + 1).sum(),
    "views": lambda d: d[None].view(1, 1).transpose(0, 1)[:, 0],
    "product": lambda d: d[None, None] @ torch.ones(1, 2),
    "softmax": lambda d: torch.cat([d[None], d[None]]).softmax(0),
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_computation_that_cannot_raise_is_left_out(name: str) -> None:
    sch = schedule.create_schedule(Guarded(UNUSED[name]), (torch.randn(2, 8), torch.tensor(GOOD))).trace()
    assert all(len(each.graph.nodes) <= 6 for each in sch.specializations), sch.specializations[0].graph


# -- methods named like questions -----------------------------------------------------------------------------------


class State:
    """Counts in methods named like questions, and asks in others."""

    def __init__(self) -> None:
        self.count, self.log, self.scale = 0, [], torch.zeros(2)

    def get_next(self) -> int:
        """Count."""
        self.count += 1
        return self.count

    def has_room(self) -> bool:
        """Log that it was asked."""
        self.log.append(1)
        return True

    def is_ready(self) -> bool:
        """Write to a tensor in place."""
        self.scale.add_(1)
        return True

    def __len__(self) -> int:
        self.count += 1
        return 3

    def get_count(self) -> int:
        """Only ask."""
        return self.count


ASKED: dict[str, Callable[[State], Any]] = {
    "unused": lambda s: s.get_next(),
    "used in a branch": lambda s: None if s.has_room() else s.get_next(),
    "used twice": lambda s: (s.get_next(), s.get_next()),
    "writes a tensor": lambda s: s.is_ready(),
    "length": lambda s: len(s),
}


class Asking(Base):
    """Asks an object that it is given."""

    def __init__(self, ask: Callable[[State], Any]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor, state: State) -> Tensor:
        """Ask."""
        self.ask(state)
        return self.core(x)


@pytest.mark.parametrize("name", ASKED)
def test_a_method_named_like_a_question_may_change_its_object(name: str) -> None:
    torch.manual_seed(0)
    model, twin = pair(Asking(ASKED[name]), torch.randn(2, 8), State())
    ours, theirs, x = State(), State(), torch.randn(2, 8)
    for _ in range(3):
        torch.testing.assert_close(model(x, ours), twin(x, theirs))
        assert (ours.count, ours.log, ours.scale.tolist()) == (theirs.count, theirs.log, theirs.scale.tolist())


def test_a_question_that_changes_nothing_is_left_out() -> None:
    sch = schedule.create_schedule(Asking(lambda s: s.get_count()), (torch.randn(2, 8), State())).trace()
    assert all(node.target != "get_count" for each in sch.specializations for node in each.graph.nodes)


# -- what tracing leaves behind -------------------------------------------------------------------------------------


class Registering(Base):
    """Registers hooks on its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Register, and compute."""
        self.fc1.weight.register_hook(lambda grad: grad * 3)
        self.fc2.weight.register_hook(lambda grad: grad * 3)
        self.fc2.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return self.core(x)


@pytest.mark.filterwarnings("ignore")
def test_hooks_of_parameters_are_those_from_before() -> None:
    model, calls = Registering(), []
    handle = model.fc2.weight.register_hook(lambda grad: calls.append(1))
    schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    assert not model.fc1.weight._backward_hooks and not model.fc2.weight._post_accumulate_grad_hooks
    assert list(model.fc2.weight._backward_hooks) == [handle.id]
    model.core(torch.randn(2, 8)).sum().backward()
    assert calls == [1]
    handle.remove()
    assert not model.fc2.weight._backward_hooks


SEEDS: dict[str, Callable[[], Any]] = {
    "manual_seed": lambda: torch.manual_seed(5),
    "seed": lambda: torch.seed(),
    "set_rng_state": lambda: torch.set_rng_state(torch.get_rng_state()),
}


class Seeding(Base):
    """Seeds torch, and draws."""

    def __init__(self, seed: Callable[[], Any]) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        """Seed, and draw."""
        self.seed()
        return self.core(x) + torch.randn_like(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEDS)
def test_a_forward_that_seeds_is_refused_and_reseeds_nothing(name: str) -> None:
    model = Seeding(SEEDS[name])
    torch.manual_seed(11)
    before = torch.get_rng_state()
    report = schedule.optimize(model, (torch.randn(2, 8, generator=torch.Generator()),), cost_guard=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert any(f"the forward calls torch.{name}" in str(each.reason) for each in report.select(status="skipped"))
