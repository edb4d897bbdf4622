"""Guards on entries of one dict are checked again whenever the dict has changed, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fused.torch_internals.dict_versions import HAS_DICT_VERSIONS
from schedule.capture.guards import guard_code
from schedule.capture.guards.guard import Guard
from schedule.capture.guards.sources import SELF, Const, DictOf, Item

FUNCTION, OTHER = print, repr
CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "replaced": lambda table: table.update(function=OTHER),
    "another type": lambda table: table.update(number=2.0),
    "set to None": lambda table: table.update(function=None),
    "no longer None": lambda table: table.update(nothing=0),
    "added": lambda table: table.setdefault("absent", 1),
    "removed": lambda table: table.pop("present"),
    "deleted": lambda table: table.__delitem__("function"),
    "last removed": lambda table: table.popitem(),
    "merged": lambda table: table.__ior__({"number": 3}),
    "cleared": lambda table: table.clear(),
}


def made() -> tuple[dict[str, Any], Callable[[Any], bool]]:
    table = {"function": FUNCTION, "number": 2, "nothing": None, "present": 1}
    source = Const(table)
    guards = [
        Guard("is", Item(source, "function"), FUNCTION),
        Guard("same", Item(source, "number"), 2),
        Guard("none", Item(source, "nothing")),
        Guard("contains", source, "present"),
        Guard("lacks_item", source, "absent"),
    ]
    return table, guard_code.compiled(guards)


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_so_is_its_reversal(change: str, versions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_code, "HAS_DICT_VERSIONS", versions and HAS_DICT_VERSIONS)
    table, holds = made()
    before = dict(table)
    assert holds(None) and holds(None)
    CHANGES[change](table)
    assert not holds(None) and not holds(None)
    table.clear()
    table.update(before)
    assert holds(None)


@pytest.mark.skipif(not HAS_DICT_VERSIONS, reason="this interpreter keeps no versions of dicts")
def test_entries_are_looked_up_again_only_after_a_change() -> None:
    table, holds = made()
    names = holds.__globals__
    again, asked = names["_again_0"], []
    names["_again_0"] = lambda table: asked.append(again(table)) or asked[-1]
    for _ in range(3):
        assert holds(None)
    assert asked == [True]
    table["unrelated"] = 1
    assert holds(None) and holds(None)
    assert asked == [True, True]
    table["function"] = OTHER
    assert not holds(None) and not holds(None)  # nothing is known of a version that failed
    assert asked == [True, True, False, False]


def test_an_empty_dict_that_is_filled_is_seen() -> None:
    """CPython 3.12 gives it no new version if another dict is merged into it."""
    table: dict[str, Any] = {}
    holds = guard_code.compiled([Guard("lacks_item", Const(table), name) for name in ("a", "b", "c")])
    assert holds(None) and holds(None)
    assert not holds.__globals__.get("_held_0")
    table.update({"a": 1})
    assert not holds(None)


def test_values_that_change_in_place_are_compared_each_time() -> None:
    table: dict[str, Any] = {"function": FUNCTION, "other": OTHER, "items": [1, 2]}
    source = Const(table)
    entries = [Guard("is", Item(source, "function"), FUNCTION), Guard("is", Item(source, "other"), OTHER)]
    holds = guard_code.compiled([*entries, Guard("length", Item(source, "items"), 2)])
    assert holds(None)
    table["items"].append(3)
    assert not holds(None)


def test_one_function_serves_like_modules() -> None:
    """It knows each of their dicts by its version, which no other dict ever has."""
    guards = [Guard("same", Item(DictOf(SELF), name), value) for name, value in (("a", 1), ("b", 2.0), ("c", "x"))]
    holds = guard_code.compiled(guards)
    modules = [nn.Module() for _ in range(3)]
    for each in modules:
        each.a, each.b, each.c = 1, 2.0, "x"
    assert all(holds(each) for _ in range(2) for each in modules)
    for each in modules:
        each.b = -2.0
        assert [holds(other) for other in modules] == [other is not each for other in modules]
        each.b = 2.0
        assert all(map(holds, modules))


def test_versions_of_a_dict_that_changes_all_the_time_are_forgotten() -> None:
    table, holds = made()
    for _ in range(2 * guard_code._MOST_VERSIONS + 3):
        table["unrelated"] = object()
        assert holds(None)
    if HAS_DICT_VERSIONS:
        assert 0 < len(holds.__globals__["_held_0"]) <= guard_code._MOST_VERSIONS
