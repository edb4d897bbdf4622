"""Lookups of attributes by Python's rules: what comes before the value found, and what is absent, is guarded."""

from __future__ import annotations

import abc
import enum
import functools
import math
import numbers
import pickle
import sys
import threading
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from tests.adversary.readings import Box, Reading, as_untouched, fallbacks

pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = {"k": 1.5, 1: 1.5}


@pytest.fixture(autouse=True)
def _table() -> Any:
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


def fresh(base: type = Box, **members: Any) -> type:
    """A class of its own, so that a test may change it."""
    return type("Fresh", (base,), members)


def reading(read: Callable[[Any], Any], cls: type = Box, **values: Any) -> Reading:
    """A module whose class is its own, holding an object of ``cls``."""
    module = fresh(Reading)(read, **values)
    module.box = cls()
    return module  # type: ignore[no-any-return]


# -- the class of an object is changed ------------------------------------------------------------------------------


def _property(cls: Any) -> None:
    cls.k = property(lambda self: 3.0, lambda self, value: None)


def _getattribute(cls: Any) -> None:
    cls.__getattribute__ = lambda self, name: 3.0 if name == "k" else object.__getattribute__(self, name)


def _getattr(cls: Any) -> None:
    cls.__getattr__ = lambda self, name: 3.0


def _flag(cls: Any) -> None:
    cls.flag = 3.0


def _truth(cls: Any) -> None:
    cls.__bool__ = lambda self: False


def _equality(cls: Any) -> None:
    cls.__eq__ = lambda self, other: True


def _base(cls: Any) -> None:
    cls.__bases__ = (fresh(Box, flag=3.0),)


CLASSES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None], dict[str, Any]]] = {
    "property over an instance's value": (lambda m: m.box.k, _property, {}),
    "__getattribute__": (lambda m: m.box.k, _getattribute, {}),
    "__getattr__": (lambda m: m.box.other, _getattr, {"__getattr__": lambda self, name: 1.5}),
    "absent, by hasattr": (lambda m: 2.0 if hasattr(m.box, "flag") else 1.0, _flag, {}),
    "absent, by getattr": (lambda m: getattr(m.box, "flag", 1.0), _flag, {}),
    "absent on the class": (lambda m: getattr(type(m.box), "flag", 1.0), _flag, {}),
    "a base": (lambda m: getattr(m.box, "flag", 1.0), _base, {}),
    "dunder attribute": (
        lambda m: type(m.box).__scale__,
        lambda cls: setattr(cls, "__scale__", 3.0),
        {"__scale__": 1.5},
    ),
    "truth": (lambda m: 2.0 if m.box else 1.0, _truth, {}),
    "equality": (lambda m: 2.0 if m.box == "x" else 1.0, _equality, {}),
    "constructor": (
        lambda m: type(m.box)(2.0).k,
        lambda cls: setattr(cls, "__init__", lambda self, k: setattr(self, "k", 2 * k)),
        {},
    ),
}


@pytest.mark.parametrize("case", CLASSES)
def test_a_class_that_changes(case: str) -> None:
    read, change, members = CLASSES[case]
    cls = fresh(**members)
    module, twin = reading(read, cls), reading(read, cls)
    twin.load_state_dict(module.state_dict())
    as_untouched(module, lambda m: change(cls), once=True, twin=twin)


def test_the_class_of_the_module_is_looked_up_too() -> None:
    module = reading(lambda m: getattr(m, "flag", 1.0))
    twin = type(module)(module.read)
    twin.load_state_dict(module.state_dict())
    as_untouched(module, lambda m: setattr(type(twin), "flag", 3.0), once=True, twin=twin)


def test_super_looks_behind_a_class() -> None:
    base = fresh(Reading, scale=1.5, twice=lambda self: 2.0)

    class Derived(base):  # type: ignore[misc, valid-type]
        scale = 9.0

        def by_super(self) -> float:
            return float(super().scale * super().twice())

    twin = Derived(Derived.by_super)
    module = Derived(Derived.by_super)
    module.load_state_dict(twin.state_dict())
    changes = [lambda m: setattr(base, "scale", 3.0), lambda m: setattr(base, "twice", lambda self: 5.0)]
    as_untouched(module, *changes, once=True, twin=twin)


# -- state of what is not an instance --------------------------------------------------------------------------------


BOX = Box()


def helper(value: float = 2.0, box: Box = BOX) -> float:
    return value * box.k


def named(value: float) -> float:
    return value


