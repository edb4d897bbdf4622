"""Models changed after ``torch.compile``: scheduled ones compute what untouched eager ones do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import schedule
from schedule.util.errors import ScheduleError
from tests.adversary.cases import Case, World
from tests.adversary.catalog import cases
from tests.adversary.harness import seed, state_put_back
from tests.adversary.models import FIRST_CALL

pytestmark = [
    pytest.mark.unwritable("models are changed behind the schedule's back"),
    pytest.mark.unreplayable("models are changed behind the schedule's back"),
]
_ONE_IN = 32


def _params() -> list[Any]:
    """One case for each change of each small model, of which some run in CI."""
    found = {}
    for case in cases():
        if case.when == "after" and case.rules == "default" and "hf" not in case.model.tags:
            found.setdefault(f"{case.model.name}-{case.disturbance.name}", case)
    slow = (pytest.mark.slow,)
    return [
        pytest.param(case, id=name, marks=slow if index % _ONE_IN else ())
        for index, (name, case) in enumerate(found.items())
    ]


def _outcome(case: Case, scheduled: bool = False, compiled: bool = False) -> Any:
    """Return the results of two calls after the change, or the error that is raised; None if nothing was rewritten."""
    torch._dynamo.reset()
    world = World()
    with world.undo, state_put_back():
        seed()
        model = case.model.build(world)
        if scheduled:
            report = schedule.optimize(model, case.model.batch(*case.sizes), cost_guard=False)
            if not report.applied:
                return None
        if compiled:
            model.compile(backend="eager")
        for _ in range(2 if FIRST_CALL in case.model.tags else 1):
            seed()
            model(**case.model.batch(*case.sizes))
        try:
            model = case.disturbance.apply(model, world) or model
            found = []
            for _ in range(2):
                seed()
                found.append(model(**case.model.batch(*case.sizes)))
            return found
        except Exception as error:
            return error


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, Exception) or isinstance(other, Exception):
        return isinstance(one, Exception) and isinstance(other, Exception)
    try:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    except AssertionError:
        return False
    return True


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", _params())
def test_a_change_after_compiling_is_seen(case: Case) -> None:
    """Torch itself misses some changes, so compiled code of an untouched model may be the standard too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = _outcome(case, scheduled=True, compiled=True)
        if ours is None:
            pytest.skip("nothing is rewritten in it")
        if isinstance(ours, ScheduleError) or _agree(ours, _outcome(case)):
            return
        assert _agree(ours, _outcome(case, compiled=True)), "neither what eager nor what compiled code computes"
