"""Guards on the Python state read by a forward, all required for its graph to be valid.

Each guard checks one condition on the value at one source: it is the same object, equals a value of the same type, has
the same keys, or is the object at another source (a tie). A ledger compiles to one function. This function is called
to dispatch a graph, and to decide whether a similar module may share it.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from fused.torch_internals.modes import NO_TORCH_FUNCTION, DisableTorchFunction
from schedule.capture.recording.structure import member_source, original_class
from schedule.capture.tracing.hooks import acts_now
from schedule.capture.tracing.own_forward import CALL_NAMES, functions_called
from schedule.capture.tracing.reading.compiled import (
    asks_compiler,
    attribute_name,
    cell_of,
    cell_reader,
    global_name,
    is_attribute,
    is_compared,
    is_followed,
    is_large_set,
    is_plain,
    reader,
)
from schedule.capture.tracing.reading.generated import leads_from_generated
from schedule.capture.tracing.reading.plain import is_atom, is_plain_content, same, snapshot
from schedule.capture.tracing.reading.resolution import BASES, Resolved, found_in, resolutions
from schedule.capture.tracing.reading.sources import (
    SELF,
    Attr,
    Const,
    DictOf,
    Item,
    Query,
    Self,
    Source,
    described,
    has_name,
    root,
    submodule_path,
    value_at,
)


@dataclass(frozen=True)
class Guard:
    """One condition on the value at ``source``.

    Attributes:
        kind: a key of :data:`_CONDITIONS`.
        source: the source of the value.
        expected: the value or source to compare with.
    """

    kind: str
    source: Source
    expected: Any = None

    @property
    def is_shared(self) -> bool:
        """Whether many modules have the same guard: one from a constant, with a function or class expected."""
        kinds = (types.FunctionType, types.BuiltinFunctionType, type)
        return self.kind == "resolves" or (isinstance(root(self.source), Const) and isinstance(self.expected, kinds))

    def __str__(self) -> str:
        return f"{described(self.source)} {self.kind} {self.expected!r}"

    def __reduce__(self) -> Any:
        """Pickle a guard on code, or on which object it is, as one on what the other process loads."""
        if self.kind == "resolves":
            expected = self.expected
            if expected.name != BASES and not is_atom(expected.raw):
                return _resolved_again, (self.source, expected.name, expected.after)
            return _resolved, (self.source, expected.name, expected.after, expected.raw)
        is_object = not (isinstance(self.expected, Source) or is_atom(self.expected) or has_name(self.expected))
        if self.kind in ("is", "calls") and is_object:
            if isinstance(root(self.source), Self):
                raise pickle.PicklingError("an object that no name leads to")
            return _guard_again, (self.kind, self.source)
        return Guard, (self.kind, self.source, self.expected)


def _resolved(source: Const, name: str, after: type | None, raw: Any) -> Guard:
    return Guard("resolves", source, Resolved(name, after, raw))


def _resolved_again(source: Const, name: str, after: type | None) -> Guard:
    return _resolved(source, name, after, found_in(source.value, name, after))


def _guard_again(kind: str, source: Source) -> Guard:
    value = value_at(source)
    return Guard(kind, source, value.__func__ if kind == "calls" else value)


def _is_of_class(value: Any, cls: type) -> bool:
    return type(value) is cls or (isinstance(value, nn.Module) and original_class(value) is cls)


def _lacks(value: Any, name: str) -> bool:
    """Check whether ``value`` has no attribute of this name."""
    if isinstance(value, nn.Module) and type(value).__getattr__ is nn.Module.__getattr__:
        own = value.__dict__
        exists = name in own or any(name in own.get(table, ()) for table in ("_parameters", "_buffers", "_modules"))
        return not exists and not hasattr(type(value), name)
    return not hasattr(value, name)


def _is_untouched(value: nn.Module, cls: type) -> bool:
    """Check whether a module has class ``cls``, no active hook, and no forward set on the instance."""
    return type(value) is cls and not acts_now(value) and "forward" not in value.__dict__


def _calls(value: Any, function: Any) -> bool:
    return isinstance(value, types.MethodType) and value.__func__ is function


Kind = tuple[torch.dtype, Any, type]


def kind_of(tensor: torch.Tensor) -> Kind:
    """Return the dtype of a tensor, the shape of a parameter or the rank of any other tensor, and its class.

    A graph depends on these. The sizes of other tensors, such as buffers, may grow.
    """
    with DisableTorchFunction():
        sizes = tensor.shape if isinstance(tensor, nn.Parameter) else tensor.dim()
        return tensor.dtype, sizes, _tensor_class(tensor)


def _tensor_class(tensor: torch.Tensor) -> type:
    """Return the class of a tensor as torch functions see it: subclasses without ``__torch_function__`` are plain."""
    cls = type(tensor)
    if cls in (torch.Tensor, nn.Parameter) or cls.__torch_function__ is not NO_TORCH_FUNCTION:
        return cls
    return nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor


def _is_tensor(value: Any, kind: Kind) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype is not kind[0]:
        return False
    if type(value) is not kind[2] and _tensor_class(value) is not kind[2]:
        return False
    return bool(value.dim() == kind[1] if type(kind[1]) is int else value.shape == kind[1])


def _is_tensor_alike(value: Any, kind: Kind) -> bool:
    """Check what :func:`_is_tensor` does, as ``torch.compile`` can follow it."""
    if not isinstance(value, torch.Tensor) or value.dtype is not kind[0]:
        return False
    if not isinstance(value, kind[2]) or isinstance(value, nn.Parameter) is not issubclass(kind[2], nn.Parameter):
        return False
    return bool(value.dim() == kind[1] if type(kind[1]) is int else value.shape == kind[1])


def _first_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first floating-point parameter, or None.

    It is used for modules without a parameter of the recorded name.
    """
    return next((each.dtype for each in module.parameters() if each.is_floating_point()), None)


