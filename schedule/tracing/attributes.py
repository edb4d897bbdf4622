"""Which settings and children a forward read from its module and the module's config, and what it assigned to modules.

A graph made while ``self.config.output_attentions`` was False holds only as long as it is: every number, string, flag,
function or None read from a module or from a settings object of it becomes a guard, and so do lists and dicts of these;
and which children a list of modules has, where the forward goes through them.

What a forward assigns (``self.rope_deltas = deltas``) is read back while it is traced; the graph assigns it when it is
done, so that nothing is changed where the graph finds on its way that it does not hold.
"""

from __future__ import annotations

import copy
import enum
import numbers
import operator
import types
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from schedule.errors import TraceError
from schedule.tracing.scalars import scalar_of
from schedule.tracing.source import user_line
from schedule.tracing.structure import leaves, module_source

if TYPE_CHECKING:
    from schedule.tracing.tracer import ModuleTracer

Setting = tuple[str, str | None, str]  # path of the module, its attribute holding the settings object (dotted), name
PLAIN = (bool, int, float, str, type(None), torch.dtype)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_CONTAINERS = (list, tuple, dict, set, frozenset, OrderedDict)
_MOST = 256
"""How many values a list or dict may hold to be compared at each call; of larger ones the graph holds what it saw."""
_UNWATCHED = {*vars(nn.Module()), "call_super_init", "dump_patches", "_version"}
_REFUSALS = (TypeError, ValueError, AttributeError, RuntimeError)  # of classes that want no subclass


_NOTHING = object()


class Unset(enum.Enum):
    """In place of a setting's value: the object has none of its own, its class decides."""

    UNSET = "unset"


class _Quiet:
    """Base of the classes that watch: the user's class is not told that it has a subclass."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing."""


