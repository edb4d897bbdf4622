"""What a search found: as a table, a page, data, a picture, and done again."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import schedule
from schedule import NotApplicable, RecipeError
from schedule.tuning import Trial, Tuning
from schedule.tuning.trial import pareto
from tests.report.test_report import Page
from tests.small import ids, small
from tests.tuning.synthetic import tuned


@pytest.fixture(scope="module")
def found() -> Tuning:
    return tuned(memory=200, trials=14)


def trial(number: int, time: float | None, memory: int | None, status: Any = "measured") -> Trial:
    return Trial(number, {"n": number}, status, time, memory)


def test_the_front_is_what_no_other_beats_in_both() -> None:
    trials = [
        trial(0, 1.0, 30),
        trial(1, 2.0, 10),
        trial(2, 2.0, 20),
        trial(3, 0.9, 40),
        trial(4, None, 5),
        trial(5, 3.0, 10),
    ]
    assert [one.number for one in pareto(trials)] == [1, 0, 3]


def test_as_a_table_the_best_comes_first(found: Tuning) -> None:
    lines = str(found).splitlines()
    first = next(line for line in lines if line.startswith("│"))
    assert found.best.label in first and "best" in first
    assert lines[0].strip() == "schedule.tune: Small by plan"
    assert "at most 200 B" in lines[-1] and "14 trials: " in lines[-1] and "more than allowed" in str(found)
    assert "PathError" in str(found), "why trials failed"


def test_as_a_page_everything_is_escaped(found: Tuning) -> None:
    page = Page(found._repr_html_())
    assert found.best.label in " ".join(page.texts)
    odd = Tuning([Trial(0, {"x": "<script>"}, "failed", reason="<b>no</b>")], of="<i>")
    assert "<script>" not in odd._repr_html_() and "<b>" not in odd._repr_html_()


def test_as_json(found: Tuning) -> None:
    data = json.loads(found.to_json())
    assert data["best"] == found.best.number and data["bound"] == 200 and len(data["trials"]) == 14
    assert schedule.Recipe.from_json(json.dumps(data["recipe"])) == found.recipe
    assert data["trials"][found.best.number]["knobs"] == found.best.knobs


def test_the_best_is_applied_and_its_recipe_replays(found: Tuning) -> None:
    applied = found.apply(small(), ids())
    replayed = schedule.replay(small(), schedule.Recipe.from_json(found.recipe.to_json()), ids())
    assert applied.recipe() == replayed.recipe() == found.recipe
    assert "def apply(sch" in found.recipe.to_python()


@pytest.mark.unwritable("that is what it is about")
def test_steps_that_cannot_be_written_down_are_applied_all_the_same() -> None:
    def plan(sch: schedule.Schedule, every: int) -> None:
        sch["blocks.0.mlp.act"].replace(torch.nn.Linear(32, 32))

    tuning = tuned(plan=plan, space={"every": [1, 2]}, cost=lambda sch, every: every, trials=2)
    with pytest.raises(RecipeError) as error:
        _ = tuning.recipe
    assert "trial" in str(error.value) and "tuning.apply" in str(error.value)
    assert len(tuning.apply(small(), ids()).history) == 1


def test_the_picture_shows_every_trial_the_front_and_the_bound(found: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "tuning.png"
    figure = found.plot(path, {"the first": found.trials[0].knobs, "nowhere": {}})
    assert path.stat().st_size < 150_000
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"measured", "over the bound", "Pareto front"} <= set(labels) and f"best: {found.best.label}" in labels
    texts = [text.get_text().strip() for text in axes.texts]
    assert "bound" in texts and "nowhere" not in texts
    dots = sum(
        len(dots.get_offsets()) for dots in axes.collections if dots.get_label() in ("measured", "over the bound")
    )
    assert dots == sum(one.time is not None for one in found.trials)


@pytest.mark.parametrize("path", ["missing/tuning.png", "tuning.docx"])
def test_a_picture_that_cannot_be_written_says_so(found: Tuning, tmp_path: Path, path: str) -> None:
    with pytest.raises(NotApplicable, match="cannot be written"):
        found.plot(tmp_path / path)


def test_without_times_or_matplotlib_there_is_no_picture(found: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotApplicable, match="no trial has both"):
        Tuning([trial(0, None, 10, "over the bound")]).plot()
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(NotApplicable, match="pip install"):
        found.plot()