named.scale = 1.5  # type: ignore[attr-defined]
LOCAL = threading.local()
LOCAL.act = math.sin


class Colors(enum.Enum):
    RED = 1

    @property
    def scale(self) -> float:
        return TABLE[self.value]

    def doubled(self) -> float:
        return 2.0


class Pair(typing.NamedTuple):
    k: float

    @property
    def scaled(self) -> float:
        return self.k * TABLE["k"]


@functools.lru_cache
def cached(name: str) -> float:
    return TABLE[name]


@functools.lru_cache
def cached_table() -> dict[str, float]:
    return {"k": 1.5}


def _clear(m: Any) -> None:
    TABLE["k"] = 3.0
    cached.cache_clear()


def _table_entry(m: Any) -> None:
    TABLE["k"] = TABLE[1] = 3.0


OUTSIDE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute of a function": (lambda m: named(2.0) * named.scale, lambda m: setattr(named, "scale", 3.0)),  # type: ignore[attr-defined]
    "absent on a function": (lambda m: getattr(named, "flag", 1.0), lambda m: setattr(named, "flag", 3.0)),
    "defaults that hold an object": (lambda m: helper(), lambda m: setattr(helper, "__defaults__", (3.0, Box(2.0)))),
    "callable of a thread's local": (lambda m: LOCAL.act(1.0), lambda m: setattr(LOCAL, "act", math.cos)),
    "property of an enum": (lambda m: Colors.RED.scale, _table_entry),
    "method of an enum": (lambda m: Colors.RED.doubled(), lambda m: setattr(Colors, "doubled", lambda self: 3.0)),
    "property of a named tuple": (lambda m: Pair(2.0).scaled, _table_entry),
    "cached result": (lambda m: cached("k"), _clear),
    "content of a cached result": (lambda m: cached_table()["k"], lambda m: cached_table().update(k=3.0)),
    "absent in a module": (lambda m: getattr(math, "flag", 1.0), lambda m: setattr(math, "flag", 3.0)),
    "on torch's classes": (
        lambda m: getattr(nn.Linear, "flag", 1.0) * getattr(torch.Tensor, "flag", 1.0),
        lambda m: setattr(nn.Linear, "flag", 3.0),
    ),
}
_PATCHED = ((named, "flag"), (math, "flag"), (nn.Linear, "flag"))


@pytest.mark.parametrize("case", OUTSIDE)
def test_state_outside_of_the_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = OUTSIDE[case]
    saved = [(helper, "__defaults__"), (named, "scale"), (LOCAL, "act"), (Colors, "doubled")]
    before = [(owner, name, getattr(owner, name)) for owner, name in saved]
    cached.cache_clear(), cached_table.cache_clear()
    try:
        as_untouched(Reading(read), change, once=True)
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        for owner, name in _PATCHED:
            if name in vars(owner):
                delattr(owner, name)


class Tables(enum.Enum):
    """Members whose values are tables, which may be changed."""

    FIRST = {"k": 1.5}  # noqa: RUF012
    SECOND = {"k": 2.5}  # noqa: RUF012

    @property
    def scale(self) -> float:
        return self.value["k"]


def set_first(m: Any) -> None:
    Tables.FIRST.value["k"] += 3.0


MEMBERS: dict[str, Callable[[Any], Any]] = {
    "value": lambda m: Tables.FIRST.value["k"],
    "by name": lambda m: Tables["FIRST"].value["k"],
    "by attribute": lambda m: getattr(Tables, "FIRST").value["k"],  # noqa: B009
    "held": lambda m: m.held.value["k"],
    "private": lambda m: Tables.FIRST._value_["k"],
    "iterated": lambda m: sum(member.value["k"] for member in Tables),
    "all members": lambda m: Tables.__members__["FIRST"].value["k"],
    "property": lambda m: m.held.scale,
}


@pytest.mark.parametrize("case", MEMBERS)
def test_values_of_enums_that_are_changed_in_place(case: str) -> None:
    as_untouched(Reading(MEMBERS[case], held=Tables.FIRST), set_first, once=True)


def dispatching() -> Any:
    @functools.singledispatch
    def scale(box: Any) -> float:
        return 1.5

    return scale


