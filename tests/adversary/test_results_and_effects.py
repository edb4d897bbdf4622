"""What a forward leaves behind besides its numbers, and when: attributes, errors, objects it returns or hands on."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore::UserWarning")


class Base(nn.Module):
    """Something to rewrite, and something odd."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def core(self, x: Tensor) -> Tensor:
        """Compute what the rules rewrite."""
        return self.fc2(F.gelu(self.fc1(x)))


def pair(module: nn.Module, *inputs: Any, rewritten: bool = True) -> tuple[nn.Module, nn.Module]:
    """Return the module, optimized, and an untouched twin."""
    twin = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.optimize(module, inputs, cost_guard=False)
    assert any(state_of(each) for each in module.modules()) == rewritten
    return module, twin


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
    misses = 0
    for _ in range(8):
        x = torch.randn(2, 8)
        model.sum, twin.sum = torch.zeros(16), torch.zeros(16)
        for _ in range(2):
            torch.testing.assert_close(model(x), twin(x))
            torch.testing.assert_close(model.sum, twin.sum)
        misses = state_of(model).fallbacks
    assert misses, "no attempt was given up"


# -- what a forward returns and hands on ----------------------------------------------------------------------------


@dataclasses.dataclass
class Record:
    """A result with names."""

    first: Any
    second: Any


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class Settings:
    """A plain object."""

    def __init__(self, scale: float) -> None:
        self.scale, self.names = scale, ["a"]

    def get(self) -> float:
        """Return the scale."""
        return self.scale


def _closing(h: Tensor) -> Callable[[], Tensor]:
    return lambda: h * 2


MADE: dict[str, Callable[[Tensor], Any]] = {
    "named result of torch": lambda h: h.max(-1),
    "sorted": lambda h: h.sort(-1),
    "sizes": lambda h: (h, h.shape),
    "named tuple": lambda h: Pair(h, 2),
    "dataclass": lambda h: Record(h, [h]),
    "ordered dict": lambda h: collections.OrderedDict(b=h, a=1),
    "one list twice": lambda h: (kept := [h], kept),
    "one list twice in a dict": lambda h: {"a": (kept := [h]), "b": {"c": kept}},
    "one dataclass twice": lambda h: [kept := Record(h, 1), kept],
    "plain object": lambda h: (h, Settings(2.0)),
    "deque of numbers": lambda h: (h, collections.deque([1, 2])),
}
HOLDING: dict[str, Callable[[Tensor], Any]] = {
    "closure": _closing,
    "partial": lambda h: functools.partial(torch.add, h),
    "deque": lambda h: collections.deque([h]),
    "generator": lambda h: (h * number for number in range(2)),
    "map": lambda h: map(torch.neg, [h]),
    "method of an object": lambda h: Pair(h, 2)._replace,
}


class Returning(Base):
    """Returns what ``make`` makes of its result."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        """Return it."""
        return self.make(self.core(x))


def described(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return the classes, the numbers and the identities of the parts of ``value``."""
    seen = {} if seen is None else seen
    number, kind = seen.setdefault(id(value), len(seen)), type(value).__name__
    if isinstance(value, Tensor):
        return kind, number, [round(each, 4) for each in value.detach().double().flatten().tolist()]
    if isinstance(value, (list, tuple, collections.deque)):
        identity = None if type(value) is tuple else number
        return kind, identity, [described(item, seen) for item in value]
    if isinstance(value, (Record, Settings)):
        value = vars(value)
    if isinstance(value, dict):
        return kind, number, [(key, described(item, seen)) for key, item in value.items()]
    return kind, value


@pytest.mark.parametrize("name", MADE)
def test_a_result_has_its_class_and_its_identities(name: str) -> None:
    model, twin = pair(Returning(MADE[name]), torch.randn(2, 8))
    for rows in (2, 3):
        x = torch.randn(rows, 8)
        first, second = model(x), model(x)
        assert described(first) == described(twin(x))
        assert first is not second
    if isinstance(first, tuple) and isinstance(first[1], (Settings, collections.deque)):
        assert first[1] is not second[1], "each call makes one of its own"
    assert state_of(model) is None or not state_of(model).fallbacks


@pytest.mark.parametrize("name", HOLDING)
def test_an_object_that_holds_a_result_is_not_kept_from_the_trace(name: str) -> None:
    model, _ = pair(Returning(HOLDING[name]), torch.randn(2, 8), rewritten=False)
    report = schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    assert any("that the forward makes is returned" in str(each.reason) for each in report.select(status="skipped"))