_CONDITIONS: dict[str, str] = {
    "is": "{0} is {1}",
    "same": "({0} is {1} or _same({0}, {1}))",
    "content": "({0} is {1} or _same({0}, {1}))",
    "class": "(type({0}) is {1} or _is_of_class({0}, {1}))",
    "instance": "isinstance({0}, {1})",
    "no_instance": "not isinstance({0}, {1})",
    "none": "{0} is None",
    "distinct": "{0} is not {1}",
    "keys": "(*{0},) == {1}",
    "length": "len({0}) == {1}",
    "contains": "{1} in {0}",
    "lacks_item": "{1} not in {0}",
    "lacks": "_lacks({0}, {1})",
    "true": "{0}",
    "false": "not {0}",
    "calls": "_calls({0}, {1})",
    "tensor": "_is_tensor({0}, {1})",
    "computes_in": "",  # written as statements
    "resolves": "",  # checked together, by the versions of the classes
    "untouched": "_is_untouched({0}, {1})",
}
_AS_IS = ("class", "length", "keys", "contains", "lacks_item", "is", "none", "distinct", "true", "false")
_FOLLOWED = {
    "same": "type({0}) is type({1}) and {0} == {1}",
    "lacks": "not hasattr({0}, {1})",
    "calls": "{0}.__func__ is {1}",
    "tensor": "_is_tensor_alike({0}, {1})",
    **{kind: _CONDITIONS[kind] for kind in _AS_IS},
}
_HELPERS = {"_same": same, "_is_of_class": _is_of_class, "_lacks": _lacks, "_calls": _calls, "_is_tensor": _is_tensor}
_HELPERS |= {
    "_is_tensor_alike": _is_tensor_alike,
    "_first_dtype": _first_dtype,
    "_is_untouched": _is_untouched,
    "_own": object.__getattribute__,
}


_ABSENT = "(LookupError, AttributeError, NameError, TypeError, ValueError)"


