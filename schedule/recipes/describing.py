"""Conversion of primitives' arguments to recipe values."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from schedule.capture import original_class
from schedule.core.matching import Found, Match, parallel
from schedule.patterns import Pattern, call_module
from schedule.recipes.recipe_values import (
    C_MODULES,
    Items,
    Joined,
    Made,
    ModuleCall,
    Picked,
    Reference,
    SharingPlan,
    Table,
    Torch,
    Value,
)
from schedule.rules import Rule
from schedule.rules.rule_registry import RULES


class Undescribable(Exception):
    """Error for an object without a recipe value.

    Args:
        why: the reason, with the kind of object.
        fix: what to give instead.
    """

    def __init__(self, why: str, fix: str) -> None:
        self.why, self.fix = why, fix
        super().__init__(why)


@dataclass(frozen=True)
class Refused:
    """Placeholder for an undescribable argument, raised as an error if a recipe is requested."""

    why: str
    fix: str


@dataclass(frozen=True)
class Chosen:
    """Placeholder for :class:`Picked` until finds have names."""

    found: Found
    which: str
    positions: tuple[Any, ...] = ()

    def named(self, name: str) -> Picked:
        """Return the value for the recipe, with the name of the find."""
        return Picked(name, self.which, self.positions)


def described(value: Any) -> Value:
    """Return ``value`` as a recipe value.

    Raises:
        Undescribable: it has none.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Match):
        return Chosen(_found(value), "one", (_found(value).matches.index(value),))
    if isinstance(value, (list, tuple)):
        return _matches(value) if _holds_matches(value) else _items(value)
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return Table(tuple((key, described(item)) for key, item in value.items()))
    if isinstance(value, torch.dtype):
        return Torch("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Torch("device", str(value))
    if isinstance(value, call_module):
        return ModuleCall(described(value.what))
    if isinstance(value, (Rule, Pattern)):
        return _rule_name(value)
    if isinstance(value, nn.Module):
        return _made(value)
    if type(value).__name__ == "Plan" and type(value).__module__ == "schedule.distributed.planning.plan_data":
        return SharingPlan(value.to_json())
    if callable(value):
        return reference_to(value)
    raise Undescribable(f"a {type(value).__name__} cannot be written down", "give numbers, strings, classes, functions")


def _items(value: Sequence[Any]) -> Items:
    return Items("list" if isinstance(value, list) else "tuple", tuple(map(described, value)))


# -- functions and classes ------------------------------------------------------------------------------------


def reference_to(value: Any) -> Reference:
    """Return a reference to a function or class, by the shortest module path to import it from.

    Raises:
        Undescribable: a lambda, a local function or class, or one defined in the running script.
    """
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None)
    if not isinstance(name, str):
        raise Undescribable(f"a {type(value).__name__} object has no name", "give a function or class of a module")
    if "<" in name:
        kind = "a lambda" if name.endswith("<lambda>") else f"{name.rpartition('.')[2]}, defined inside a function,"
        raise Undescribable(f"{kind} cannot be imported", "make it a function at the top of a module")
    if module == "__main__":
        raise Undescribable(f"{name} is defined in the running script", "put it into a module of its own")
    short = name.rpartition(".")[2]
    for holder, wanted in [*((parent, name) for parent in _parents(module)), *((one, short) for one in C_MODULES)]:
        found: Any = vars(sys.modules[holder]) if holder in sys.modules else {}
        first, *rest = wanted.split(".")
        if functools.reduce(lambda at, part: getattr(at, part, None), rest, found.get(first)) is value:
            return Reference(f"{holder}:{wanted}")
    raise Undescribable(f"{name} is not what {module} has under that name", "give a function at the top of a module")


def _parents(module: str | None) -> list[str]:
    parts = (module or "").split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _rule_name(value: Rule | Pattern) -> str:
    for rule in RULES.values():
        if value is rule or value in rule.patterns:
            return rule.name
    raise Undescribable(
        f"{value.name} is a {type(value).__name__} that no registered rule has",
        "register the rule, or give the function that the pattern was compiled from",
    )


