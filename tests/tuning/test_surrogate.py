"""What the search learns: factors of knobs, the bound, failures."""

from __future__ import annotations

import random
import statistics
from typing import Any

import optuna

from schedule import choice, number
from schedule.tuning import Trial
from schedule.tuning.space import Space
from schedule.tuning.surrogate import promising
from tests.tuning.synthetic import tuned

WIDE = Space({"rules": ["none", "some", "all"], "every": [0, 8, 4, 2, 1], "rows": [1, 2, 4, 8, 16]})


def measured(rules: str, every: int, rows: int) -> tuple[float, int]:
    """Each knob has its factor, and two of them a little more together."""
    time = {"none": 1.0, "some": 0.9, "all": 0.7}[rules] * (1 + 0.4 * (every and 1 / every)) * (1 + 0.5 / rows)
    memory = {"none": 100, "some": 80, "all": 90}[rules] * rows * (1 - 0.7 * (every and 1 / every))
    return time * (1.1 if rules == "all" and every == 1 else 1.0), int(memory)


def seen(space: Space, count: int, bound: int, seed: int = 0) -> list[Trial]:
    trials = []
    for number_, point in enumerate(random.Random(seed).sample(list(space.points()), count)):
        time, memory = measured(**point)
        over = memory > bound
        trials.append(Trial(number_, point, "over the bound" if over else "measured", None if over else time, memory))
    return trials


def left(space: Space, trials: list[Trial]) -> list[dict[str, Any]]:
    return [point for point in space.points() if all(point != trial.knobs for trial in trials)]


def test_it_chooses_what_is_fast_and_fits() -> None:
    bound = 400
    trials = seen(WIDE, 20, bound)
    candidates = left(WIDE, trials)
    chosen = candidates[promising(WIDE, trials, bound, candidates)]
    time, memory = measured(**chosen)
    fitting = sorted(measured(**point)[0] for point in candidates if measured(**point)[1] <= bound)
    assert memory <= bound and time <= fitting[2]


def test_before_anything_fits_it_looks_for_less_memory() -> None:
    bound = 30
    trials = [trial for trial in seen(WIDE, 12, bound) if trial.status == "over the bound"]
    candidates = left(WIDE, trials)
    chosen = candidates[promising(WIDE, trials, bound, candidates)]
    assert measured(**chosen)[1] <= 60


def test_what_is_over_the_bound_says_what_is_fast() -> None:
    space = Space({"rules": ["none", "some", "all"], "every": [0, 1]})
    candidates = [{"rules": rules, "every": 1} for rules in ("some", "all")]
    for fast in (0, 1):
        times = [0.5 if n == fast else 1.5 for n in range(2)]
        over = [
            Trial(n, {**point, "every": 0}, "over the bound", time, 200)
            for n, (point, time) in enumerate(zip(candidates, times, strict=True))
        ]
        trials = [*over, Trial(2, {"rules": "none", "every": 1}, "measured", 1.0, 90)]
        assert promising(space, trials, 100, candidates) == fast


def test_it_keeps_away_from_what_fails() -> None:
    trials = [
        Trial(n, {"rules": rules, "every": n, "rows": 1}, "failed" if rules == "all" else "measured", time)
        for n, (rules, time) in enumerate([("all", None), ("some", 1.0), ("all", None), ("none", 1.1)])
    ]
    space = Space({"rules": ["none", "some", "all"], "every": [0, 1, 2, 3], "rows": [1]})
    candidates = left(space, trials)
    assert candidates[promising(space, trials, None, candidates)]["rules"] != "all"


def test_numbers_and_knobs_that_do_not_matter() -> None:
    space = Space(
        {"how": ["no", "yes"], "much": number(1, 1_000, log=True, when={"how": "yes"}), "x": number(0.0, 1.0)}
    )
    points = [{"how": "no", "much": None, "x": 0.5}, *({"how": "yes", "much": 10, "x": x} for x in (0.1, 0.5, 0.8))]
    trials = [Trial(n, point, "measured", 1.0 + point["x"]) for n, point in enumerate(points)]
    candidates = [{"how": "yes", "much": 11, "x": 0.9}, {"how": "yes", "much": 11, "x": 0.0}]
    assert promising(space, trials, None, candidates) == 1


def test_none_may_be_a_value() -> None:
    space = Space({"rules": [None, "all"], "one": choice(3)})
    trials = [Trial(0, {"rules": None, "one": 3}, "measured", 2.0), Trial(1, {"rules": "all", "one": 3}, "failed")]
    assert promising(space, trials, None, [{"rules": None, "one": 3}, {"rules": "all", "one": 3}]) == 0


def test_it_finds_more_than_random_search_in_as_many_trials() -> None:
    def at_random(seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler(seed=seed)

    def best(seed: int, sampler: Any) -> float:
        tuning = tuned(
            plan=lambda sch: None,
            cost=lambda sch, rules, every, rows: measured(rules, every, rows),
            space=WIDE.knobs,
            memory=250,
            trials=15,
            seed=seed,
            sampler=sampler,
        )
        return tuning.best.time or 0.0

    ours, random_search = ([best(seed, sampler) for seed in range(5)] for sampler in (None, at_random))
    fitting = [time for time, memory in (measured(**point) for point in WIDE.points()) if memory <= 250]
    assert statistics.median(ours) <= 1.02 * min(fitting)
    assert statistics.median(ours) < statistics.median(random_search)
