"""What is said of tuning in the documents, against what was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.tuning import BOUNDS, EXTREMES, RESULTS, TRIALS, Replayed
from schedule.tuning import Trial

STORED = json.loads(RESULTS.read_text())["results"]
SEARCHED: list[dict[str, Any]] = STORED["searches"]


def test_the_bounds_are_those_of_the_benchmark() -> None:
    assert [found["bound"] for found in SEARCHED] == list(BOUNDS)


@pytest.mark.parametrize("found", SEARCHED, ids=lambda found: f"{found['bound']:,}")
def test_tune_is_ahead_of_random_search_from_ten_trials_on(found: dict[str, Any]) -> None:
    for count in range(10, TRIALS + 1):
        ours, at_random = (found[name]["median"][count - 1] for name in ("schedule.tune", "random search"))
        assert ours < at_random, count


@pytest.mark.parametrize("found", SEARCHED, ids=lambda found: f"{found['bound']:,}")
def test_tune_beats_both_extremes(found: dict[str, Any]) -> None:
    for name in EXTREMES:
        assert not found[name]["fits"] or found["schedule.tune"]["median"][TRIALS - 1] < found[name]["time"]


def test_the_searches_run_over_the_points_that_are_stored() -> None:
    table = Replayed([Trial(**point) for point in STORED["points"]])
    again = table.search(BOUNDS[1], 15, 0, None)
    assert len(again) == 15 and again == sorted(again, reverse=True)
    assert min(time for time in again) >= SEARCHED[1]["best"]["time"]
    assert len(table.points) == SEARCHED[1]["points"]
