"""The measured training step: memory is counted, times are ratios, the model stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fused
import schedule
from schedule.report.costs import step_peak
from schedule.tuning import TrainingStep, Watch, measuring
from schedule.tuning.measuring import rows_of, split
from schedule.verify.bisection import undone
from tests.fingerprint import fingerprint
from tests.small import ids, small


class Wide(nn.Module):
    """Keeps four tensors as large as its input for the backward pass, and more than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList([nn.Tanh() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x.sum()


BATCH = torch.ones(64, 1024)
ROW = 4 * 1024


def test_peak_memory_is_what_the_step_allocates() -> None:
    peak = step_peak(Wide(), BATCH)
    assert peak == step_peak(Wide(), BATCH), "counted, not sampled"
    assert 5 * 64 * ROW <= peak <= 8 * 64 * ROW


def test_peak_memory_falls_with_checkpoints_and_parts() -> None:
    model = Wide()
    whole = step_peak(model, BATCH)
    assert step_peak(model, *split(BATCH, 16)) < 0.5 * whole
    assert step_peak(nn.Sequential(model), BATCH) == whole
    gradients = step_peak(nn.Linear(1024, 256), BATCH)
    assert gradients >= 4 * 1024 * 256, "gradients count"


def test_what_earlier_steps_left_behind_does_not_count() -> None:
    model, left = Wide(), []
    first = step_peak(model, BATCH)
    with torch.profiler.profile(profile_memory=True):  # remembers what comes, also when it goes later
        left.append(BATCH.clone())
    left.append(left)  # a cycle, for the collector
    del left
    assert step_peak(model, BATCH) == first


def test_batches_are_split_by_rows() -> None:
    batch = {"ids": torch.arange(6).reshape(3, 2), "bias": torch.ones(5), "flag": True, "more": [torch.zeros(3)]}
    one, two = split(batch, 2)
    assert one["ids"].tolist() == [[0, 1], [2, 3]] and two["ids"].tolist() == [[4, 5]]
    assert one["bias"] is batch["bias"] and one["flag"] is True and two["more"][0].shape == (1,)
    assert split(batch, None) == [batch] == split(batch, 3) and rows_of(batch) == 3
    assert rows_of(torch.tensor(1.0)) == 1
    for wrong in (0, 4):
        with pytest.raises(schedule.NotApplicable, match="3 rows"):
            split(batch, wrong)


def seconds(monkeypatch: pytest.MonkeyPatch, of: Any) -> list[tuple[bool, int]]:
    """Times are made up by ``of(scheduled, parts)``; what was timed is noted."""
    seen: list[tuple[bool, int]] = []

    def made_up(model: nn.Module, *parts: Any, clock: Any = None) -> float:
        seen.append((schedule.runtime.state_of(model) is not None or bool(wrapped(model)), len(parts)))
        return float(of(*seen[-1]))

    monkeypatch.setattr(measuring, "step_seconds", made_up)
    return seen


def wrapped(model: nn.Module) -> list[Any]:
    from schedule.core.wrapping import wrappers_of

    return [around for module in model.modules() for around in wrappers_of(module)]


def scheduled() -> schedule.Schedule:
    sch = schedule.create_schedule(small(), ids(4))
    sch["blocks.*"].checkpoint()
    return sch


def watch(sch: schedule.Schedule, bound: int | None = None, told: list[float] | None = None) -> Watch:
    def note(so_far: float) -> bool:
        (told if told is not None else []).append(so_far)
        return False

    return Watch(bound, note, lambda: undone(sch))


def test_the_time_is_over_that_of_the_original_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sch, told = scheduled(), []
    seen = seconds(monkeypatch, lambda scheduled, parts: 3.0 if scheduled else 2.0)
    before = fingerprint(sch)
    measured = TrainingStep(3)(sch, watch(sch, told=told), micro_batch=2)
    assert measured.time == 1.5 and told == [1.5, 1.5, 1.5]
    assert [one for one in seen if one[0]] == [(True, 2)] * 3
    assert seen[-2:] == [(True, 2), (False, 1)]
    assert fingerprint(sch) == before


def test_the_median_of_the_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sch, times = scheduled(), iter([1.0, 1.0, 1.0, 50.0, 1.0, 2.0, 1.0])
    seconds(monkeypatch, lambda scheduled, parts: next(times))
    assert TrainingStep(3)(sch, watch(sch)).time == 2.0


def test_an_original_that_does_not_fit_is_timed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(scheduled: bool, parts: int) -> float:
        if not scheduled and parts < 4:
            raise torch.OutOfMemoryError("no")
        return 1.0

    sch = scheduled()
    seen = seconds(monkeypatch, too_large)
    assert TrainingStep(2)(sch, watch(sch)).time == 1.0
    assert [parts for scheduled, parts in seen if not scheduled][-1] == 4


def test_what_does_not_fit_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sch, told = scheduled(), []
    seen = seconds(monkeypatch, lambda scheduled, parts: 3.0 if scheduled else 2.0)
    watched = watch(sch, step_peak(sch.module, ids(4)) - 1, told)
    with pytest.raises(measuring.Ended, match="1 more than allowed"):
        TrainingStep()(sch, watched)
    assert [scheduled for scheduled, _ in seen].count(True) == 1 and watched.seen_time == 1.5
    assert told == [], "no other trial is compared with it"


def test_a_model_without_data_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    sch = schedule.create_schedule(model, torch.ones(1, 2, device="meta"))
    with pytest.raises(schedule.NotApplicable, match="cost of your own"):
        TrainingStep()(sch, watch(sch))


def plan(sch: schedule.Schedule, fused: bool, every: int) -> None:
    if fused:
        schedule.optimize(sch, cost_guard=False)
    if every:
        sch["blocks.*"].checkpoint(every=every)


def test_a_real_search_leaves_the_model_as_it_was_and_its_recipe_replays() -> None:
    model, batch = small().eval(), ids(4)
    sch = schedule.create_schedule(model, batch)
    model(**batch)[0].sum().backward()
    before = fingerprint(sch)
    space = {"fused": [True], "every": [0, 1], "micro_batch": [2, 4]}
    bound = step_peak(model, batch) + 10_000
    with fused.backend("reference"):
        tuning = schedule.tune(sch, plan, space, memory=bound, trials=4, cost=TrainingStep(1), progress=False)
    assert fingerprint(sch) == before
    assert len(tuning.trials) == 4 and not tuning.select("failed")
    best = tuning.best
    assert best.memory is not None and best.memory <= bound and best.time is not None and best.time > 0
    applied, replayed = tuning.apply(small(), batch), schedule.replay(small(), tuning.recipe, batch)
    assert [s.description for s in applied.history] == [s.description for s in replayed.history] != []
    parts = split(batch, best.knobs["micro_batch"])
    with fused.backend("reference"):
        assert step_peak(replayed.module, *parts) == step_peak(applied.module, *parts) == best.memory


@pytest.mark.slow
def test_compiled_trials_are_measured_on_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    sch = schedule.create_schedule(small(), ids(4))
    before = fingerprint(sch)
    compiled: list[Any] = []
    compiler = torch.compile

    def noted(model: Any) -> Any:
        compiled.append(model)
        return compiler(model)

    monkeypatch.setattr(torch, "compile", noted)
    space = {"fused": [False, True], "every": [0, 1], "compiled": [True]}
    tuning = schedule.tune(sch, plan, space, trials=4, cost=TrainingStep(1), progress=False)
    assert len(tuning.select("measured")) == 4 and fingerprint(sch) == before
    assert len(compiled) == 4 and sch.module not in compiled
    assert all(trial.time is not None and trial.memory for trial in tuning.trials)
