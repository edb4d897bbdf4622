"""Recipe values: arguments as plain frozen data, written as JSON or Python and converted back to objects.

None, booleans, integers, strings and floats stand for themselves; everything else is one of the kinds below. Only
``live``, the conversion back to objects, imports anything, and only a replay calls it.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from schedule.core.matching import Match, parallel
from schedule.distributed.planning.plan_data import Plan
from schedule.patterns import call_module
from schedule.util.errors import RecipeError
from schedule.util.wording import counted

C_MODULES = ("torch", "torch.nn.functional", "torch.special", "operator", "math")
"""Modules with functions implemented in C, which do not name their module."""
_HARMLESS = {"abs", "all", "any", "divmod", "len", "max", "min", "pow", "round", "sorted", "sum"}

Value = Any
"""None, a boolean, an integer, a float, a string, or a :class:`Kind`."""

Arguments = tuple[tuple[str, Value], ...]
"""(name of the parameter, value)."""

Finds = Mapping[str, Sequence[Sequence[Match]]]
"""What was found in a replay: name of the find → the matches of each module."""


class Kind(Protocol):
    """Value other than a plain one."""

    def json(self) -> dict[str, Any] | list[Any]:
        """Return the JSON data."""

    def live(self, finds: Finds) -> Any:
        """Return the object to pass to a primitive."""

    def source(self, modules: set[str]) -> str:
        """Return a Python expression, and add the modules it needs to ``modules``."""


@dataclass(frozen=True)
class Items:
    """A list or a tuple."""

    kind: str
    values: tuple[Value, ...]

    def json(self) -> dict[str, Any] | list[Any]:
        """Return a list, or ``{"tuple": …}``."""
        values = [to_json(value) for value in self.values]
        return values if self.kind == "list" else {"tuple": values}

    def live(self, finds: Finds) -> Any:
        """Return a list or a tuple."""
        values = [live(value, finds) for value in self.values]
        return values if self.kind == "list" else tuple(values)

    def source(self, modules: set[str]) -> str:
        """Return a list or tuple display."""
        inner = ", ".join(source(value, modules) for value in self.values)
        if self.kind == "list":
            return f"[{inner}]"
        return f"({inner},)" if len(self.values) == 1 else f"({inner})"


@dataclass(frozen=True)
class Table:
    """A dictionary with string keys."""

    entries: tuple[tuple[str, Value], ...]

    def json(self) -> dict[str, Any]:
        """Return ``{"dict": …}``."""
        return {"dict": {key: to_json(value) for key, value in self.entries}}

    def live(self, finds: Finds) -> Any:
        """Return the dictionary."""
        return {key: live(value, finds) for key, value in self.entries}

    def source(self, modules: set[str]) -> str:
        """Return a dictionary display."""
        return "{" + ", ".join(f"{key!r}: {source(value, modules)}" for key, value in self.entries) + "}"


@dataclass(frozen=True)
class Reference:
    """A function or class by its import path, ``"module:qualname"``."""

    name: str

    def json(self) -> dict[str, Any]:
        """Return ``{"reference": …}``."""
        return {"reference": self.name}

    def live(self, finds: Finds) -> Any:
        """Import the function or class.

        Raises:
            RecipeError: the module does not exist, does not contain the name, or only passes on what another package
                defines: a name must not lead from a module to whatever it imports.
        """
        module, _, qualname = self.name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in qualname.split("."):
                found = getattr(found, part)
                if isinstance(found, types.ModuleType):
                    raise self._refused(f"{part} is a module that {module} imports")
        except (ImportError, AttributeError) as error:
            raise RecipeError(
                f"{self.name} cannot be imported: {error}", fix="install what defines it, or edit the name"
            ) from error
        home = getattr(found, "__module__", None)
        if not callable(found):
            raise self._refused(f"a {type(found).__name__} is no function or class")
        if module == builtins.__name__ and not (isinstance(found, type) or qualname in _HARMLESS):
            raise self._refused("of the functions of Python, only those of numbers may be called")
        if isinstance(home, str) and home.strip("_").partition(".")[0] != module.partition(".")[0]:
            raise self._refused(f"{home} defines it")
        if home is None and module not in C_MODULES:
            raise self._refused("it does not say which module defines it")
        return found

    def _refused(self, why: str) -> RecipeError:
        return RecipeError(
            f"{self.name} is not what a recipe may name: {why}", fix="name a function or class by the module of its own"
        )

    def source(self, modules: set[str]) -> str:
        """Return ``module.qualname``."""
        module, _, qualname = self.name.partition(":")
        if module == "builtins":
            return qualname
        modules.add(module)
        return f"{module}.{qualname}"


@dataclass(frozen=True)
class Torch:
    """A ``torch.dtype`` or ``torch.device``."""

    kind: str
    name: str

    def json(self) -> dict[str, Any]:
        """Return ``{"dtype": …}`` or ``{"device": …}``."""
        return {self.kind: self.name}

    def live(self, finds: Finds) -> Any:
        """Return the dtype or device."""
        return getattr(torch, self.name) if self.kind == "dtype" else torch.device(self.name)

    def source(self, modules: set[str]) -> str:
        """Return an expression such as ``torch.float32`` or ``torch.device("cpu")``."""
        modules.add("torch")
        return f"torch.{self.name}" if self.kind == "dtype" else f"torch.device({self.name!r})"


@dataclass(frozen=True)
class ModuleCall:
    """A pattern ``call_module(…)``."""

    what: Value

    def json(self) -> dict[str, Any]:
        """Return ``{"call_module": …}``."""
        return {"call_module": to_json(self.what)}

    def live(self, finds: Finds) -> Any:
        """Return the pattern."""
        return call_module(live(self.what, finds))

    def source(self, modules: set[str]) -> str:
        """Return ``schedule.call_module(…)``."""
        return f"schedule.call_module({source(self.what, modules)})"


@dataclass(frozen=True)
class Made:
    """A module without parameters, as a constructor call."""

    cls: Reference
    arguments: tuple[tuple[str, Value], ...]

    def json(self) -> dict[str, Any]:
        """Return ``{"make": …, "arguments": …}``."""
        return {"make": self.cls.name, "arguments": {name: to_json(value) for name, value in self.arguments}}

    def live(self, finds: Finds) -> Any:
        """Return a new module.

        Raises:
            RecipeError: the name is not that of a class of modules.
        """
        cls = self.cls.live(finds)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise RecipeError(f"{self.cls.name} is no class of modules", fix="make a torch.nn.Module")
        return cls(**{name: live(value, finds) for name, value in self.arguments})

    def source(self, modules: set[str]) -> str:
        """Return the constructor call."""
        given = ", ".join(f"{name}={source(value, modules)}" for name, value in self.arguments)
        return f"{self.cls.source(modules)}({given})"


@dataclass(frozen=True)
class SharingPlan:
    """A tensor-parallel plan, as the JSON of the plan."""

    text: str

    def json(self) -> dict[str, Any]:
        """Return ``{"plan": …}``."""
        return {"plan": json.loads(self.text)}

    def live(self, finds: Finds) -> Any:
        """Return the plan."""
        return Plan.from_json(self.text)

    def source(self, modules: set[str]) -> str:
        """Return ``Plan.from_json(…)`` with the full module path."""
        modules.add("schedule.distributed.planning.plan_data")
        return f"schedule.distributed.planning.plan_data.Plan.from_json({self.text!r})"


@dataclass(frozen=True)
class Picked:
    """Matches selected from one find.

    Attributes:
        find: its name.
        which: ``"all"``; ``"parallel"``, groups as from ``find_parallel``; ``"each"``, those at ``positions``
            among the matches of each module; ``"these"``, those at ``positions`` among all, possibly nested; or
            ``"one"``, a single match.
        positions: indices from 0.
    """

    find: str
    which: str = "all"
    positions: tuple[Any, ...] = ()

    def json(self) -> dict[str, Any]:
        """Return the find's name, the kind of selection, and any positions."""
        found: dict[str, Any] = {"matches": self.find, "which": self.which}
        return found | ({"positions": _lists(self.positions)} if self.positions else {})

    def live(self, finds: Finds) -> Any:
        """Return the matches.

        Raises:
            RecipeError: there are fewer matches than the positions need.
        """
        found = finds[self.find]
        together = [match for own in found for match in own]
        try:
            if self.which == "parallel":
                return [group for own in found for group in parallel(own)]
            if self.which == "each":
                return [own[position] for own in found for position in self.positions]
            if self.which == "one":
                return together[self.positions[0]]
            return together if self.which == "all" else _map(self.positions, together.__getitem__)
        except IndexError:
            raise RecipeError(
                f"{self.find} has {counted(len(together), 'match', 'matches')}, fewer than {self.positions} asks for",
                fix="edit the positions; nothing was changed",
            ) from None

    def source(self, modules: set[str]) -> str:
        """Return an expression of the variable holding the find's matches."""
        if self.which == "all":
            return self.find
        if self.which == "one":
            return f"{self.find}[{self.positions[0]}]"
        if self.which == "these":
            return _text(_map(self.positions, lambda position: f"{self.find}[{position}]"))
        modules.add("schedule.recipes.recipe_values")
        given = f", {list(self.positions)}" if self.which == "each" else ""
        return f"schedule.recipes.recipe_values.{self.which}_of({self.find}{given})"


