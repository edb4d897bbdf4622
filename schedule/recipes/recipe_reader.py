"""Recipes from JSON: every field is checked, nothing is imported or executed."""

from __future__ import annotations

import difflib
import inspect
import json
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from schedule.distributed.planning.plan_data import Plan
from schedule.primitives.registry import registered
from schedule.recipes.recipe_values import (
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
from schedule.recipes.steps import VERSION, Call, Find, Step, Undo, finds_used
from schedule.util.errors import RecipeError, ShardError

_DEEPEST = 40
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_FIND = re.compile(r"m[0-9]{1,9}")
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")
_ASKING = ("find", "find_parallel", "shard_plan")
_WHICH = ("all", "parallel", "each", "these", "one")


def parsed(text: str) -> Any:
    """Parse JSON for :meth:`Recipe.from_json`.

    Raises:
        RecipeError: it is not JSON, has a duplicate key, or a constant such as NaN.
    """
    if not isinstance(text, (str, bytes, bytearray)):
        raise _wrong("the recipe", "JSON text", text)
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"it is no JSON: {error}", asked="read the recipe", fix="give what to_json() wrote") from None


def steps_of(data: Any) -> tuple[str, tuple[Step, ...], dict[str, str]]:
    """Return the architecture, the steps and the versions of a recipe from parsed JSON.

    Raises:
        RecipeError: as for :meth:`Recipe.from_json`.
    """
    fields = _object(data, "the recipe", required=("version", "architecture", "steps"), optional=("made_with",))
    version = fields["version"]
    if type(version) is not int or version < 1:
        raise _wrong("version", "a number from 1", version)
    if version > VERSION:
        raise RecipeError(
            f"it is of version {version}, and this release reads up to {VERSION}",
            asked="read the recipe",
            where="version",
            fix="install a newer fxschedule, or record it anew",
        )
    architecture = _string(fields["architecture"], "architecture")
    made_with = _object(fields.get("made_with", {}), "made_with")
    versions = {name: _string(value, f"made_with.{name}") for name, value in made_with.items()}
    steps: list[Step] = []
    known: set[str] = set()
    for number, item in enumerate(_list(fields["steps"], "steps")):
        step = _step(item, f"steps[{number}]")
        for name in finds_used(step):
            if name not in known:
                raise _error(f"no find before it is called {name!r}", f"steps[{number}]", "put the find before its use")
        if isinstance(step, Find):
            if step.name in known:
                raise _error(f"two finds are called {step.name}", f"steps[{number}].find", "give each its own name")
            known.add(step.name)
        steps.append(step)
    return architecture, tuple(steps), versions


# -- steps ----------------------------------------------------------------------------------------------------


def _step(data: Any, where: str) -> Step:
    kinds: dict[str, Callable[[Any, str], Step]] = {"find": _find, "call": _call, "undo": _undo}
    found = [kind for kind in kinds if isinstance(data, dict) and kind in data]
    if len(found) != 1:
        raise _wrong(where, 'an object with one of "find", "call" and "undo"', data)
    return kinds[found[0]](data, where)


def _find(data: Any, where: str) -> Find:
    fields = _object(data, where, required=("find", "at", "pattern", "counts"))
    name = _string(fields["find"], f"{where}.find")
    if not _FIND.fullmatch(name):
        raise _wrong(f"{where}.find", "a name such as m1", name)
    pattern = _value(fields["pattern"], f"{where}.pattern")
    if not isinstance(pattern, (str, Reference, ModuleCall)):
        raise _wrong(f"{where}.pattern", "the name of a rule, a path, a reference or a call_module", fields["pattern"])
    counts, at = fields["counts"], _at(fields["at"], f"{where}.at")
    if isinstance(counts, list):
        each = tuple(_count(count, f"{where}.counts[{i}]") for i, count in enumerate(counts))
        return Find(name, at, pattern, each)
    return Find(name, at, pattern, _count(counts, f"{where}.counts"))


