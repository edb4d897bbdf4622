"""What a recipe says of an argument: plain frozen data that is written as JSON or as Python, and made live again.

None, booleans, integers, strings and floats stand for themselves; all else is one of the kinds below. Making a value
live is the only thing here that imports, and happens in a replay only.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from schedule.core.matching import Match, parallel
from schedule.distributed.planning.plan import Plan
from schedule.patterns import call_module
from schedule.util.errors import RecipeError
from schedule.util.wording import counted

Value = Any
"""None, a boolean, an integer, a float, a string, or a :class:`Kind`."""

Arguments = tuple[tuple[str, Value], ...]
"""(name of the parameter, value)."""

Finds = Mapping[str, Sequence[Sequence[Match]]]
"""What was found in a replay: name of the find → the matches of each module."""


class Kind(Protocol):
    """A value that is not plain."""

    def json(self) -> dict[str, Any] | list[Any]:
        """As JSON."""

    def live(self, finds: Finds) -> Any:
        """The object that a primitive is called with."""

    def source(self, modules: set[str]) -> str:
        """As a Python expression; what it needs imported is added to ``modules``."""


@dataclass(frozen=True)
class Items:
    """A list, or a tuple."""

    kind: str
    values: tuple[Value, ...]

    def json(self) -> dict[str, Any] | list[Any]:
        """A list as it is."""
        values = [to_json(value) for value in self.values]
        return values if self.kind == "list" else {"tuple": values}

    def live(self, finds: Finds) -> Any:
        """Of the same type."""
        values = [live(value, finds) for value in self.values]
        return values if self.kind == "list" else tuple(values)

    def source(self, modules: set[str]) -> str:
        """A display."""
        inner = ", ".join(source(value, modules) for value in self.values)
        if self.kind == "list":
            return f"[{inner}]"
        return f"({inner},)" if len(self.values) == 1 else f"({inner})"


@dataclass(frozen=True)
class Table:
    """A dictionary with strings for keys."""

    entries: tuple[tuple[str, Value], ...]

    def json(self) -> dict[str, Any]:
        """``{"dict": …}``."""
        return {"dict": {key: to_json(value) for key, value in self.entries}}

    def live(self, finds: Finds) -> Any:
        """A dictionary."""
        return {key: live(value, finds) for key, value in self.entries}

    def source(self, modules: set[str]) -> str:
        """A display."""
        return "{" + ", ".join(f"{key!r}: {source(value, modules)}" for key, value in self.entries) + "}"


@dataclass(frozen=True)
class Reference:
    """A function or class, by where it can be imported: ``"module:qualname"``."""

    name: str

    def json(self) -> dict[str, Any]:
        """``{"reference": …}``."""
        return {"reference": self.name}

    def live(self, finds: Finds) -> Any:
        """Import it.

        Raises:
            RecipeError: there is no such module, or nothing of that name in it.
        """
        module, _, qualname = self.name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in qualname.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise RecipeError(
                f"{self.name} cannot be imported: {error}", fix="install what defines it, or edit the name"
            ) from error
        return found

    def source(self, modules: set[str]) -> str:
        """``module.qualname``."""
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
        """``{"dtype": …}`` or ``{"device": …}``."""
        return {self.kind: self.name}

    def live(self, finds: Finds) -> Any:
        """The object."""
        return getattr(torch, self.name) if self.kind == "dtype" else torch.device(self.name)

    def source(self, modules: set[str]) -> str:
        """``torch.float32``, ``torch.device("cpu")``."""
        modules.add("torch")
        return f"torch.{self.name}" if self.kind == "dtype" else f"torch.device({self.name!r})"


@dataclass(frozen=True)
class ModuleCall:
    """``call_module(…)`` as a pattern."""

    what: Value

    def json(self) -> dict[str, Any]:
        """``{"call_module": …}``."""
        return {"call_module": to_json(self.what)}

    def live(self, finds: Finds) -> Any:
        """The pattern."""
        return call_module(live(self.what, finds))

    def source(self, modules: set[str]) -> str:
        """As users write it."""
        return f"schedule.call_module({source(self.what, modules)})"


@dataclass(frozen=True)
class Made:
    """A module without parameters, as the call that makes one like it."""

    cls: Reference
    arguments: tuple[tuple[str, Value], ...]

    def json(self) -> dict[str, Any]:
        """``{"make": …, "arguments": …}``."""
        return {"make": self.cls.name, "arguments": {name: to_json(value) for name, value in self.arguments}}

    def live(self, finds: Finds) -> Any:
        """A new module."""
        return self.cls.live(finds)(**{name: live(value, finds) for name, value in self.arguments})

    def source(self, modules: set[str]) -> str:
        """The call."""
        given = ", ".join(f"{name}={source(value, modules)}" for name, value in self.arguments)
        return f"{self.cls.source(modules)}({given})"


@dataclass(frozen=True)
class SharingPlan:
    """A tensor-parallel plan, as its own JSON."""

    text: str

    def json(self) -> dict[str, Any]:
        """``{"plan": …}``."""
        return {"plan": json.loads(self.text)}

    def live(self, finds: Finds) -> Any:
        """The plan."""
        return Plan.from_json(self.text)

    def source(self, modules: set[str]) -> str:
        """Read from its JSON."""
        modules.add("schedule.distributed.planning.plan")
        return f"schedule.distributed.planning.plan.Plan.from_json({self.text!r})"


@dataclass(frozen=True)
class Picked:
    """Matches of one find.

    Attributes:
        find: its name.
        which: ``"all"``; ``"parallel"``, groups as ``find_parallel`` makes them; ``"each"``, those at ``positions``
            among the matches of each module; ``"these"``, those at ``positions`` among all, which may be nested; or
            ``"one"``, a single one.
        positions: indexes from 0.
    """

    find: str
    which: str = "all"
    positions: tuple[Any, ...] = ()

    def json(self) -> dict[str, Any]:
        """``{"matches": name, "which": …}``."""
        found: dict[str, Any] = {"matches": self.find, "which": self.which}
        return found | ({"positions": _lists(self.positions)} if self.positions else {})

    def live(self, finds: Finds) -> Any:
        """The matches.

        Raises:
            RecipeError: there are fewer.
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
        """From the variable that the find was assigned to."""
        if self.which == "all":
            return self.find
        if self.which == "one":
            return f"{self.find}[{self.positions[0]}]"
        if self.which == "these":
            return _text(_map(self.positions, lambda position: f"{self.find}[{position}]"))
        modules.add("schedule.recipes.values")
        given = f", {list(self.positions)}" if self.which == "each" else ""
        return f"schedule.recipes.values.{self.which}_of({self.find}{given})"