# -- modules --------------------------------------------------------------------------------------------------


def _made(module: nn.Module) -> Made:
    """Return a stateless module as a constructor call with the arguments stored in its attributes.

    A new module made by that call must have the same settings.
    """
    cls = original_class(module)
    fix = "use replace_all(kind, make) with a function make(path, module) at the top of a module"
    if any(True for _ in (*module.parameters(), *module.buffers(), *module.children())):
        raise Undescribable(f"a {cls.__name__} has parameters, buffers or submodules of its own", fix)
    arguments: list[tuple[str, Any]] = []
    for parameter in list(inspect.signature(cls).parameters.values()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = getattr(module, parameter.name, parameter.default)
        if value is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
            raise Undescribable(f"a {cls.__name__} does not keep its argument {parameter.name}", fix)
        if value is not parameter.default and value != parameter.default:
            arguments.append((parameter.name, value))
    with torch.random.fork_rng(devices=[]):
        twin = cls(**dict(arguments))
    if _settings(twin) != _settings(module):
        raise Undescribable(f"a {cls.__name__} made anew has other settings than this one", fix)
    return Made(reference_to(cls), tuple((name, described(value)) for name, value in arguments))


_TRACKED = {*vars(nn.Module()), "training"}


def _settings(module: nn.Module) -> dict[str, Value]:
    return {name: described(value) for name, value in vars(module).items() if name not in _TRACKED}


# -- matches --------------------------------------------------------------------------------------------------


def _holds_matches(value: Sequence[Any]) -> bool:
    return any(isinstance(i, Match) or (isinstance(i, (list, tuple)) and _holds_matches(i)) for i in value)


def _matches(value: Sequence[Any]) -> Value:
    """Return matches as runs from one find each, joined if there are several."""
    runs: list[tuple[Found, list[Any]]] = []
    for item in value:
        found = _found(item)
        if runs and runs[-1][0] is found:
            runs[-1][1].append(item)
        else:
            runs.append((found, [item]))
    parts = [_chosen(found, items) for found, items in runs]
    return parts[0] if len(parts) == 1 else Joined(tuple(parts))  # type: ignore[arg-type]


def _chosen(found: Found, items: list[Any]) -> Chosen:
    """Return the shortest selection of ``items``, usable on a model with more modules too."""
    if items == found.matches:
        return Chosen(found, "all")
    groups = [] if any(isinstance(i, Match) for i in items) else [list(i) for i in items]
    if groups and groups == [group for search in found.searches for group in parallel(search.matches)]:
        return Chosen(found, "parallel")
    positions = _positions(found, items)
    own = [[search.matches.index(i) for i in items if i in search.matches] for search in found.searches]
    alike = len(own) > 1 and own[0] and all(each == own[0] for each in own)
    if alike and [search.matches[position] for search in found.searches for position in own[0]] == items:
        return Chosen(found, "each", tuple(own[0]))
    return Chosen(found, "these", positions)


def _positions(found: Found, items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(found.matches.index(i) if isinstance(i, Match) else _positions(found, i) for i in items)


def _found(item: Any) -> Found:
    founds = {match.search.found if match.search is not None else None for match in _flat(item)}
    if len(founds) == 1:
        found = founds.pop()
        if found is not None and not found.wanted.closed:
            raise Undescribable("a match is from find(closed=False)", "find it without closed=False")
        if found is not None:
            return found
    raise Undescribable(
        "a match is not from find(), or is grouped with one of another find()", "give what find() found"
    )


def _flat(item: Any) -> list[Match]:
    if isinstance(item, Match):
        return [item]
    if isinstance(item, (list, tuple)):
        return [match for inner in item for match in _flat(inner)]
    raise Undescribable(f"a {type(item).__name__} stands among matches", "give what find() found")


def arguments_described(arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the arguments as recipe values, with :class:`Refused` for undescribable ones."""
    found: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        try:
            found.append((name, described(value)))
        except Undescribable as error:
            found.append((name, Refused(error.why, error.fix)))
    return tuple(found)
