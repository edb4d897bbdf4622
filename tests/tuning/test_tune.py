"""The search: what is tried, what is recorded, and that nothing is left behind."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule import NotApplicable, choice, number
from schedule.tuning import Measured, Watch
from tests.fingerprint import fingerprint
from tests.small import ids, small
from tests.tuning.synthetic import SPACE, cost, plan, plan_nothing, points, tuned, watching

ALL = 36


def test_the_best_of_all_points_is_found() -> None:
    tuning = tuned(memory=200, trials=ALL)
    assert len(tuning.trials) == ALL
    assert tuning.best.knobs == {"decay": "mlp", "every": 0, "rows": 2}
    assert (tuning.best.time, tuning.best.memory) == (cost(None, "mlp", 0, 2))  # type: ignore[arg-type]


def test_no_point_is_measured_twice() -> None:
    seen: list[tuple[Any, ...]] = []

    def counted(sch: schedule.Schedule, **knobs: Any) -> Any:
        assert "watch" not in knobs, "it is no knob"
        seen.append(tuple(knobs.values()))
        return cost(sch, knobs["decay"], knobs["every"], knobs["rows"])

    tuning = tuned(space={**SPACE, "decay": ["none", "mlp"]}, cost=counted, trials=100)
    assert len(seen) == len(set(seen)) == len(tuning.trials) == 24, "the search ends when there is nothing new"


def test_the_best_is_within_the_bound_and_the_others_are_recorded() -> None:
    tuning = tuned(memory=100, trials=ALL)
    over = tuning.select("over the bound")
    assert over and all(trial.memory is not None and trial.memory > 100 for trial in over)
    assert all("more than allowed" in trial.reason for trial in over)
    measured = tuning.select("measured")
    assert all(trial.memory is not None and trial.memory <= 100 for trial in measured)
    assert tuning.best.time == min(trial.time for trial in measured if trial.time is not None)


def test_if_nothing_fits_the_error_says_the_least_and_where() -> None:
    tuning = tuned(space={**SPACE, "decay": ["none"]}, memory=20, trials=12)
    with pytest.raises(NotApplicable) as error:
        _ = tuning.best
    (least,) = [trial for trial in tuning.trials if trial.memory == 30]
    assert f"the least was 30, in trial {least.number}: decay=none, every=1, rows=1" in str(error.value)
    assert "memory=30" in str(error.value)
    with pytest.raises(NotApplicable):
        tuning.apply(small())


def test_a_wrong_path_is_recorded_and_the_search_goes_on() -> None:
    tuning = tuned(trials=ALL)
    failed = tuning.select("failed")
    assert len(failed) == 12 and {trial.knobs["decay"] for trial in failed} == {"typo"}
    assert all(trial.reason.startswith("PathError: ") and trial.time is None for trial in failed)


ERRORS = [
    NotApplicable("no"),
    schedule.ShardError("no"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("no"),
    MemoryError(),
    ValueError("no"),
    TypeError("no"),
    ZeroDivisionError("no"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["plan", "cost"])
def test_a_trial_that_raises_leaves_nothing_behind(error: Exception, where: str) -> None:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.0.mlp"].checkpoint()

    def failing(sch: schedule.Schedule, every: int) -> float:
        sch["blocks.*.attn"].checkpoint()
        torch.rand(3)
        if every == 2:
            raise error
        return 1.0

    def fine(sch: schedule.Schedule) -> float:
        return 1.0

    before = fingerprint(sch)
    bad, good = (failing, fine) if where == "plan" else (plan_nothing, failing)
    tuning = tuned(model=sch, batch=None, plan=bad, cost=good, space={"every": [1, 2, 3]}, trials=3)
    assert fingerprint(sch) == before
    (failed,) = tuning.select("failed")
    assert failed.reason.startswith(type(error).__name__) and failed.knobs == {"every": 2}
    assert len(tuning.select("measured")) == 2


def test_every_trial_starts_from_the_same_model() -> None:
    sch = schedule.create_schedule(small(), ids())
    sch.module(**ids())
    before = fingerprint(sch)
    seen = []

    def stepwise(sch: schedule.Schedule, decay: str, every: int) -> None:
        seen.append(fingerprint(sch))
        plan(sch, decay, every)

    tuned(model=sch, batch=None, plan=stepwise, trials=20)
    assert len(seen) == 20 and all(state == before for state in seen) and fingerprint(sch) == before


def test_steps_undone_before_can_still_be_redone() -> None:
    sch = schedule.create_schedule(small(), ids())
    sch["blocks.0"].checkpoint()
    sch.undo()
    tuned(model=sch, batch=None, trials=3)
    sch.redo()
    assert len(sch.history) == 1


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), None, "fast", True])
def test_a_cost_that_is_no_time_is_a_failure(wrong: Any) -> None:
    tuning = tuned(cost=lambda sch, rows: wrong, trials=2)
    assert [trial.status for trial in tuning.trials] == ["failed", "failed"]
    with pytest.raises(NotApplicable, match="all 2 trials failed"):
        _ = tuning.best


def test_the_same_seed_gives_the_same_trials() -> None:
    assert points(tuned(memory=200, trials=15, seed=3)) == points(tuned(memory=200, trials=15, seed=3))
    assert points(tuned(memory=200, trials=15, seed=3)) != points(tuned(memory=200, trials=15, seed=4))


def test_ctrl_c_ends_the_search_with_what_was_found() -> None:
    sch = schedule.create_schedule(small(), ids())
    before = fingerprint(sch)
    calls = 0

    def impatient(sch: schedule.Schedule, decay: str, every: int, rows: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return cost(sch, "none", every, rows)

    tuning = tuned(model=sch, batch=None, space={**SPACE, "decay": ["none"]}, cost=impatient, trials=10)
    assert tuning.stopped and len(tuning.trials) == 3 and tuning.best in tuning.trials
    assert "interrupted" in str(tuning)
    assert fingerprint(sch) == before


def test_memory_comes_before_time_and_slow_trials_end_early() -> None:
    told: list[Any] = []

    def noted(sch: schedule.Schedule, watch: Watch, **knobs: Any) -> Measured:
        time, tell = watch.time, lambda so_far: (told.append(knobs), time(so_far))
        watch.time = tell  # type: ignore[assignment, method-assign]
        return watching(sch, watch, **knobs)

    space = {"every": [0, 2, 1], "rows": [1, 2, 4, 8]}
    tuning = tuned(plan=plan_nothing, cost=noted, space=space, memory=200, trials=12)
    over = tuning.select("over the bound")
    assert over and all(trial.time is not None and told.count(trial.knobs) == 1 for trial in over), "timed once"
    assert all(told.count(trial.knobs) == 3 for trial in tuning.select("measured"))
    pruned = tuning.select("pruned")
    assert pruned and all(trial.time is not None and trial.memory is not None for trial in pruned)
    assert all(trial.time > tuning.best.time for trial in pruned if trial.time and tuning.best.time)


def test_numbers_and_knobs_that_depend_on_others() -> None:
    space = {
        "how": ["no", "budget"],
        "budget": number(10, 1_000, log=True, when={"how": "budget"}),
        "share": number(0.0, 1.0),
        "rule": choice(nn.GELU, nn.ReLU),
    }

    def priced(sch: schedule.Schedule, how: str, budget: int | None, share: float, rule: Any) -> float:
        assert (budget is not None) == (how == "budget")
        assert budget is None or (isinstance(budget, int) and 10 <= budget <= 1_000)
        return share + (0.0 if budget is None else abs(budget - 100) / 1_000) + (how == "no") + (rule is nn.ReLU)

    tuning = tuned(plan=plan_nothing, cost=priced, space=space, trials=25)
    assert not tuning.select("failed")
    assert tuning.best.knobs["how"] == "budget" and tuning.best.knobs["rule"] is nn.GELU


def test_a_plan_may_take_any_knob() -> None:
    seen: dict[str, Any] = {}
    tuned(plan=lambda sch, **knobs: seen.update(knobs), trials=1)
    assert seen.keys() == SPACE.keys()


def test_a_cost_may_return_what_it_measured() -> None:
    tuning = tuned(cost=lambda sch: Measured(2.0, 7), space={"every": [1]}, plan=lambda sch, every: None, trials=1)
    assert (tuning.best.time, tuning.best.memory) == (2.0, 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"space": {**SPACE, "typo": [1, 2]}}, "takes a knob named 'typo'"),
        ({"space": {"watch": [1, 2]}}, "takes a knob named 'watch'"),
        ({"memory": 0}, "memory is a number of bytes"),
        ({"memory": 1.5}, "memory is a number of bytes"),
        ({"trials": 0}, "trials is a whole number from 1"),
        ({"memory": 100, "cost": lambda sch, rows: 1.0}, "the cost measures no memory"),
    ],
)
def test_what_cannot_be_tuned_is_refused(given: dict[str, Any], message: str) -> None:
    sch = schedule.create_schedule(small(), ids())
    before = fingerprint(sch)
    with pytest.raises(NotApplicable) as error:
        tuned(model=sch, batch=None, **given)
    assert message in str(error.value) and fingerprint(sch) == before


def test_without_optuna_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "optuna" else find(name, *rest)
    )
    with pytest.raises(NotApplicable) as error:
        tuned()
    assert "pip install optuna" in str(error.value)


def test_a_mistake_in_the_plan_is_not_taken_for_a_bad_point() -> None:
    def broken(sch: schedule.Schedule, every: int) -> None:
        sch["blocks.0"].checkpoint()
        raise NameError("typo")

    sch = schedule.create_schedule(small(), ids())
    before = fingerprint(sch)
    with pytest.raises(NameError):
        tuned(model=sch, batch=None, plan=broken, space={"every": [1, 2]}, cost=lambda sch: 1.0)
    assert fingerprint(sch) == before


def test_watch_says_what_it_saw() -> None:
    watch = Watch(None, lambda so_far: False, lambda: pytest.fail("not asked for"))
    watch.memory(3)
    watch.time(2.0)
    assert (watch.seen_memory, watch.seen_time) == (3, 2.0)