class Ledger:
    """Immutable collection of the guards of one trace."""

    def __init__(self, guards: Iterable[Guard] = ()) -> None:
        self.guards: tuple[Guard, ...] = tuple(guards)
        self._holds: Callable[[Any], bool] | None = None
        self._traced: Callable[[Any], bool] | None = None

    def __bool__(self) -> bool:
        return bool(self.guards)

    def __iter__(self) -> Iterator[Guard]:
        return iter(self.guards)

    def holds(self, module: nn.Module) -> bool:
        """Check whether all guards hold for ``module``."""
        return self.function(module)

    @property
    def function(self) -> Callable[[Any], bool]:
        """The guards, compiled to a function of the module."""
        if self._holds is None:
            self._holds = _compiled(self.guards)
        return self._holds

    @property
    def under_compiler(self) -> Callable[[Any], bool]:
        """The guards ``torch.compile`` can follow, on plain state of modules and configs, as a compiled function."""
        if self._traced is None:
            self._traced = _compiled((guard for guard in self.guards if _is_followed(guard)), followed=True)
        return self._traced

    @cached_property
    def without_compilers(self) -> Ledger:
        """The guards without those on whether a compiler is active, which ``torch.compile`` itself evaluates."""
        return Ledger(each for each in self.guards if not asks_compiler(each.source))

    @cached_property
    def outside(self) -> Ledger:
        """Those of :attr:`without_compilers` that are not on state of the module."""
        return Ledger(each for each in self.without_compilers if not isinstance(root(each.source), Self))

    @property
    def is_followed(self) -> bool:
        """Whether ``torch.compile`` can follow all guards on state of the module."""
        return all(_is_followed(each) for each in self.guards if isinstance(root(each.source), Self))

    @cached_property
    def own(self) -> Ledger:
        """The guards without those in :attr:`shared`."""
        return Ledger(guard for guard in self.guards if not guard.is_shared) if self.shared else self

    @cached_property
    def shared(self) -> tuple[Guard, ...]:
        """The guards on functions and classes outside any module."""
        return tuple(guard for guard in self.guards if guard.is_shared)

    def missed(self, module: nn.Module) -> Guard | None:
        """Return the first guard to fail for ``module``, or None."""
        return next((guard for guard in self.guards if not _compiled((guard,))(module)), None)

    def __deepcopy__(self, memo: Any) -> Ledger:
        return self

    @cached_property
    def is_portable(self) -> bool:
        """Whether all guards can be checked in another process."""
        return all(_is_portable(guard) for guard in self.guards if not _is_on_generated_code(guard))

    def __reduce__(self) -> Any:
        return Ledger, (tuple(guard for guard in self.guards if not _is_on_generated_code(guard)),)


_OF_MODULES = {*vars(nn.Module()), "call_super_init", "dump_patches", "_schedule_state"}


def whole(module: nn.Module) -> Ledger:
    """Return guards on the whole state of a module, for a known forward traced without following its code."""
    cls = original_class(module)
    forward: Any = cls.forward
    guards = [
        Guard("resolves", Const(cls), Resolved(name, None, found_in(cls, name))) for name in ("forward", *CALL_NAMES)
    ]
    guards += [Guard("is", Attr(Const(where), name), value) for where, name, value in functions_called(forward)]
    guards += [
        Guard("tensor", Item(Item(DictOf(SELF), table), name), kind_of(tensor))
        if tensor is not None
        else Guard("none", Item(Item(DictOf(SELF), table), name))
        for table in ("_parameters", "_buffers")
        for name, tensor in vars(module)[table].items()
    ]
    for name, value in vars(module).items():
        if name not in _OF_MODULES and is_plain_content(value):
            guards.append(Guard("content", Item(DictOf(SELF), name), snapshot(value)))
    return Ledger(guards)


@lru_cache(maxsize=1024)
def shared_ledger(guards: tuple[Guard, ...]) -> Ledger:
    """Return the cached ledger of guards common to many modules."""
    return Ledger(guards)


def _is_on_generated_code(guard: Guard) -> bool:
    """Check whether ``guard`` is on a class, code or globals that this package or fx makes again with the graph."""
    return any(leads_from_generated(each) for each in (guard.source, guard.expected) if isinstance(each, Source))


def _is_portable(guard: Guard) -> bool:
    try:
        pickle.dumps(guard)
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


def _is_followed(guard: Guard) -> bool:
    """Check whether ``torch.compile`` can follow the guard, on values stored in modules and their objects."""
    expected = guard.expected
    if guard.kind == "resolves":
        return expected.after is None and is_attribute(guard.source.value, expected.name, expected.raw)  # type: ignore[union-attr]
    if guard.kind not in _FOLLOWED or not is_followed(guard.source) or is_large_set(guard.source):
        return False
    if guard.kind in ("is", "distinct"):
        return is_followed(expected) if isinstance(expected, Source) else is_compared(expected)
    return guard.kind in ("class", "calls", "tensor") or is_plain(expected)