class Noting(nn.Module):
    """Keeps the class of what it is handed, and appends to a list."""

    def forward(self, h: Tensor, value: Any, kinds: list[str]) -> Tensor:
        """Multiply."""
        kinds.append(type(value).__name__)
        return h * 2


class Handing(Base):
    """Hands what ``make`` makes to a child, with a list of the caller's."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make, self.child = make, Noting()

    def forward(self, x: Tensor, kinds: list[str]) -> Tensor:
        """Hand it on."""
        h = F.gelu(self.fc1(x))
        return self.fc2(self.child(h, self.make(h), kinds))


@pytest.mark.parametrize("name", MADE)
def test_a_child_is_handed_the_class_and_the_list_that_there_is(name: str) -> None:
    model, twin = pair(Handing(MADE[name]), torch.randn(2, 8), [])
    x, ours, theirs = torch.randn(2, 8), [], []
    torch.testing.assert_close(model(x, ours), twin(x, theirs))
    assert ours == theirs and len(ours) == 1


class Passing(Base):
    """Returns what it is given beside its result."""

    def forward(self, x: Tensor, given: Any) -> Any:
        """Return it."""
        return self.core(x), given


@pytest.mark.parametrize(
    "given", [(torch.ones(2), 3), [torch.ones(2)], {"a": [torch.ones(2)]}, Record(torch.ones(2), 1), Pair(1, 2)]
)
def test_the_callers_own_container_comes_back(given: Any) -> None:
    model, twin = pair(Passing(), torch.randn(2, 8), given)
    x = torch.randn(2, 8)
    for each in (model, twin):
        assert each(x, given)[1] is given
    torch.testing.assert_close(model(x, given)[0], twin(x, given)[0])


class Scaling(nn.Module):
    """Asks the object that it is handed, or calls it."""

    def forward(self, h: Tensor, scale: Any) -> Tensor:
        """Multiply."""
        return h * (scale() if callable(scale) else scale.scale)


class Holding(Base):
    """Hands an object of an object to a child, and returns it."""

    def __init__(self, bound: bool) -> None:
        super().__init__()
        self.child, self.config, self.bound = Scaling(), types.SimpleNamespace(part=Settings(2.0)), bound

    def forward(self, x: Tensor) -> Any:
        """Hand it on."""
        part = self.config.part.get if self.bound else self.config.part
        return self.fc2(self.child(F.gelu(self.fc1(x)), part)), part


@pytest.mark.parametrize("bound", [False, True], ids=["object", "method"])
def test_an_object_that_was_replaced_is_not_used(bound: bool) -> None:
    model, twin = pair(Holding(bound), torch.randn(2, 8))
    x = torch.randn(2, 8)
    for scale in (2.0, 5.0):
        for each in (model, twin):
            each.config.part = Settings(scale)
        (ours, part), (theirs, _) = model(x), twin(x)
        torch.testing.assert_close(ours, theirs)
        assert (part.__self__ if bound else part) is model.config.part


@dataclasses.dataclass
class Counting:
    """A dataclass with more state than its fields."""

    scale: float

    def __post_init__(self) -> None:
        self.log: list[Any] = []


@pytest.mark.parametrize("given", [True, False], ids=["argument", "attribute"])
def test_a_dataclass_from_outside_comes_back(given: bool) -> None:
    record = Counting(2.0)

    class Kept(Passing):
        def forward(self, x: Tensor, own: Any = None) -> Any:
            return self.core(x), own if given else self.record

    module = Kept()
    module.record = record
    model, _ = pair(module, torch.randn(2, 8), *([record] if given else []))
    found = model(torch.randn(2, 8), *([record] if given else []))[1]
    assert found is record and not state_of(model).fallbacks


def test_a_part_of_the_callers_container_comes_back() -> None:
    class Part(Passing):
        def forward(self, x: Tensor, given: Any) -> Any:
            return self.core(x), given["inner"]

    given = {"inner": (torch.ones(2), 1)}
    model, _ = pair(Part(), torch.randn(2, 8), given)
    assert model(torch.randn(2, 8), given)[1] is given["inner"]


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
    "Tensor.cholesky": lambda d: (torch.eye(2) * (5 - d)).cholesky(),
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
