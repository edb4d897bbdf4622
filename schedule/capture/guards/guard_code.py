"""Functions of a module that check guards, with one lookup per source, also as ``torch.compile`` follows them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fused.torch_internals.dict_versions import HAS_DICT_VERSIONS, dict_version
from fused.torch_internals.modes import NO_TORCH_FUNCTION, DisableTorchFunction
from schedule.capture.guards.compiler_sources import (
    attribute_owner,
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
from schedule.capture.guards.guard import Guard
from schedule.capture.guards.plain_values import EXACT, same
from schedule.capture.guards.resolution import Resolved, resolutions
from schedule.capture.guards.sources import SELF, Attr, Const, DictOf, Item, Query, Self, Source, submodule_path
from schedule.capture.recording.hooks import acts_now
from schedule.capture.recording.structure import member_source, original_class
from schedule.util.generated_code import code_of
from schedule.util.internal_errors import is_generated, raise_if_own


def _is_of_class(value: Any, cls: type) -> bool:
    return type(value) is cls or (isinstance(value, nn.Module) and original_class(value) is cls)


def _fails(error: Exception) -> bool:
    """Return False, as a guard fails where what it reads is gone; raise an error of our own code."""
    if not is_generated(error):
        raise_if_own(error)
    return False


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


def _first_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first floating-point parameter, or None.

    It is used for modules without a parameter of the recorded name.
    """
    return next((each.dtype for each in module.parameters() if each.is_floating_point()), None)


CONDITIONS: dict[str, str] = {
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
_AS_IS = ("class", "tensor", "length", "keys", "contains", "lacks_item", "is", "none", "distinct", "true", "false")
FOLLOWED = {
    "same": "type({0}) is type({1}) and {0} == {1}",
    "lacks": "not hasattr({0}, {1})",
    "calls": "{0}.__func__ is {1}",
    **{kind: CONDITIONS[kind] for kind in _AS_IS},
}
_HELPERS = {"_same": same, "_is_of_class": _is_of_class, "_lacks": _lacks, "_calls": _calls, "_is_tensor": _is_tensor}
_HELPERS |= {"_first_dtype": _first_dtype, "_is_untouched": _is_untouched, "_own": object.__getattribute__}
_HELPERS |= {"_dict_version": dict_version, "_fails": _fails}


_ABSENT = "(LookupError, AttributeError, NameError, TypeError, ValueError)"


def follows(guard: Guard) -> bool:
    """Check whether ``torch.compile`` can follow the guard, on values stored in modules and their objects."""
    expected = guard.expected
    if guard.kind == "resolves":
        return expected.after is None and is_attribute(guard.source.value, expected.name, expected.raw)  # type: ignore[union-attr]
    if guard.kind not in FOLLOWED or not is_followed(guard.source) or is_large_set(guard.source):
        return False
    if guard.kind in ("is", "distinct"):
        return is_followed(expected) if isinstance(expected, Source) else is_compared(expected)
    return guard.kind in ("class", "calls", "tensor") or is_plain(expected)


_USUAL_LOOKUPS = (type.__getattribute__, types.ModuleType.__getattribute__)


def _lasting_table(source: Source) -> Any:
    """Return the ``__dict__`` at ``source`` if it is one object at every call: that of a class or a file."""
    table = isinstance(source, DictOf) or (isinstance(source, Attr) and source.name == "__dict__")
    of = source.base.value if table and isinstance(source.base, Const) else None  # type: ignore[union-attr]
    lasting = isinstance(of, (type, types.ModuleType)) and type(of).__getattribute__ in _USUAL_LOOKUPS
    return of.__dict__ if lasting else None


def _dict_getter(cls: type) -> Callable[[Any], Any] | None:
    """Return the function by which ``object.__getattribute__`` reads ``__dict__`` of instances, None if not C code."""
    found = next((vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base)), None)
    return found.__get__ if isinstance(found, types.GetSetDescriptorType) else None


def _table_of(guard: Guard) -> Source | None:
    """Return the source of the dict whose entries alone decide if ``guard`` holds, such as a file's globals."""
    if guard.kind in ("contains", "lacks_item"):
        table, key = guard.source, guard.expected
    elif isinstance(guard.source, Item) and guard.kind in ("is", "same", "none"):
        table, key = guard.source.base, guard.source.key
        if isinstance(guard.expected, Source) or (guard.kind == "same" and type(guard.expected) not in EXACT):
            return None
    else:
        return None
    constant = table.value if isinstance(table, Const) else _lasting_table(table)
    is_dict = type(constant) is dict or table == DictOf(SELF)
    return table if is_dict and type(key) is str else None


_FEWEST_LOOKUPS = 3
"""From here on, lookups in one dict cost more than its version."""
_MOST_VERSIONS = 1024


