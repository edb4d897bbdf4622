"""State that a submodule or a hook changes during a call, not in the recorded one: read afterwards, it is an error."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import install
from schedule.util.errors import ScheduleError

GAIN = 2.0


class Settings:
    """Settings, as in a config."""

    def __init__(self) -> None:
        self.gain, self.gains, self.by_name = 2.0, [2.0, 3.0], {"gain": 2.0}


class Child(nn.Module):
    """A submodule that may change the state of its parent, which it holds outside of its submodules."""

    def __init__(self, holder: list[Any]) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.holder, self.change = holder, None

    def forward(self, x: Tensor) -> Tensor:
        if self.change is not None:
            self.change(self.holder[0])
        return self.proj(x)


Read = Callable[[Any], Any]


class Parent(nn.Module):
    """A forward that reads ``before`` and ``after`` the call of its child."""

    def __init__(self, before: Read, after: Read) -> None:
        super().__init__()
        self.before, self.after, self.config, self.gain = before, after, Settings(), 2.0
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("table", torch.ones(2))
        self.child = Child([self])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        early = self.before(self)
        y = self.child(x * early)
        return self.last(torch.tanh(y * self.after(self)))


def nothing(m: Any) -> float:
    return 1.0


def of_attribute(m: Any) -> Any:
    return m.gain


def of_config(m: Any) -> Any:
    return m.config.gain


def of_list(m: Any) -> Any:
    return m.config.gains[0]


def of_length(m: Any) -> Any:
    return len(m.config.gains)


def of_dict(m: Any) -> Any:
    return m.config.by_name["gain"]


def of_global(m: Any) -> Any:
    return GAIN


def of_presence(m: Any) -> Any:
    return 3.0 if hasattr(m, "extra") else 2.0


def of_training(m: Any) -> Any:
    return 3.0 if m.last.training else 2.0


def set_attribute(m: Any) -> None:
    m.gain = 5.0


def set_config(m: Any) -> None:
    m.config.gain = 5.0


def replace_config(m: Any) -> None:
    m.config = Settings()
    m.config.gain, m.config.gains, m.config.by_name = 7.0, [7.0], {"gain": 7.0}


def set_item(m: Any) -> None:
    m.config.gains[0] = 5.0


def append(m: Any) -> None:
    m.config.gains.append(5.0)


def set_entry(m: Any) -> None:
    m.config.by_name["gain"] = 5.0


def set_global(m: Any) -> None:
    sys.modules[__name__].GAIN = 5.0  # type: ignore[attr-defined]


def add_attribute(m: Any) -> None:
    m.extra = True


def set_training(m: Any) -> None:
    m.last.training = not m.last.training


def of_gradient(m: Any) -> Any:
    return 3.0 if m.last.weight.requires_grad else 2.0


def of_text_of_gradient(m: Any) -> Any:
    return len(str(m.last.weight.requires_grad))


def of_size(m: Any) -> Any:
    return 3.0 if m.table.shape[0] > 3 else 2.0


def set_gradient(m: Any) -> None:
    m.last.weight.requires_grad_(False)


def set_table(m: Any) -> None:
    m.table = torch.ones(7)


def resize_table(m: Any) -> None:
    m.table.data = torch.ones(7)


class Common:
    """State of a class."""

    gain = 2.0
    by_name: dict[str, float] = {"gain": 2.0}  # noqa: RUF012

    @staticmethod
    def static() -> float:
        return 2.0


def _closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    gain = 2.0

    def put(value: float) -> None:
        nonlocal gain
        gain = value

    return lambda: gain, put


held, put_held = _closure()


SETTINGS: Any = types.ModuleType("adversary_settings")
SETTINGS.gain = 2.0


def five() -> float:
    return 5.0


def two() -> float:
    return 2.0


def of_class(m: Any) -> Any:
    return Common.gain


def of_dict_of_class(m: Any) -> Any:
    return Common.by_name["gain"]


def of_static_method(m: Any) -> Any:
    return Common.static()


def of_closure(m: Any) -> Any:
    return held()


def of_code(m: Any) -> Any:
    return two()


def of_grad_mode(m: Any) -> Any:
    return 2.0 if torch.is_grad_enabled() else 5.0


def of_default_dtype(m: Any) -> Any:
    return 2.0 if torch.get_default_dtype() is torch.float32 else 5.0


def of_determinism(m: Any) -> Any:
    return 5.0 if torch.are_deterministic_algorithms_enabled() else 2.0


def of_python_module(m: Any) -> Any:
    return SETTINGS.gain


def set_python_module(m: Any) -> None:
    SETTINGS.gain = 5.0


def set_class(m: Any) -> None:
    Common.gain = 5.0


def set_dict_of_class(m: Any) -> None:
    Common.by_name["gain"] = 5.0


def set_static_method(m: Any) -> None:
    Common.static = staticmethod(five)  # type: ignore[method-assign]


def set_closure(m: Any) -> None:
    put_held(5.0)


def set_code(m: Any) -> None:
    two.__code__ = five.__code__


def set_grad_mode(m: Any) -> None:
    torch.set_grad_enabled(False)


def set_default_dtype(m: Any) -> None:
    torch.set_default_dtype(torch.float64)


def set_determinism(m: Any) -> None:
    torch.use_deterministic_algorithms(True)


OUTSIDE: list[tuple[Read, Callable[[Any], None]]] = [
    (of_class, set_class),
    (of_dict_of_class, set_dict_of_class),
    (of_static_method, set_static_method),
    (of_closure, set_closure),
    (of_code, set_code),
    (of_grad_mode, set_grad_mode),
    (of_default_dtype, set_default_dtype),
    (of_determinism, set_determinism),
    (of_python_module, set_python_module),
]
"""Changes of what does not belong to the module."""

CHANGES: list[tuple[Read, Callable[[Any], None]]] = [
    (of_attribute, set_attribute),
    (of_config, set_config),
    (of_config, replace_config),
    (of_list, set_item),
    (of_list, replace_config),
    (of_length, append),
    (of_dict, set_entry),
    (of_global, set_global),
    (of_presence, add_attribute),
    (of_training, set_training),
    (of_gradient, set_gradient),
    (of_text_of_gradient, set_gradient),
    (of_size, set_table),
    (of_size, resize_table),
    *OUTSIDE,
]


CHANGED = "code that the forward calls has (changed|replaced) it"


_STATIC, _CODE = vars(Common)["static"], two.__code__


def put_back() -> None:
    """Put back what changes outside of modules have changed."""
    sys.modules[__name__].GAIN = 2.0  # type: ignore[attr-defined]
    Common.gain, Common.by_name["gain"], two.__code__ = 2.0, 2.0, _CODE
    Common.static = _STATIC  # type: ignore[method-assign]
    SETTINGS.gain = 2.0
    put_held(2.0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _outside() -> Any:
    yield
    put_back()


def traced(before: Read, after: Read) -> tuple[Parent, Parent, Tensor]:
    """Return a model with graphs for itself alone, an untouched copy, and an input."""
    torch.manual_seed(0)
    module = Parent(before, after)
    return module, *running_graphs(module)


def running_graphs(module: nn.Module) -> tuple[Any, Tensor]:
    """Give ``module`` graphs for itself alone, and return an untouched copy and an input."""
    x, twin = torch.randn(2, 4), copy.deepcopy(module)
    sch = schedule.create_schedule(module, (x,))
    sch.trace()
    install(module, sch.specializations)
    torch.testing.assert_close(module(x), twin(x))
    return twin, x


@pytest.mark.parametrize("by_hook", [False, True])
@pytest.mark.parametrize(("read", "change"), CHANGES)
def test_a_change_that_is_read_afterwards_is_an_error(read: Read, change: Callable[[Any], None], by_hook: bool) -> None:
    module, _, x = traced(nothing, read)
    if by_hook:
        handle = module.child.proj.register_forward_hook(lambda *_: change(module))
    else:
        module.child.change = change
    with pytest.raises(ScheduleError, match=f"changed while child ran.*Parent reads it afterwards|{CHANGED}"):
        module(x)
    if by_hook:
        handle.remove()


@pytest.mark.parametrize(("read", "change"), CHANGES)
def test_what_is_read_again_counts(read: Read, change: Callable[[Any], None]) -> None:
    module, _, x = traced(read, read)
    module.child.change = change
    with pytest.raises(ScheduleError, match=f"changed while child ran|{CHANGED}"):
        module(x)


@pytest.mark.parametrize(("read", "change"), CHANGES)
def test_a_change_of_what_was_read_before_is_as_untouched(read: Read, change: Callable[[Any], None]) -> None:
    module, twin, x = traced(read, nothing)
    for each in (twin, module):
        each.child.change = change
    expected = twin(x)
    put_back()
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("rules", ["default", "all"])
def test_a_fused_call_hands_its_check_on(rules: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.fc1, self.fc2, self.gain = Child([self]), nn.Linear(4, 8), nn.Linear(8, 4), 2.0

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc1(self.child(x))
            return self.fc2(torch.nn.functional.gelu(y)) * self.gain

    module, x = Block(), torch.randn(2, 4)
    report = schedule.optimize(module, (x,), rules=rules, cost_guard=False)
    assert report.applied
    module(x)
    module.child.change = set_attribute
    with pytest.raises(ScheduleError, match="changed while"):
        module(x)


def test_copies_and_pickles_check_too() -> None:
    module, _, x = traced(nothing, of_attribute)
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        each.child.change = set_attribute
        with pytest.raises(ScheduleError, match="changed while child ran"):
            each(x)


def replace_weight(m: Any) -> None:
    m.weight = nn.Parameter(torch.full((4,), 9.0))


def replace_buffer(m: Any) -> None:
    m.register_buffer("buffer", torch.full((4,), 9.0))


class Reader(nn.Module):
    """A forward that reads a tensor before and behind the call of its child, as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.child = how, Child([self])
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("buffer", torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "held":  # the tensors of before the call
            weight, buffer = self.weight, self.buffer
            return self.child(x) * weight + buffer
        if self.how == "again":
            y = x * self.weight + self.buffer
            return self.child(y) * self.weight + self.buffer
        if self.how == "both":
            weight, buffer = self.weight, self.buffer
            return self.child(x) * weight + self.weight * buffer + self.buffer
        return self.child(x) * self.weight + self.buffer


@pytest.mark.parametrize("change", [replace_weight, replace_buffer])
@pytest.mark.parametrize("how", ["held", "again", "both", "behind"])
@pytest.mark.parametrize("flatten", [False, True])
def test_tensors_are_read_where_the_forward_reads_them(how: str, change: Callable[[Any], None], flatten: bool) -> None:
    module, x = Reader(how), torch.randn(2, 4)
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, (x,))
    sch.trace(flatten=flatten, leaves=("child",) if flatten else ())
    install(module, sch.specializations)
    torch.testing.assert_close(module(x), twin(x))
    for each in (module, twin):
        each.child.change = change
    if how in ("again", "both"):
        with pytest.raises(ScheduleError, match=r"self\.\w+ is another object than the graph"):
            module(x)
    else:
        torch.testing.assert_close(module(x), twin(x))