@dataclass(frozen=True)
class Joined:
    """The matches of several finds in one list."""

    parts: tuple[Picked, ...]

    def json(self) -> dict[str, Any]:
        """``{"joined": …}``."""
        return {"joined": [part.json() for part in self.parts]}

    def live(self, finds: Finds) -> Any:
        """One list."""
        return [match for part in self.parts for match in part.live(finds)]

    def source(self, modules: set[str]) -> str:
        """``[*m1, *m2]``."""
        return f"[{', '.join('*' + part.source(modules) for part in self.parts)}]"


def to_json(value: Value) -> Any:
    """A value as JSON; floats that JSON has not are spelled out."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value if value is None or isinstance(value, (bool, int, float, str)) else value.json()


def live(value: Value, finds: Finds) -> Any:
    """A value as the object that it stands for."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else value.live(finds)


def source(value: Value, modules: set[str]) -> str:
    """A value as a Python expression; what it needs imported is added to ``modules``."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({repr(value)!r})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else value.source(modules)


def inner(value: Value) -> list[Value]:
    """What is in a value, with the value itself."""
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
    """Arguments with ``change`` made to what says which matches they are."""

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
    """Of the matches of each module, those at ``positions``."""
    return [own[position] for own in _by_module(matches) for position in positions]


def parallel_of(matches: Sequence[Match]) -> list[list[Match]]:
    """Matches that read one value under one input's name, together, as ``find_parallel`` gives them."""
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