class SettingsReads:
    """Collects the settings that are read, and the attributes that are assigned, while it watches.

    Attributes:
        values: value of each setting that was read.
        tensors: plain attributes that were read and are tensors, with the number of dimensions and the dtype.
        listed: path of a module whose children were gone through → their names.
        present: path of a module whose children were read by name → name → whether there is one, or None; no names
            where none of its children is None.
        absent: those of ``values`` that were asked for and are nowhere.
        assigned: path of a module and name of its attribute → what the forward assigned last.
        assignments: how many there were, also of what was there already.
    """

    def __init__(self) -> None:
        self.values: dict[Setting, Any] = {}
        self.tensors: dict[tuple[str, str], tuple[int, torch.dtype]] = {}
        self.listed: dict[str, tuple[str, ...]] = {}
        self.present: dict[str, dict[str, bool]] = {}
        self.absent: set[Setting] = set()
        self.assigned: dict[tuple[str, str], Any] = {}
        self.assignments = 0
        self._collecting = False
        self._tables: dict[tuple[str, str], str] = {}
        self._seen: dict[Setting, Any] = {}
        self._entered: Collection[str] = ()

    @contextmanager
    def watching(self, modules: dict[str, nn.Module], entered: Collection[str]) -> Iterator[None]:
        """Within, reads of plain attributes of ``modules``, and of their settings objects, are collected.

        Args:
            modules: by path.
            entered: paths of those whose inside is traced, and whose attributes may be assigned.
        """
        self._entered = entered
        swapped: list[tuple[Any, type]] = []
        seen: set[int] = set()
        try:
            held = [(path, *each) for path, module in modules.items() for each in _settings_of(module)]
            inner = [(path, f"{name}.{n}", value) for path, name, own in held for n, value in _settings_of(own)]
            for path, module in modules.items():
                self._swap(module, (path, None), swapped, seen)
            for path, name, settings in (*held, *inner):
                self._swap(settings, (path, name), swapped, seen)
            yield
        finally:
            for watched, cls in reversed(swapped):
                object.__setattr__(watched, "__class__", cls)
            for setting, value in self._seen.items():
                if not is_comparable(value) or value != self.values[setting]:  # the forward itself changes it
                    del self.values[setting]

    @contextmanager
    def collected(self, on: bool) -> Iterator[None]:
        """Within, what is read is collected, as by a forward; or it is not, as by what stays a call of the graph."""
        before, self._collecting = self._collecting, on
        try:
            yield
        finally:
            self._collecting = before

    def conditions(self) -> list[str]:
        """Python conditions that the tensors and the children which were read are there, and of the kind they were."""
        found = []
        for (path, name), (rank, dtype) in self.tensors.items():
            held = f"{module_source(path)}.__dict__.get({name!r})"
            found.append(f"isinstance({held}, torch.Tensor) and {held}.dim() == {rank} and {held}.dtype is {dtype}")
        for path, names in self.listed.items():
            found.append(f"(*{module_source(path)}._modules,) == {names!r}")
        for path, children in self.present.items():
            table = f"{module_source(path)}._modules"
            found += [f"{name!r} not in {table}" for at, holder, name in self.absent if at == path and holder is None]
            by_name = [f"{table}[{name!r}] is {'not ' * there}None" for name, there in children.items()]
            found += by_name or [f"None not in {table}.values()"]
        return found

    def write(self, tracer: ModuleTracer) -> None:
        """The assignments as nodes of the graph, which is complete but for its output."""
        with torch._C.DisableTorchFunction():
            for (path, name), value in self.assigned.items():
                table = self._tables[path, name]
                holder = tracer.graph.get_attr(f"{path}.{table}" if path else table)
                tracer.emit(operator.setitem, (holder, name, tracer.as_nodes(value)))

    def _swap(self, target: Any, place: tuple[str, str | None], swapped: list[Any], seen: set[int]) -> None:
        if id(target) in seen:
            return
        seen.add(id(target))
        cls = type(target)
        try:
            object.__setattr__(target, "__class__", self._watched_class(cls, target, place))
        except _REFUSALS:
            if isinstance(target, types.SimpleNamespace):
                for name, value in vars(target).items():
                    self._read((*place, name), value)
            return
        swapped.append((target, cls))

    def _watched_class(self, cls: Any, watched: Any, place: tuple[str, str | None]) -> type:
        values, tensors, assigned, (path, holder) = self.values, self.tensors, self.assigned, place

        def __getattribute__(target: Any, name: str) -> Any:
            if assigned and holder is None and (path, name) in assigned and target is watched:
                return assigned[path, name]
            try:
                value = cls.__getattribute__(target, name)
            except AttributeError:
                if target is watched and self._collecting:
                    self._read_elsewhere(target, (*place, name))
                raise
            if target is not watched or not self._collecting:
                return value
            if name in object.__getattribute__(target, "__dict__"):
                if name == "_modules" and holder is None:
                    self.listed.setdefault(path, tuple(value))
                elif holder is None and isinstance(value, torch.Tensor):
                    tensors.setdefault((path, name), (value.ndim, value.dtype))
                elif name not in _UNWATCHED:
                    self._read((*place, name), value)
            elif name not in _UNWATCHED and _is_default(cls, name):
                values.setdefault((*place, name), Unset.UNSET)
            return value

        def __setattr__(target: Any, name: str, value: Any) -> None:
            if target is watched:
                self._assign(target, place, name, value)
            else:  # a copy
                cls.__setattr__(target, name, value)

        def __reduce_ex__(target: Any, protocol: Any) -> Any:
            reduced: Any = object.__reduce_ex__(target, 2)
            rebuild, (_, *rest), *state = reduced
            return (rebuild, (cls, *rest), *state)  # copies made by the forward are of the user's class

        members = {"__getattribute__": __getattribute__, "__setattr__": __setattr__, "__reduce_ex__": __reduce_ex__}
        watched_class = type(cls.__name__, (_Quiet, cls), members)
        watched_class.__module__, watched_class.__qualname__ = cls.__module__, cls.__qualname__
        return watched_class

    def _read(self, setting: Setting, value: Any) -> None:
        """``value`` is read; one that may be changed in place is remembered by a copy."""
        if setting in self.values or not is_comparable(value):
            return
        self.values[setting] = value
        if isinstance(value, _CONTAINERS):
            self.values[setting], self._seen[setting] = copy.deepcopy(value), value

    def _read_elsewhere(self, target: Any, setting: Setting) -> None:
        """What has no plain attribute of this name is read: a child, a parameter, or nothing that is there."""
        path, holder, name = setting
        tables = object.__getattribute__(target, "__dict__") if holder is None else {}
        children = tables.get("_modules", {})
        if name.startswith("__"):
            return
        if name in children:
            seen = self.present.setdefault(path, {})
            if None in children.values():
                seen.setdefault(name, children[name] is not None)
        elif setting not in self.values and not any(name in tables.get(table, ()) for table in _TABLES):
            self.values[setting] = Unset.UNSET
            self.absent.add(setting)

    def _assign(self, target: Any, place: tuple[str, str | None], name: str, value: Any) -> None:
        """``target.name = value``: no change, something for the graph to do, or nothing that it could do again."""
        self.assignments += 1
        (path, holder), setting = place, (*place, name)
        table = next((t for t in _TABLES if name in vars(target).get(t, ())), "__dict__")
        current = (vars(target) if table == "__dict__" else vars(target)[table]).get(name, _NOTHING)
        if (path, name) not in self.assigned:
            if current is value:
                return
            if is_plain(current) and _equal(current, value):  # it stays what it is, where it is what it was
                self.values.setdefault(setting, current)
                return
        if holder is not None or path not in self._entered or table in ("_parameters", "_modules"):
            raise _refused(f"the forward assigns attribute {name!r} of a {type(target).__name__}")
        if setting in self.absent:
            self.absent.discard(setting)
            del self.values[setting]
        if setting in self.values:
            raise _refused(
                f"the forward assigns attribute {name!r} of a {type(target).__name__}, which it reads before: a graph "
                f"made while it is {self.values[setting]!r} would hold for one call"
            )
        if not all(_is_kept(leaf) for _, leaf in leaves(value)):
            raise _refused(f"the forward assigns an object to attribute {name!r} of a {type(target).__name__}")
        self.assigned[path, name], self._tables[path, name] = value, table


