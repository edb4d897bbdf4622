"""What scheduling must not leave behind: every run of the user's forward by us is undone, wherever it wrote."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import schedule
from schedule.capture.snapshots.snapshot import Snapshot
from schedule.util.errors import ScheduleError

LOG: list[Any] = []
TABLE: dict[str, Any] = {}
NAMES: set[Any] = set()
COUNT = 0


@dataclass
class Notes:
    """An object that holds others."""

    entries: list[Any] = field(default_factory=list)
    inner: Any = field(default_factory=lambda: SimpleNamespace(count=0, last=None))


class Packed(nn.Parameter):
    """A parameter that is packed at its first use, as those of libraries for quantization are."""

    is_packed = False


class Converting(torch.Tensor):
    """A tensor whose class takes part in torch's functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Slotted:
    """An object without a dict."""

    __slots__ = ("count", "log")

    def __init__(self) -> None:
        self.count, self.log = 0, []


class Child(nn.Module):
    """Something to rewrite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x) + self.bias)


class Model(nn.Module):
    """Writes wherever ``write`` writes."""

    log: ClassVar[list[Any]] = []
    calls = 0

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.child, self.write = Child(), write
        self.notes, self.slotted, self.namespace = Notes(), Slotted(), SimpleNamespace(seen=[])
        self.items, self.table, self.ordered = [0], {"a": [1]}, OrderedDict(a=1, b=2)
        self.many, self.default, self.counter = {1, 2}, defaultdict(list), Counter(a=1)
        self.queue, self.nested, self.numbers = deque([1, 2, 3], maxlen=3), ({"deep": [[]]},), bytearray(b"ab")
        self.draw = random.Random(0)
        self.drawing = torch.Generator().manual_seed(0)
        self.count, self.plain = 0, torch.zeros(3)
        self.wide = torch.zeros(150, 150)
        self.packed = Packed(torch.arange(6.0).reshape(2, 3), requires_grad=False)
        self.broad = nn.Parameter(torch.ones(150, 150))
        self.broad.grad = torch.ones(150, 150)
        self.broad_packed = Packed(torch.ones(150, 150), requires_grad=False)
        self.converting = nn.Parameter(torch.ones(150, 150).as_subclass(Converting))
        self.nested_pair = two_tensors()
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("ring", torch.zeros(150, 150))
        self.appending = partial(_append, self.items)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        return self.child(x)


def two_tensors() -> nn.Parameter:
    """A parameter that computes with two tensors of its own."""
    return nn.Parameter(TwoTensor(torch.ones(150, 150), torch.ones(150, 150)), requires_grad=False)


def _append(target: list[Any], value: Any) -> None:
    target.append(value)


def closing_over() -> Any:
    """A function that counts in a variable, and logs to a list, of the function around it."""
    count, log = 0, []

    def write(model: nn.Module, x: torch.Tensor) -> None:
        nonlocal count
        count += 1
        log.append(x)

    return write


def defaulting(model: Any, x: torch.Tensor, log: list[Any] = [], *, last: dict[str, Any] = {}) -> None:  # noqa: B006
    log.append(x)
    last["x"] = x
    defaulting.calls = getattr(defaulting, "calls", 0) + 1  # type: ignore[attr-defined]


def globally(model: Any, x: torch.Tensor) -> None:
    global COUNT
    COUNT += 1
    LOG.append(x)
    TABLE["x"] = x
    NAMES.add(len(NAMES))


def through_a_helper(model: Any, x: torch.Tensor) -> None:
    globally(model, x)


def on_the_class(model: Any, x: torch.Tensor) -> None:
    type(model).calls += 1
    Model.log.append(x)


def packing(model: Any, x: torch.Tensor) -> None:
    """Packs new data, and writes to the old."""
    if not model.packed.is_packed:
        model.packed.data.mul_(0)
        model.packed.data = torch.zeros(6, dtype=torch.uint8)
        model.packed.is_packed = True


def viewed(model: Any, x: torch.Tensor) -> None:
    model.broad.detach().view(-1)[::7].mul_(3)


def assigning(model: Any, x: torch.Tensor) -> None:
    model.count += 1


def assigning_anew(model: Any, x: torch.Tensor) -> None:
    model.anew = x


def deleting(model: Any, x: torch.Tensor) -> None:
    model.table.pop("a", None)
    if hasattr(model, "plain"):
        del model.plain


WRITES: dict[str, Any] = {
    "list": lambda m, x: m.items.append(x),
    "list in place": lambda m, x: m.items.__setitem__(0, x),
    "list cleared": lambda m, x: m.items.clear(),
    "dict": lambda m, x: m.table.update(b=x),
    "list in a dict": lambda m, x: m.table["a"].append(x),
    "order": lambda m, x: m.ordered.move_to_end("a"),
    "set": lambda m, x: m.many.add(len(m.many) + 7),
    "defaultdict": lambda m, x: m.default["new"].append(x),
    "counter": lambda m, x: m.counter.update("ab"),
    "deque": lambda m, x: m.queue.append(x),
    "nested in a tuple": lambda m, x: m.nested[0]["deep"][0].append(x),
    "bytes": lambda m, x: m.numbers.extend(b"c"),
    "dataclass": lambda m, x: m.notes.entries.append(x),
    "object in an object": lambda m, x: setattr(m.notes.inner, "count", m.notes.inner.count + 1),
    "namespace": lambda m, x: m.namespace.seen.append(x),
    "slot": lambda m, x: setattr(m.slotted, "count", m.slotted.count + 1),
    "list in a slot": lambda m, x: m.slotted.log.append(x),
    "partial": lambda m, x: m.appending(x),
    "its own generator": lambda m, x: m.draw.random(),
    "its own generator of torch": lambda m, x: torch.rand(2, generator=m.drawing),
    "Python's generator": lambda m, x: random.random(),
    "buffer": lambda m, x: m.seen.add_(1),
    "buffer's data": lambda m, x: m.ring.data.add_(1),
    "tensor": lambda m, x: m.plain.add_(1),
    "large tensor": lambda m, x: m.wide.add_(1),
    "storage": lambda m, x: setattr(m.seen, "data", torch.ones(())),
    "parameter's data": lambda m, x: m.child.bias.data.add_(1),
    "argument": lambda m, x: x.mul_(2),
    "parameter packed at its first use": packing,
    "data of a subclass of parameters": lambda m, x: m.packed.data.mul_(2),
    "data of a large subclass of parameters": lambda m, x: m.broad_packed.data.mul_(2),
    "data of a large parameter": lambda m, x: m.broad.data.mul_(2),
    "large parameter": lambda m, x: m.broad.mul_(2),
    "view of a large parameter": viewed,
    "rows of a large parameter": lambda m, x: m.broad.__setitem__(3, 0.0),
    "large parameter with out": lambda m, x: torch.mul(m.broad.data, 2, out=m.broad.data),
    "large parameters in one call": lambda m, x: torch._foreach_mul_([m.broad.data, m.broad_packed.data], 2.0),
    "large gradient": lambda m, x: m.broad.grad.zero_(),
    "data of a tensor of the user's class": lambda m, x: m.converting.data.mul_(2),
    "tensor of the user's class": lambda m, x: m.converting.mul_(2),
    "tensor made of two": lambda m, x: m.nested_pair.mul_(2),
    "sparse tensor": lambda m, x: m.sparse.mul_(2),
    "mark on a parameter": lambda m, x: setattr(m.child.bias, "seen", True),
    "table of a child": lambda m, x: m.child._buffers.update(new=x),
    "default dtype": lambda m, x: torch.set_default_dtype(torch.float64),
    "gradient mode": lambda m, x: torch.set_grad_enabled(True),
    "closure": closing_over(),
    "defaults": defaulting,
    "globals": globally,
    "globals of a helper": through_a_helper,
    "class": on_the_class,
    "attribute": assigning,
    "new attribute": assigning_anew,
    "deleted": deleting,
}


def state(model: nn.Module, x: Any) -> Any:
    """All that a forward of ours may have changed, as a text."""
    roots = (vars(model), x, LOG, TABLE, NAMES, COUNT, Model.log, Model.calls, defaulting.__defaults__)
    closure = tuple(cell.cell_contents for cell in getattr(model.write, "__closure__", None) or ())
    more = (model.draw.getstate(), random.getstate(), tuple(torch.get_rng_state().tolist()), torch.get_default_dtype())
    drawn = tuple(model.drawing.get_state().tolist())
    every = (*model.named_parameters(), *model.named_buffers())
    tensors = tuple((n, text(t.detach()), text(t.grad), text(tuple(vars(t).items()))) for n, t in every)
    slots = (model.slotted.count, model.slotted.log)
    return [text(each) for each in (roots, closure, more, drawn, tensors, slots, vars(defaulting), vars(model.child))]


def text(value: Any) -> str:
    """``value`` with the numbers of tensors, and the identities of lists and dicts."""
    if isinstance(value, TwoTensor):
        return f"two {text(value.a)} {text(value.b)}"
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__}{list(value.shape)}{value.double().sum().item()}"
    if isinstance(value, dict):
        return f"{id(value)}{[(key, text(item)) for key, item in value.items() if key != '_schedule_state']}"
    if isinstance(value, (list, tuple, deque)):
        return f"{id(value) if isinstance(value, list) else ''}{[text(item) for item in value]}"
    if isinstance(value, (Notes, SimpleNamespace)):
        return text(vars(value))
    return repr(value)


def optimized(model: nn.Module, x: torch.Tensor) -> None:
    schedule.optimize(model, (x,), cost_guard=False)


def looked_for(model: nn.Module, x: torch.Tensor) -> None:
    sch = schedule.create_schedule(model, (x,))
    sch.find("bias_gelu")
    sch["child"].find("bias_gelu")


def verified(model: nn.Module, x: torch.Tensor) -> None:
    sch = schedule.create_schedule(model, (x,))
    sch["child"].fuse(sch["child"].find("bias_gelu"))
    schedule.verify(sch, (x,))


@pytest.mark.one_in(3)
@pytest.mark.unreplayable("what a model writes to its own lists is no part of a recipe")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [optimized, looked_for])
@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_left(name: str, run: Any) -> None:
    model, x = Model(WRITES[name]), torch.randn(2, 8)
    before = state(model, x)
    with suppress(ScheduleError):  # it may be refused, and that leaves nothing behind either
        run(model, x)
    assert torch.is_grad_enabled()
    same(state(model, x), before)


def same(now: list[str], before: list[str]) -> None:
    for a, b in zip(now, before, strict=True):
        assert a == b


IN_VERIFY = ("list", "dict", "set", "buffer", "dataclass", "closure", "globals", "slot", "class", "argument")


@pytest.mark.one_in(2)
@pytest.mark.unreplayable("what a model writes to its own lists is no part of a recipe")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_VERIFY)
def test_verify_leaves_nothing(name: str) -> None:
    model, x = Model(WRITES[name]), torch.randn(2, 8)
    before = state(model, x)
    with suppress(ScheduleError):
        verified(model, x)
    same(state(model, x), before)


class Taking(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child()

    def forward(self, x: torch.Tensor, log: Any = None, table: Any = None) -> torch.Tensor:
        x = self.child(x)
        if log is not None:
            log.append(x)
        if table is not None:
            table["x"] = x
            table["inner"].entries.append(x)
        return x


@pytest.mark.parametrize("arguments", ["log", "table"])
def test_arguments_are_left_as_they_were(arguments: str) -> None:
    model, notes = Taking(), Notes()
    given: dict[str, Any] = {"x": torch.randn(2, 8)}
    given[arguments] = [1] if arguments == "log" else {"inner": notes}
    held = given[arguments]
    schedule.optimize(model, given, cost_guard=False)
    assert given[arguments] is held and held == ([1] if arguments == "log" else {"inner": notes})
    assert notes.entries == [] and all(type(each) is torch.Tensor for each in given.values() if each is not held)


def test_a_call_that_is_adapted_to_is_seen_once() -> None:
    model = Taking()
    twin = copy.deepcopy(model)
    schedule.optimize(model, {"x": torch.randn(2, 8)}, cost_guard=False)
    for each in (model, twin):
        log: list[Any] = []
        each(torch.randn(2, 8), log)
        assert len(log) == 1 and type(log[0]) is torch.Tensor
        notes = Notes()
        each(torch.randn(2, 8), None, {"inner": notes})
        assert len(notes.entries) == 1


def test_hooks_fire_in_our_runs_and_what_they_keep_is_put_back() -> None:
    model, seen = Model(lambda m, x: None), []
    model.child.linear.register_forward_hook(lambda module, args, output: seen.append(output))
    schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    assert seen == []
    model(torch.randn(2, 8))
    assert len(seen) == 1


def test_what_cannot_be_put_back_is_told() -> None:
    model = Model(lambda m, x: next(m.steps))
    model.steps = iter([0] * 100)
    with pytest.raises(ScheduleError, match=r"self\.steps .*cannot be put back"):
        schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)


class Deciding(nn.Module):
    """Decides a setting in its first call, as classification heads of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.config = Child(), SimpleNamespace(kind=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "wide" if x.shape[-1] > 4 else "narrow"
        return self.child(x) if self.config.kind == "wide" else x


@pytest.mark.filterwarnings("error")
def test_what_the_first_call_decides_is_decided_by_the_users_first_call() -> None:
    model = Deciding()
    assert schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False).applied
    assert model.config.kind is None
    for _ in range(2):
        model(torch.randn(2, 8))
        assert model.config.kind == "wide"


@pytest.mark.parametrize("name", WRITES)
def test_a_snapshot_names_what_changed_and_restores_it(name: str) -> None:
    if name in ("default dtype", "gradient mode", "Python's generator"):
        return
    model, x = Model(WRITES[name]), torch.randn(2, 8)
    before, snapshot = state(model, x), Snapshot({"self": model, "x": x})
    assert snapshot.difference() is None
    with torch.no_grad(), snapshot.copy_on_write():
        model(x)
    assert ": " in (snapshot.difference() or "")
    snapshot.restore()
    assert snapshot.difference() is None and state(model, x) == before


def test_paths_read_as_code_does() -> None:
    model = Model(lambda m, x: None)
    model.layers = nn.ModuleList([Child()])
    snapshot = Snapshot({"self": model})
    model.items += [1, 2, 3]
    assert snapshot.difference() == "self.items: 3 items more"
    snapshot.restore()
    model.layers[0].mark = 3
    assert snapshot.difference() == "self.layers.0.mark: new"
    snapshot.restore()
    model.table["a"].append(1)
    assert snapshot.difference() == "self.table['a']: 1 item more"