@dataclass(frozen=True)
class Joined:
    """The matches of several finds in one list."""

    parts: tuple[Picked, ...]

    def json(self) -> dict[str, Any]:
        """Return ``{"joined": …}``."""
        return {"joined": [part.json() for part in self.parts]}

    def live(self, finds: Finds) -> Any:
        """Return all matches in one list."""
        return [match for part in self.parts for match in part.live(finds)]

    def source(self, modules: set[str]) -> str:
        """Return an expression such as ``[*m1, *m2]``."""
        return f"[{', '.join('*' + part.source(modules) for part in self.parts)}]"


def to_json(value: Value) -> Any:
    """Return a value as JSON data, with non-finite floats as ``{"float": …}``."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value if value is None or isinstance(value, (bool, int, float, str)) else value.json()


def live(value: Value, finds: Finds) -> Any:
    """Return the object represented by a value."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else value.live(finds)


def source(value: Value, modules: set[str]) -> str:
    """Return a value as a Python expression, and add the modules it needs to ``modules``."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({repr(value)!r})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else value.source(modules)


def inner(value: Value) -> list[Value]:
    """Return a value and all values nested in it."""
    below: Sequence[Value] = ()
    if isinstance(value, Items):
        below = value.values
    elif isinstance(value, Table):
        below = [item for _, item in value.entries]
    elif isinstance(value, ModuleCall):
        below = (value.what,)
    elif isinstance(value, Made):
        below = (value.cls, *(item for _, item in value.arguments))
    elif isinstance(value, Joined):
        below = value.parts
    return [value, *(item for one in below for item in inner(one))]


def changed(arguments: Arguments, change: Callable[[Any], Any]) -> Arguments:
    """Return the arguments with ``change`` applied to every selection of matches in them."""

    def of(value: Any) -> Any:
        if isinstance(value, Items):
            return replace(value, values=tuple(map(of, value.values)))
        if isinstance(value, Table):
            return Table(tuple((key, of(item)) for key, item in value.entries))
        if isinstance(value, Joined):
            return Joined(tuple(map(of, value.parts)))
        return change(value) if hasattr(value, "positions") else value

    return tuple((name, of(value)) for name, value in arguments)


def each_of(matches: Sequence[Match], positions: Sequence[int]) -> list[Match]:
    """Return the matches at ``positions`` among those of each module."""
    return [own[position] for own in _by_module(matches) for position in positions]


def parallel_of(matches: Sequence[Match]) -> list[list[Match]]:
    """Group matches with the same value for one input, as ``find_parallel`` does."""
    return [group for own in _by_module(matches) for group in parallel(own)]


def _by_module(matches: Sequence[Match]) -> list[list[Match]]:
    found: dict[Any, list[Match]] = {}
    for match in matches:
        found.setdefault(match.schedule, []).append(match)
    return list(found.values())


def _map(positions: Sequence[Any], function: Callable[[int], Any]) -> list[Any]:
    return [_map(each, function) if isinstance(each, tuple) else function(each) for each in positions]


def _lists(positions: Sequence[Any]) -> list[Any]:
    return [_lists(each) if isinstance(each, tuple) else each for each in positions]


def _text(nested: Any) -> str:
    return f"[{', '.join(map(_text, nested))}]" if isinstance(nested, list) else str(nested)