def _call(data: Any, where: str) -> Call:
    fields = _object(data, where, required=("call", "at", "arguments"), optional=("rules",))
    name = _string(fields["call"], f"{where}.call")
    known = [each for each in registered() if each not in _ASKING]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else "import the module that registers it"
        raise _error(f"there is no primitive {name!r}", f"{where}.call", fix)
    given = _object(fields["arguments"], f"{where}.arguments")
    arguments = tuple((key, _value(value, f"{where}.arguments.{key}")) for key, value in given.items())
    _check_arguments(name, dict(arguments), f"{where}.arguments")
    rules = None
    if "rules" in fields:
        listed = _list(fields["rules"], f"{where}.rules")
        if name != "optimize" or not listed:
            raise _wrong(f"{where}.rules", "for optimize only, the rules that found something", fields["rules"])
        rules = tuple(_string(rule, f"{where}.rules[{i}]") for i, rule in enumerate(listed))
    return Call(name, _at(fields["at"], f"{where}.at"), arguments, rules)


def _check_arguments(primitive: str, arguments: dict[str, Value], where: str) -> None:
    for name in arguments:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise _error(f"{name!r} is not the name of a parameter", where, "give a name")
    try:
        inspect.signature(registered()[primitive]).bind(None, **arguments)
    except TypeError as error:
        signature = str(inspect.signature(registered()[primitive]))
        raise _error(f"{primitive}: {error}", where, f"its parameters are {signature}") from None


def _undo(data: Any, where: str) -> Undo:
    fields = _object(data, where, required=("undo",))
    return Undo(_count(fields["undo"], f"{where}.undo", least=1))


def _at(data: Any, where: str) -> tuple[str, ...]:
    paths = tuple(_string(path, f"{where}[{i}]") for i, path in enumerate(_list(data, where)))
    if not paths:
        raise _wrong(where, "at least one path", data)
    return paths


# -- values ---------------------------------------------------------------------------------------------------


def _value(data: Any, where: str, depth: int = 0) -> Value:
    if depth > _DEEPEST:
        raise _error(f"values are nested more than {_DEEPEST} deep", where, "record it anew")
    if data is None or type(data) in (bool, int, float, str):
        return data
    if isinstance(data, list):
        return Items("list", tuple(_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(data)))
    if isinstance(data, dict):
        for kind, reader in _KINDS.items():
            if kind in data:
                return reader(data, where, depth)
    raise _wrong(where, f"a plain value, a list, or an object with one of {', '.join(_KINDS)}", data)


def _tuple(data: Any, where: str, depth: int) -> Items:
    items = _list(_object(data, where, required=("tuple",))["tuple"], where)
    return Items("tuple", tuple(_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(items)))


def _dict(data: Any, where: str, depth: int) -> Table:
    entries = _object(_object(data, where, required=("dict",))["dict"], where)
    return Table(tuple((key, _value(item, f"{where}.{key}", depth + 1)) for key, item in entries.items()))


def _float(data: Any, where: str, depth: int) -> float:
    name = _object(data, where, required=("float",))["float"]
    if name not in ("nan", "inf", "-inf"):
        raise _wrong(where, "nan, inf or -inf", name)
    return float(name)


def _reference(data: Any, where: str, depth: int) -> Reference:
    return _name(_object(data, where, required=("reference",))["reference"], where)


def _name(data: Any, where: str) -> Reference:
    name = _string(data, where)
    words = re.split(r"[.:]", name)
    if not _REFERENCE.fullmatch(name) or not all(w.isidentifier() and not keyword.iskeyword(w) for w in words):
        raise _wrong(where, "a name such as package.module:function", name)
    return Reference(name)


def _dtype(data: Any, where: str, depth: int) -> Torch:
    name = _string(_object(data, where, required=("dtype",))["dtype"], where)
    if not isinstance(vars(torch).get(name), torch.dtype):
        raise _wrong(where, "the name of a dtype", name)
    return Torch("dtype", name)


def _device(data: Any, where: str, depth: int) -> Torch:
    name = _string(_object(data, where, required=("device",))["device"], where)
    if not _DEVICE.fullmatch(name):
        raise _wrong(where, "a device such as cuda:0", name)
    return Torch("device", name)