class Assigning(nn.Module):
    """A forward that reads back what it assigned, behind the call of its child."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.child, self.kept, self.plain = Child([self]), None, plain

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.shape[0] if self.plain else x * 2
        y = self.child(x)
        return y * self.kept


def assign(m: Any) -> None:
    m.kept = 7


@pytest.mark.parametrize("plain", [False, True])
def test_an_assigned_attribute_is_read_back(plain: bool) -> None:
    module = Assigning(plain)
    twin, x = running_graphs(module)
    torch.testing.assert_close(module(x), twin(x))
    module.child.change = assign
    with pytest.raises(ScheduleError, match=r"self\.kept (changed while|is another object)"):
        module(x)


class Keeping(nn.Module):
    """Returns a container that it keeps."""

    def __init__(self, made: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.proj, self.made, self.kept = nn.Linear(4, 4), made, None

    def forward(self, x: Tensor) -> Any:
        self.kept = self.made(self.proj(x), x * 2)
        return self.kept


@dataclasses.dataclass
class Pair:
    """A result with two fields."""

    first: Tensor
    second: Tensor


def change_list(m: Any) -> None:
    m.keeping.kept[1] = m.keeping.kept[0]


def change_nested(m: Any) -> None:
    m.keeping.kept[1].append(m.keeping.kept[0])


def change_dict(m: Any) -> None:
    m.keeping.kept["second"] = m.keeping.kept["first"]


def change_field(m: Any) -> None:
    m.keeping.kept.second = m.keeping.kept.first


RETURNED: dict[str, tuple[Any, Read, Callable[[Any], None]]] = {
    "list": (lambda a, b: [a, b], lambda r: r[1], change_list),
    "length": (lambda a, b: [a, [b]], lambda r: r[0] * len(r[1]), change_nested),
    "in a tuple": (lambda a, b: (a, [b]), lambda r: r[1][-1], change_nested),
    "dict": (lambda a, b: {"first": a, "second": b}, lambda r: r["second"], change_dict),
    "dataclass": (Pair, lambda r: r.second, change_field),
}


class ReadingReturned(nn.Module):
    """Reads what one submodule returned after the call of another."""

    def __init__(self, name: str) -> None:
        super().__init__()
        made, self.read, _ = RETURNED[name]
        self.keeping, self.child = Keeping(made), Child([self])

    def forward(self, x: Tensor) -> Tensor:
        result = self.keeping(x)
        y = self.child(x)
        return torch.tanh(y * self.read(result))


@pytest.mark.parametrize("name", RETURNED)
def test_a_container_that_one_submodule_returned_and_another_changes(name: str) -> None:
    module = ReadingReturned(name)
    twin, x = running_graphs(module)
    torch.testing.assert_close(module(x), twin(x))
    module.child.change = RETURNED[name][2]
    with pytest.raises(ScheduleError, match="keeping returned was changed"):
        module(x)


class ChangingReturned(nn.Module):
    """Changes what a submodule returned, and keeps."""

    def __init__(self, made: Callable[[Tensor, Tensor], Any], change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.keeping, self.change = Keeping(made), change

    def forward(self, x: Tensor) -> Tensor:
        result = self.keeping(x)
        self.change(result, x)
        return torch.tanh(x)


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (lambda a, b: [a, b], lambda r, x: r.append(x)),
        (lambda a, b: [a, b], lambda r, x: r.__setitem__(0, x)),
        (lambda a, b: (a, [b]), lambda r, x: r[1].extend([x])),
        (lambda a, b: {"a": a}, lambda r, x: r.update(b=x)),
    ],
)
def test_a_forward_that_changes_what_a_submodule_returned_is_refused(
    made: Callable[[Tensor, Tensor], Any], change: Callable[[Any, Tensor], Any]
) -> None:
    sch = schedule.create_schedule(ChangingReturned(made, change), (torch.randn(2, 4),))
    with pytest.raises(ScheduleError, match="the result of a submodule"):
        sch.trace()


def set_global_by_name(m: Any) -> None:
    global GAIN
    GAIN = 5.0


MISSED_BY_TORCH = (set_global, resize_table)  # an untouched model, compiled, computes with the old value too
BY_COMPILED_CODE = [each for each in CHANGES if each[1] not in MISSED_BY_TORCH]


@pytest.mark.parametrize(("read", "change"), [*BY_COMPILED_CODE, (of_global, set_global_by_name)])
@pytest.mark.parametrize("early", [False, True])
def test_compiled_code_notices_too(read: Read, change: Callable[[Any], None], early: bool) -> None:
    module, twin, x = traced(nothing, read)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), twin(x))
    compiled = torch.compile(module, backend="eager")
    if early:
        torch.testing.assert_close(compiled(x), twin(x))
    module.child.change = change
    with pytest.raises(ScheduleError, match=f"changed while child ran|{CHANGED}"):
        compiled(x)


@pytest.mark.parametrize(("read", "change"), OUTSIDE)
def test_compiled_code_sees_changes_between_calls(read: Read, change: Callable[[Any], None]) -> None:
    module, twin, x = traced(read, read)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), twin(x))
    change(module)
    expected = twin(x)
    torch.testing.assert_close(compiled(x), expected)
    put_back()
    torch.testing.assert_close(compiled(x), twin(x))


@pytest.mark.parametrize("how", ["held", "again", "both", "behind"])
def test_compiled_code_reads_tensors_where_the_forward_does(how: str) -> None:
    module = Reader(how)
    twin, x = running_graphs(module)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), twin(x))