DISPATCHED: dict[str, Callable[[Any, Any], Any]] = {
    "called": lambda scale, box: scale(box),
    "asked": lambda scale, box: scale.dispatch(type(box))(box),
}


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("case", DISPATCHED)
def test_functions_that_get_another_implementation(case: str, base: bool) -> None:
    scale, kind = dispatching(), fresh()
    module = Reading(lambda m: DISPATCHED[case](m.scale, m.box), box=kind(2.0), scale=scale)
    as_untouched(module, lambda m: scale.register(Box if base else kind, lambda box: 4.5), once=True)


def test_methods_that_get_another_implementation() -> None:
    class Dispatching(Reading):
        @functools.singledispatchmethod
        def scale(self, box: Any) -> float:
            return 1.5

    kind = fresh()
    module, register = Dispatching(lambda m: m.scale(m.box), box=kind(2.0)), vars(Dispatching)["scale"].register
    if sys.version_info >= (3, 14):  # its methods are objects of a class of functools there, which may read all of it
        report = schedule.optimize(module, torch.randn(2, 4), cost_guard=False)
        assert not report.applied and "singledispatchmethod" in str(report)
        return
    as_untouched(module, lambda m: register(kind, lambda self, box: 4.5), once=True)


def test_a_class_whose_objects_become_callable() -> None:
    kind = fresh()
    module = Reading(lambda m: 1.5 if callable(m.box) else 2.5, box=kind(2.0))
    as_untouched(module, lambda m: setattr(kind, "__call__", lambda self: 0), once=True)


def test_classes_registered_later() -> None:
    class Kind(abc.ABC):  # noqa: B024
        pass

    as_untouched(Reading(lambda m: 2.0 if isinstance(m, Kind) else 1.0), lambda m: Kind.register(Reading), once=True)


class Meta(type):
    """A metaclass whose methods Python calls for its classes."""

    def __getitem__(cls, name: str) -> float:
        return TABLE[name]

    def __len__(cls) -> int:
        return len(TABLE)

    def __instancecheck__(cls, value: object) -> bool:
        return TABLE["k"] > 2

    @property
    def scale(cls) -> float:
        return TABLE["k"]


class Registry(metaclass=Meta):
    def __class_getitem__(cls, name: str) -> float:
        return 1.0


class Generic:
    def __class_getitem__(cls, name: str) -> float:
        return TABLE[name]


@pytest.mark.parametrize(
    "read",
    [
        lambda m: Registry["k"],
        lambda m: Registry.scale,
        lambda m: 2.0 if isinstance(m, Registry) else 1.0,
        lambda m: Generic["k"],
    ],
)
def test_methods_of_metaclasses(read: Callable[[Any], Any]) -> None:
    as_untouched(Reading(read), _table_entry, once=True)


# -- calls of modules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_call_that_is_replaced_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(nn.Linear, name)

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) * 2

    as_untouched(Reading(lambda m: 1.5), lambda m: monkeypatch.setattr(nn.Linear, name, doubled), once=True)


# -- settings of transformers, read by a method that calls ``super()`` ----------------------------------------------


class Guarded:
    """Reads its values as transformers' configs do."""

    def __init__(self) -> None:
        self.k = 1.5

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def test_values_read_through_super() -> None:
    as_untouched(Reading(lambda m: m.held.k, held=Guarded()), lambda m: setattr(m.held, "k", 3.0))


# -- pickles --------------------------------------------------------------------------------------------------------


def _scaled_by(k: float) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args) * k

        return wrapper

    return decorate


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    @_scaled_by(2.0)
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.proj(x))


def test_a_pickle_keeps_the_guards_on_a_closure() -> None:
    module, x = Decorated(), torch.randn(2, 4)
    schedule.optimize(module, x, cost_guard=False)
    loaded = pickle.loads(pickle.dumps(module))
    torch.testing.assert_close(loaded(x), module(x))
    assert not fallbacks(loaded), "the guards hold where nothing has changed"
    cell = Decorated.forward.__wrapped__ and _cell(Decorated.forward)  # type: ignore[attr-defined]
    cell.cell_contents = 5.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(loaded(x), torch.nn.functional.gelu(loaded.proj(x)) * 5.0)
    finally:
        cell.cell_contents = 2.0


def _cell(function: Any) -> types.CellType:
    cells: dict[str, types.CellType] = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return cells["k"]


class Number(numbers.Number):
    """A number of the user's, which may change."""

    __hash__ = object.__hash__

    def __init__(self) -> None:
        self.value = 1.5

    def __float__(self) -> float:
        return self.value


def test_a_number_that_changes() -> None:
    as_untouched(Reading(lambda m: float(m.held), held=Number()), lambda m: setattr(m.held, "value", 3.0))