class _Code:
    """Source code of the function of a set of guards, with one lookup per source in the order of the guards."""

    def __init__(self, followed: bool) -> None:
        self.lines: list[str] = []
        self.functions: list[str] = []
        self.resolved: list[tuple[type, Resolved]] = []
        self._conditions, self._followed = FOLLOWED if followed else CONDITIONS, followed
        self.names: dict[str, Any] = dict(_HELPERS)
        self._locals: dict[Source, str] = {}
        self._classes: dict[Source, type] = {}
        self._plain: set[type] = set()  # classes whose attributes are looked up by object.__getattribute__
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
        if self._followed and (owner := attribute_owner(source)) is not None:
            return member_source(self.constant(owner), source.key)  # type: ignore[union-attr]
        if self._followed and (cell := cell_of(source)) is not None:
            return f"{self.constant(cell_reader(cell))}()"
        if not self._followed and (table := _lasting_table(source)) is not None:
            return self.constant(table)
        base = self.value(source.base)  # type: ignore[union-attr]
        if isinstance(source, DictOf):
            plain = isinstance(source.base, Const) or submodule_path(source.base) is not None
            plain = plain or self._classes.get(source.base) in self._plain
            if plain or self._followed:
                return f"{base}.__dict__"
            # Configs have a slow __getattribute__ in Python; torch.compile follows no other way around it.
            getter = _dict_getter(self._classes.get(source.base, object))
            return f"_own({base}, '__dict__')" if getter is None else f"{self.constant(getter)}({base})"
        if isinstance(source, Attr):
            return member_source(base, source.name)
        key = source.key  # type: ignore[union-attr]
        return f"{base}[{key!r}]" if type(key) in (str, int) else f"{base}[{self.constant(key)}]"

    def add_lookups(self, table: Source, guards: list[Guard]) -> None:
        """Add a line to return False unless all guards on entries of one dict hold.

        They are looked up again for versions of the dict, and dicts of like modules, for which they never held.
        """
        number, found = len(self.functions), self.value(table)
        self.names[f"_held_{number}"] = set[int]()
        again = f"_again_{number}({found})"
        self.lines.append(f"        if not (_dict_version({found}) in _held_{number} or {again}): return False")
        lines, known = self.lines, self._locals
        self.lines, self._locals = [], {table: "table"}
        for guard in guards:
            self.add(guard)
        looked_up = [line.removeprefix("    ") for line in self.lines]
        self.lines, self._locals = lines, known
        lines = [f"def _again_{number}(table):", "    version = _dict_version(table)", *looked_up]
        lines += [f"    if len(_held_{number}) == {_MOST_VERSIONS}: _held_{number}.clear()"]
        lines += [
            f"    if table: _held_{number}.add(version)  # the version of an empty dict may stay when it is filled"
        ]
        self.functions.append("\n".join([*lines, "    return True", ""]))

    def add(self, guard: Guard) -> None:
        """Add a line to return False unless ``guard`` holds."""
        if guard.kind == "resolves":
            self._add_lookup(guard.source.value, guard.expected)  # type: ignore[union-attr]
            return
        value = self.value(guard.source)
        expected = guard.expected
        if guard.kind == "computes_in":
            self._add_dtype(value, *expected)
            return
        if guard.kind == "class":
            self._classes[guard.source] = expected
        other = self.value(expected) if isinstance(expected, Source) else self.constant(expected)
        if guard.kind in ("lacks_item", "contains", "lacks") and type(expected) is str:
            other = repr(expected)
        self._add_condition(guard.kind, value, other)

    def _add_condition(self, kind: str, value: str, other: str) -> None:
        self.lines.append(f"        if not ({self._conditions[kind].format(value, other)}): return False")

    def _add_lookup(self, cls: type, expected: Resolved) -> None:
        if not self._followed:
            self.resolved.append((cls, expected))
            if (expected.name, expected.after, expected.raw) == ("__getattribute__", None, object.__getattribute__):
                self._plain.add(cls)
            return
        raw = getattr(expected.raw, "__func__", expected.raw)
        kind = "same" if is_plain(raw) else "is"
        self._add_condition(kind, member_source(self.constant(cls), expected.name), self.constant(raw))

    def _add_dtype(self, module: str, path: tuple[str, ...], dtype: torch.dtype) -> None:
        *holders, name = path
        found = module + "".join(f"._modules[{part!r}]" for part in holders) + f"._parameters[{name!r}].dtype"
        self.lines += [
            "        try:",
            f"            if {found} is not {self.constant(dtype)}: return False",
            "        except (KeyError, AttributeError):",
            f"            if _first_dtype({module}) is not {self.constant(dtype)}: return False",
        ]


def compiled(guards: Iterable[Guard], followed: bool = False) -> Callable[[Any], bool]:
    """Return a function to check whether all guards hold for a module.

    Args:
        guards: the guards.
        followed: whether to write the function as ``torch.compile`` follows it; then it follows all guards.
    """
    code, others = _Code(followed), list[Guard]()
    tables: dict[Source, list[Guard]] = {}
    for guard in guards:
        table = _table_of(guard) if HAS_DICT_VERSIONS and not followed else None
        (others if table is None else tables.setdefault(table, [])).append(guard)
    for table, looked_up in tables.items():
        if len(looked_up) < _FEWEST_LOOKUPS:
            others += looked_up
        else:
            code.add_lookups(table, looked_up)
    for guard in others:
        code.add(guard)
    if code.resolved:
        condition, names = resolutions(code.resolved)
        code.names |= names
        code.lines.insert(0, f"        if not ({condition}): return False")
    lines = [*code.functions, "def holds(self):", "    try:", *(code.lines or ["        pass"])]
    missed = "False" if followed else "_fails(error)"
    lines += [f"    except {_ABSENT} as error:", f"        return {missed}", "    return True"]
    exec(code_of("\n".join(lines), "<schedule guards>"), code.names)
    function: Callable[[Any], bool] = code.names["holds"]
    return function
