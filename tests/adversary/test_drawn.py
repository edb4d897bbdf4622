"""Modules drawn at random, with changes between calls, compute what their untouched twins compute."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.adversary.cases import FALLBACK, WRONG
from tests.adversary.drawn import Change, Part, Round, Spec, case_of, shrunk, specs
from tests.adversary.harness import judge
from tests.adversary.kinds import EFFECTS, SCALARS, TENSORS

pytestmark = [
    pytest.mark.unwritable("models are changed behind the schedule's back"),
    pytest.mark.unreplayable("models are changed behind the schedule's back"),
]

_PHASES = (Phase.explicit, Phase.generate)  # shrunk by leaving things out of the spec, which is faster
_LONG = int(os.environ.get("ADVERSARY_CASES", "2000"))


def _check(spec: Spec) -> None:
    if judge(case_of(spec)).kind == WRONG:
        least, verdict = shrunk(spec)
        pytest.fail(f"{least.story}\n{verdict}")


@settings(max_examples=35, phases=_PHASES, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(specs())
def test_drawn_modules(spec: Spec) -> None:
    _check(spec)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=_LONG, phases=_PHASES, database=None, suppress_health_check=list(HealthCheck))
@given(specs())
def test_many_drawn_modules(spec: Spec) -> None:
    _check(spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SCALARS, *TENSORS, *EFFECTS])
def test_unread_state_may_change(kind: str) -> None:
    """State that the forward does not read is no reason to fall back."""
    part = Part("s0", kind, "1.5", ())
    verdict = judge(case_of(Spec((part,), (), (Round(()), Round((Change("s0", 0, "2.5"),))))))
    assert verdict.kind not in (WRONG, FALLBACK), str(verdict)