def _is_default(cls: type, name: str) -> bool:
    """Whether instances of ``cls`` have ``name`` from a plain attribute of the class, not from a property."""
    value = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _NOTHING)
    return is_plain(value) or (isinstance(value, _CONTAINERS) and not name.startswith("__"))


_TABLES = ("_buffers", "_parameters", "_modules")


def assigns_attributes(graph: fx.Graph) -> bool:
    """Whether the graph assigns attributes of modules."""
    tables = (str(node.target).rpartition(".")[2] for node in graph.nodes if node.op == "get_attr")
    return any(table in ("__dict__", "_buffers") for table in tables)


def _refused(why: str) -> TraceError:
    return TraceError(
        why,
        where=user_line(),
        fix="schedule its submodules instead, or keep state in buffers that are updated in place",
    )


def _is_kept(leaf: Any) -> bool:
    """Whether a graph can assign ``leaf``."""
    plain = is_plain(leaf) or scalar_of(leaf) is not None
    return plain or (isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter))


def _equal(current: Any, value: Any) -> bool:
    """Whether a plain value is assigned once more; that a size is equal becomes a guard of the trace."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return type(current) is kinds.get(type(value), type(value)) and bool(value == current)


Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]


def attributes(module: nn.Module) -> Attributes:
    """What the attributes and buffers of ``module``, and of all inside, are now."""
    return [(child, dict(vars(child)), dict(child._buffers)) for child in module.modules()]


@contextmanager
def attributes_as(kept: Attributes) -> Iterator[None]:
    """Within, attributes are what they were then; afterwards what they are now, whatever is assigned."""
    now = [(child, dict(vars(child)), dict(child._buffers)) for child, _, _ in kept]
    _put(kept)
    try:
        yield
    finally:
        _put(now)


@contextmanager
def attributes_unchanged(module: nn.Module) -> Iterator[None]:
    """Within, nothing is assigned but where assignments are watched; what is, is put back.

    Raises:
        TraceError: an attribute of ``module``, or of what is in it, was assigned.
    """
    kept = attributes(module)
    try:
        yield
        changed = _changed(kept)
    finally:
        _put(kept)
    if changed is not None:
        raise _refused(
            f"the forward assigns attribute {changed[1]!r} of a {changed[0]}, which stays a call of the graph"
        )


def _changed(kept: Attributes) -> tuple[str, str] | None:
    """The class and the attribute of the first module that is not as it was then."""
    for child, own, buffers in kept:
        for table, wanted in ((vars(child), own), (child._buffers, buffers)):
            for name in {**table, **wanted}:
                now, then = table.get(name, _NOTHING), wanted.get(name, _NOTHING)
                if now is not then and not (is_plain(then) and _equal(then, now)):
                    return type(child).__name__, name
    return None


def _put(kept: Attributes) -> None:
    for child, own, buffers in kept:
        for table, wanted in ((vars(child), own), (child._buffers, buffers)):
            for name in [name for name in table if name not in wanted]:
                del table[name]
            for name, value in wanted.items():
                if table.get(name, _NOTHING) is not value:
                    table[name] = value


def is_plain(value: Any) -> bool:
    """Whether ``value`` is a number, string, flag, dtype, None, or a member of an enum."""
    return type(value) in PLAIN or isinstance(value, enum.Enum)


def is_comparable(value: Any) -> bool:
    """Whether that ``value`` is what it was can be asked at each call: plain values, functions, and lists of these."""
    count = 0
    pending = [value]
    while pending and count <= _MOST:
        item, count = pending.pop(), count + 1
        if type(item) in _CONTAINERS:
            pending += [*item.keys(), *item.values()] if isinstance(item, dict) else item
        elif not (is_plain(item) or isinstance(item, (numbers.Number, torch.device, torch.Size, *FUNCTIONS))):
            return False
    return not pending


def _settings_of(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if name != "_schedule_state" and is_settings(value)]


def is_settings(value: Any) -> bool:
    """Whether ``value`` is a plain object that holds settings: a config, a namespace, a dataclass."""
    if isinstance(value, (nn.Module, torch.Tensor, type, enum.Enum, *PLAIN)) or callable(value):
        return False
    return hasattr(value, "__dict__") and type(value).__module__ != "builtins" and not isinstance(value, dict)
