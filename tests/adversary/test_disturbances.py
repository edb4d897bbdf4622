"""Scheduled models that something is done to compute what their untouched twins compute, or say that they do not."""

from __future__ import annotations

import pytest

from tests.adversary.cases import FALLBACK, VACUOUS, WRONG, Case, Disturbance
from tests.adversary.catalog import cases, is_quick
from tests.adversary.harness import STEP, USUAL, judge
from tests.adversary.models import MODELS
from tests.adversary.statements import statement

pytestmark = [
    pytest.mark.unwritable("models are changed behind the schedule's back"),
    pytest.mark.unreplayable("models are changed behind the schedule's back"),
]


def _params() -> list[object]:
    names: dict[str, int] = {}
    found = []
    for index, case in enumerate(cases()):
        name = str(case)
        names[name] = names.get(name, 0) + 1
        slow = () if is_quick(case, index) else (pytest.mark.slow,)
        found.append(pytest.param(case, id=f"{name}-{names[name]}" if names[name] > 1 else name, marks=slow))
    return found


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", _params())
def test_a_disturbed_model_is_right_or_says_that_it_is_not(case: Case) -> None:
    verdict = judge(case)
    assert verdict.kind not in (WRONG, VACUOUS), str(verdict)


def test_the_harness_sees_what_is_done_to_one_of_both() -> None:
    """A mutation of the scheduled model alone is wrong, wherever it is."""
    for text in ("self.fc1.weight.data.mul_(2)", "self.number = 9", "self.unread = 9", "module.FACTOR = 9"):
        sides = iter((True, False))
        every = statement(text, ("Scalars",))

        def once(model, world, every=every, sides=sides):  # type: ignore[no-untyped-def]
            return every.apply(model, world) if next(sides) else None

        case = Case(MODELS["Scalars"], "default", Disturbance(text, once, ("Scalars",)), "after", USUAL)
        assert judge(case).kind == WRONG, text


def test_the_harness_counts_fallbacks() -> None:
    """A hook on all modules makes every call run the original forward."""
    hooked = statement("hook_all('register_module_forward_hook', lambda *given: None)", ())
    verdict = judge(Case(MODELS["Layer"], "default", hooked, "after", (STEP,)))
    assert verdict.kind == FALLBACK and verdict.fallbacks == 3, str(verdict)