def _call_module(data: Any, where: str, depth: int) -> ModuleCall:
    what = _value(_object(data, where, required=("call_module",))["call_module"], where, depth + 1)
    if not isinstance(what, (str, Reference)):
        raise _wrong(where, "a path or a reference", what)
    return ModuleCall(what)


def _make(data: Any, where: str, depth: int) -> Made:
    fields = _object(data, where, required=("make", "arguments"))
    given = _object(fields["arguments"], f"{where}.arguments")
    for name in given:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise _wrong(f"{where}.arguments", "names of parameters", name)
    arguments = tuple((key, _value(item, f"{where}.arguments.{key}", depth + 1)) for key, item in given.items())
    return Made(_name(fields["make"], f"{where}.make"), arguments)


def _plan(data: Any, where: str, depth: int) -> SharingPlan:
    plan = _object(_object(data, where, required=("plan",))["plan"], where)
    try:
        return SharingPlan(Plan.from_json(json.dumps(plan)).to_json())
    except (ShardError, AttributeError) as error:
        raise _error(f"it is not a plan: {error}", where, "give what plan.to_json() returned") from None


def _picked(data: Any, where: str, depth: int = 0) -> Picked:
    fields = _object(data, where, required=("matches", "which"), optional=("positions",))
    find, which = _string(fields["matches"], f"{where}.matches"), fields["which"]
    if which not in _WHICH:
        raise _wrong(f"{where}.which", f"one of {', '.join(_WHICH)}", which)
    nested = 1 if which == "these" else 0
    positions = _positions(fields.get("positions", []), f"{where}.positions", nested)
    wanted = {"all": not positions, "parallel": not positions, "one": len(positions) == 1}
    if not wanted.get(which, bool(positions)):
        raise _wrong(f"{where}.positions", f"as many numbers as {which!r} takes", list(positions))
    return Picked(find, which, positions)


def _positions(data: Any, where: str, nested: int) -> tuple[Any, ...]:
    return tuple(
        _positions(item, f"{where}[{i}]", nested - 1) if nested and isinstance(item, list) else _count(item, where)
        for i, item in enumerate(_list(data, where))
    )


def _joined(data: Any, where: str, depth: int) -> Joined:
    parts = _list(_object(data, where, required=("joined",))["joined"], where)
    return Joined(tuple(_picked(part, f"{where}[{i}]") for i, part in enumerate(parts)))


_KINDS: dict[str, Callable[[Any, str, int], Value]] = {
    "reference": _reference,
    "matches": _picked,
    "joined": _joined,
    "tuple": _tuple,
    "dict": _dict,
    "float": _float,
    "dtype": _dtype,
    "device": _device,
    "call_module": _call_module,
    "make": _make,
    "plan": _plan,
}


# -- fields ---------------------------------------------------------------------------------------------------


def _object(data: Any, where: str, required: Sequence[str] = (), optional: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(type(key) is str for key in data):
        raise _wrong(where, "an object", data)
    missing = [name for name in required if name not in data]
    more = [name for name in data if name not in (*required, *optional)] if required else []
    if missing:
        raise _error(f"the field {missing[0]!r} is missing", where, f"fields: {', '.join((*required, *optional))}")
    if more:
        raise _error(f"there is no field {more[0]!r}", where, f"fields: {', '.join((*required, *optional))}")
    return data


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise _wrong(where, "a list", data)
    return data


def _string(data: Any, where: str) -> str:
    if type(data) is not str:
        raise _wrong(where, "a string", data)
    return data


def _count(data: Any, where: str, least: int = 0) -> int:
    if type(data) is not int or data < least:
        raise _wrong(where, f"a number from {least}", data)
    return data


def _wrong(where: str, wanted: str, data: Any) -> RecipeError:
    got = repr(data) if type(data) in (bool, float, str, type(None)) else f"a {type(data).__name__}"
    return _error(f"expected {wanted}, got {got[:80]}", where, "record it anew, or edit this field")


def _error(why: str, where: str, fix: str) -> RecipeError:
    return RecipeError(why, asked="read the recipe", where=where, fix=fix)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in an object")
    return found