class _Code:
    """Source code of a ledger's function, with one lookup per source in the order of the guards."""

    def __init__(self, followed: bool) -> None:
        self.lines: list[str] = []
        self.resolved: list[tuple[type, Resolved]] = []
        self._conditions, self._followed = _FOLLOWED if followed else _CONDITIONS, followed
        self.names: dict[str, Any] = dict(_HELPERS)
        self._locals: dict[Source, str] = {}
        self._constants: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        """Return a name for ``value``, or its literal."""
        if value is None or isinstance(value, bool):
            return repr(value)
        if id(value) not in self._constants:
            self._constants[id(value)] = f"c{len(self._constants)}"
            self.names[self._constants[id(value)]] = value
        return self._constants[id(value)]

    def value(self, source: Source) -> str:
        """Return the expression for the value at ``source``, a local if it is looked up."""
        if isinstance(source, Self):
            return "self"
        if isinstance(source, Const):
            return self.constant(source.value)
        if source not in self._locals:
            text = self._text(source)
            self._locals[source] = f"v{len(self._locals)}"
            self.lines.append(f"        {self._locals[source]} = {text}")
        return self._locals[source]

    def _text(self, source: Source) -> str:
        if isinstance(source, Query):
            return f"{self.constant(source.function)}({', '.join(map(self.constant, source.arguments))})"
        if self._followed and (name := global_name(source)):
            return f"{self.constant(reader(source.base.value, name))}()"  # type: ignore[union-attr]
        if self._followed and (name := attribute_name(source)):
            return member_source(self.constant(source.base.base.value), name)  # type: ignore[union-attr]
        if self._followed and (cell := cell_of(source)) is not None:
            return f"{self.constant(cell_reader(cell))}()"
        base = self.value(source.base)  # type: ignore[union-attr]
        if isinstance(source, DictOf):
            plain = isinstance(source.base, Const) or submodule_path(source.base) is not None
            # Configs have a slow __getattribute__ in Python; torch.compile follows no other way around it.
            return f"{base}.__dict__" if plain or self._followed else f"_own({base}, '__dict__')"
        if isinstance(source, Attr):
            return member_source(base, source.name)
        key = source.key  # type: ignore[union-attr]
        return f"{base}[{key!r}]" if type(key) in (str, int) else f"{base}[{self.constant(key)}]"

    def add(self, guard: Guard) -> None:
        """Add a line to return False unless ``guard`` holds."""
        if guard.kind == "resolves" and self._followed:
            value = member_source(self.constant(guard.source.value), guard.expected.name)  # type: ignore[union-attr]
            raw = getattr(guard.expected.raw, "__func__", guard.expected.raw)
            kind = "same" if is_plain(raw) else "is"
            self.lines.append(
                f"        if not ({self._conditions[kind].format(value, self.constant(raw))}): return False"
            )
            return
        if guard.kind == "resolves":
            self.resolved.append((guard.source.value, guard.expected))  # type: ignore[union-attr]
            return
        value = self.value(guard.source)
        expected = guard.expected
        if guard.kind == "computes_in":
            self._add_dtype(value, *expected)
            return
        other = self.value(expected) if isinstance(expected, Source) else self.constant(expected)
        if guard.kind in ("lacks_item", "contains", "lacks") and type(expected) is str:
            other = repr(expected)
        self.lines.append(f"        if not ({self._conditions[guard.kind].format(value, other)}): return False")

    def _add_dtype(self, module: str, path: tuple[str, ...], dtype: torch.dtype) -> None:
        *holders, name = path
        found = module + "".join(f"._modules[{part!r}]" for part in holders) + f"._parameters[{name!r}].dtype"
        self.lines += [
            "        try:",
            f"            if {found} is not {self.constant(dtype)}: return False",
            "        except (KeyError, AttributeError):",
            f"            if _first_dtype({module}) is not {self.constant(dtype)}: return False",
        ]


def _compiled(guards: Iterable[Guard], followed: bool = False) -> Callable[[Any], bool]:
    code = _Code(followed)
    for guard in guards:
        code.add(guard)
    if code.resolved:
        code.names["_resolve"] = resolutions(code.resolved)
        code.lines.insert(0, "        if not _resolve(): return False")
    lines = ["def holds(self):", "    try:", *(code.lines or ["        pass"])]
    lines += [f"    except {_ABSENT}:", "        return False", "    return True"]
    exec(compile("\n".join(lines), "<schedule ledger>", "exec"), code.names)
    function: Callable[[Any], bool] = code.names["holds"]
    return function
