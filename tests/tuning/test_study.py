"""Searches on disk: they go on where they stopped, and only if they are about the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

import schedule
from schedule import NotApplicable
from tests.small import ids, small
from tests.tuning.synthetic import SPACE, cost, points, tuned


class Impatient:
    """The made-up cost, interrupted once."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sch: schedule.Schedule, decay: str, every: int, rows: int) -> Any:
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt
        return cost(sch, decay, every, rows)


@pytest.mark.parametrize("file", ["search.journal", "search.db"])
def test_an_interrupted_search_goes_on(tmp_path: Path, file: str) -> None:
    space = {**SPACE, "decay": ["none", "mlp"]}
    given: dict[str, Any] = {
        "space": space,
        "memory": 200,
        "trials": 9,
        "cost": Impatient(),
        "storage": tmp_path / file,
    }
    whole, first, second = tuned(space=space, memory=200, trials=9), tuned(**given), tuned(**given)
    assert first.stopped and len(first.trials) == 3 and points(first) == points(whole)[:3]
    assert not second.stopped and len(second.trials) == 9 and points(second)[:3] == points(first)
    calls = given["cost"].calls
    third = tuned(**given)
    assert given["cost"].calls == calls and points(third) == points(second), "all of it is there already"
    assert third.recipe == second.recipe


def test_a_process_that_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'search.db'}"
    tuned(trials=2, storage=storage)
    study = optuna.load_study(study_name="Small by plan", storage=storage)
    study.ask()
    tuning = tuned(trials=4, storage=storage)
    assert len(tuning.trials) == 4
    assert not study.get_trials(states=(optuna.trial.TrialState.RUNNING,))


def another_cost(sch: schedule.Schedule, decay: str, every: int, rows: int) -> Any:
    return cost(sch, decay, every, rows)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"space": {**SPACE, "rows": [1, 2]}}, "space"),
        ({"memory": 300}, "bound"),
        ({"cost": another_cost}, "cost"),
        ({"batch": ids(3)}, "batch"),
        ({"model": small(3)}, "parameters"),
    ],
)
def test_another_search_is_not_mixed_in(tmp_path: Path, given: dict[str, Any], what: str) -> None:
    tuned(memory=200, trials=1, storage=tmp_path / "search.journal")
    with pytest.raises(NotApplicable) as error:
        tuned(trials=2, storage=tmp_path / "search.journal", **{"memory": 200, **given})
    assert f"is about another {what}" in str(error.value) and "another name=" in str(error.value)
    named = tuned(trials=1, storage=tmp_path / "search.journal", name="other", **{"memory": 200, **given})
    assert len(named.trials) == 1


def test_a_file_that_cannot_be_one_says_so(tmp_path: Path) -> None:
    for storage in (tmp_path / "missing" / "search.journal", tmp_path / "missing" / "search.db"):
        with pytest.raises(NotApplicable) as error:
            tuned(trials=1, storage=storage)
        assert str(storage) in str(error.value)
    (tmp_path / "text.journal").write_text("a shopping list\n")
    with pytest.raises(NotApplicable, match=r"text\.journal"):
        tuned(trials=1, storage=tmp_path / "text.journal")


def test_what_is_stored_holds_for_random_search_too() -> None:
    def at_random(seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler(seed=seed)

    one, two = (tuned(trials=20, sampler=at_random, seed=seed) for seed in (1, 2))
    assert len({tuple(trial.knobs.items()) for trial in one.trials}) == 20
    assert points(one) != points(two)


def test_optuna_talks_as_much_as_before() -> None:
    level = optuna.logging.get_verbosity()
    tuned(trials=1)
    assert optuna.logging.get_verbosity() == level
