"""Modules import under the names that they had in version 1."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import schedule
from schedule.util import moved


@pytest.mark.parametrize("old", sorted(moved._MOVED))
def test_an_old_name_is_the_same_module(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if moved.new_name(name) is not None]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(DeprecationWarning, match="is (fx)?schedule"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(moved.new_name(old) or "")
    assert module.__spec__ is not None and module.__spec__.name == module.__name__ == moved.new_name(old)


def test_old_names_are_attributes_too() -> None:
    with pytest.warns(DeprecationWarning, match=r"schedule\.costs is schedule\.report\.costs now"):
        sys.modules.pop("schedule.costs", None)
        vars(schedule).pop("costs", None)
        assert schedule.costs.measure is importlib.import_module("schedule.report.costs").measure
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = schedule.nothing


def test_names_that_never_moved_are_unknown() -> None:
    assert moved.new_name("schedule.rules.gated") is None and moved.new_name("numpy.costs") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("schedule.never")


def test_fields_of_a_rule_have_their_old_names_too() -> None:
    with pytest.warns(DeprecationWarning, match=r"Rule\(objection=\) is extra_check now"):
        rule = schedule.Rule("old", "old", (lambda x: x * x,), lambda *_: None, objection=lambda match: "no")  # type: ignore
    with pytest.warns(DeprecationWarning, match=r"Rule\.objection is extra_check now"):
        assert rule.objection is rule.extra_check  # type: ignore[attr-defined]
    assert rule.extra_check(None) == "no"  # type: ignore[arg-type]


def test_classes_and_attributes_have_their_old_names_too() -> None:
    with pytest.warns(DeprecationWarning, match="ModeledStep"):
        assert schedule.tuning.ModelledStep is schedule.tuning.ModeledStep
    sch = schedule.create_schedule(torch.nn.ReLU(), torch.ones(2))
    with pytest.warns(DeprecationWarning, match="specializations"):
        assert sch.specialisations == sch.specializations
