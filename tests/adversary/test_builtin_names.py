"""Builtins: what is read of them is guarded."""

from __future__ import annotations

import builtins
import pickle
import sys
from typing import Any

import pytest
from torch import nn

from schedule.capture.guards.guard import Guard
from schedule.capture.guards.guard_set import GuardSet
from schedule.capture.guards.sources import Const, Item
from tests.adversary.readings import Reading, as_untouched


def test_a_builtin_of_the_user_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "H_SCALE", 1.5, raising=False)
    module = Reading(lambda m: H_SCALE).eval()  # type: ignore[name-defined]  # noqa: F821
    as_untouched(module, lambda m: monkeypatch.setattr(builtins, "H_SCALE", 3.0), once=True)


def test_a_builtin_that_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Reading(lambda m: len(m.items), items=[1, 2]).eval()
    as_untouched(module, lambda m: monkeypatch.setattr(builtins, "len", lambda items: 17), once=True)
    monkeypatch.undo()


def test_a_builtin_that_is_added_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(m: Any) -> Any:
        try:
            return H_LATER  # type: ignore[name-defined]
        except NameError:
            return 2

    as_untouched(Reading(read).eval(), lambda m: monkeypatch.setattr(builtins, "H_LATER", 3, raising=False), once=True)


def test_a_builtin_read_beside_a_local_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(m: Any) -> Any:
        inner = [H_BESIDE for H_BESIDE in (1, 2)]
        return H_BESIDE + len(inner)  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setattr(builtins, "H_BESIDE", 1.5, raising=False)
    as_untouched(Reading(read).eval(), lambda m: monkeypatch.setattr(builtins, "H_BESIDE", 3.0), once=True)


def test_guards_on_builtins_and_loaded_modules_are_saved() -> None:
    kept = GuardSet(
        [
            Guard("is", Item(Const(vars(builtins)), "len"), len),
            Guard("is", Item(Const(sys.modules), "json"), Const(__import__("json"))),
            Guard("lacks_item", Const(sys.modules), "no_such_module"),
        ]
    )
    loaded = pickle.loads(pickle.dumps(kept))
    assert len(loaded.guards) == 3 and loaded.holds(nn.Module())
    assert loaded.guards[0].source.base.value is vars(builtins) and loaded.guards[1].source.base.value is sys.modules
