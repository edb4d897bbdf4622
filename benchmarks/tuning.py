"""Tuning of GPT-2's training step under a memory bound, against both extremes, TPE and random search.

    python -m benchmarks.tuning            # measure every point of the space, then search
    python -m benchmarks.tuning --replay   # search again over the points that were measured

Every point of the space is measured with the default cost function of ``schedule.tune``, and the fastest twelfth once
more. The searches then run over that table with many seeds: all of them see the same numbers, without the noise of the
machine. A trial is a point not tried before, for random search too. Times are ratios to the original model's step, in
CPU seconds of one thread, which other processes on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import optuna
import torch
import transformers as hf
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import schedule
from benchmarks.timing import write_json
from schedule.tuning import TrainingStep, Trial, Tuning, Watch
from schedule.tuning.trial import labeled

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tuning_gpt2_cpu.json"
PICTURE, CURVES = ROOT / "docs" / "tuning.png", ROOT / "docs" / "tuning_searches.png"
BOUNDS = (25_000_000, 35_000_000)
TRIALS, SHOWN = 30, (10, 15, 20, 30)
Knobs = dict[str, Any]

WHAT = {"blocks": "transformer.h.*", "attention": "transformer.h.*.attn", "mlp": "transformer.h.*.mlp"}
SPACE = {
    "rules": ["none", "default", "memory", "all"],
    "recomputed": ["nothing", *WHAT],
    "every": schedule.choice(1, 2, 3, when={"recomputed": list(WHAT)}),
    "micro_batch": [1, 2, 4],
}
EXTREMES = {
    "no checkpointing": {"rules": "none", "recomputed": "nothing", "every": None, "micro_batch": 4},
    "all checkpointing": {"rules": "none", "recomputed": "blocks", "every": 1, "micro_batch": 4},
}


def plan(sch: schedule.Schedule, rules: str, recomputed: str, every: int | None) -> None:
    """Apply the knobs to the schedule (the tuned function)."""
    if rules != "none":
        schedule.optimize(sch, rules=rules)
    if every is not None:
        sch[WHAT[recomputed]].checkpoint(every=every)


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build the model and its batch."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = hf.GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=2000, n_positions=256, bos_token_id=1, use_cache=False, **none
    )
    torch.manual_seed(0)
    model: nn.Module = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(0, 2000, (4, 128))
    return model, {"input_ids": ids, "labels": ids}


def measured(rounds: int, storage: Path) -> list[Trial]:
    """Measure every point of the space without pruning, and continue an interrupted run from ``storage``."""
    model, batch = gpt2()
    cost = TrainingStep(rounds, time.process_time)

    def to_the_end(sch: schedule.Schedule, watch: Watch, micro_batch: int) -> Any:
        return cost(sch, Watch(None, lambda so_far: False, watch.original), micro_batch)

    return list(schedule.tune(model, plan, SPACE, batch, trials=1_000, cost=to_the_end, storage=storage).trials)


def again(points: Sequence[Trial], rounds: int, storage: Path) -> list[Trial]:
    """Return ``points`` with the fastest twelfth measured again.

    The minimum of many noisy figures is biased toward low values.
    """
    model, batch = gpt2()
    chosen = sorted(points, key=lambda point: point.time or math.inf)[: len(points) // 12]
    known = {point.number: point for point in chosen}
    cost = TrainingStep(rounds, time.process_time)

    def apply(sch: schedule.Schedule, number: int) -> None:
        plan(sch, **{name: known[number].knobs[name] for name in ("rules", "recomputed", "every")})

    def to_the_end(sch: schedule.Schedule, watch: Watch, number: int) -> Any:
        unhurried = Watch(None, lambda so_far: False, watch.original)
        return cost(sch, unhurried, known[number].knobs["micro_batch"])

    space = {"number": sorted(known)}
    tuning = schedule.tune(model, apply, space, batch, trials=1_000, cost=to_the_end, storage=storage, name="again")
    times = {trial.knobs["number"]: trial.time for trial in tuning.trials}
    return [replace(point, time=times.get(point.number, point.time)) for point in points]


def at_random(seed: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of random search."""
    return optuna.samplers.RandomSampler(seed=seed)


def tpe(seed: int) -> optuna.samplers.BaseSampler:
    """Return Optuna's TPE sampler."""
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=5, group=True)


SEARCHES = {"schedule.tune": None, "optuna's TPE": tpe, "random search": at_random}


class Replayed:
    """Searches over measured points.

    Args:
        points: all points of the space.
    """

    def __init__(self, points: Sequence[Trial]) -> None:
        self.points = {_key(point.knobs): point for point in points}
        self.model = nn.Linear(1, 1)

    def at(self, knobs: Knobs) -> Trial:
        """Return the measured point with these knobs."""
        return self.points[_key(knobs)]

    def cost(self, sch: schedule.Schedule, **knobs: Any) -> tuple[float, int]:
        """Return the measured time and memory of a point, or raise if it could not be measured."""
        point = self.at(knobs)
        if point.time is None or point.memory is None:
            raise schedule.NotApplicable(point.reason)
        return point.time, point.memory

    def search(self, bound: int, trials: int, seed: int, sampler: Any) -> list[float]:
        """Return the best time within the bound after each trial, infinite before the first one within it."""
        tuning = schedule.tune(
            self.model,
            lambda sch, **knobs: None,
            SPACE,
            torch.ones(1, 1),
            memory=bound,
            trials=trials,
            cost=self.cost,
            seed=seed,
            sampler=sampler,
            progress=False,
        )
        within = [(trial.time if trial.status == "measured" else None) or math.inf for trial in tuning.trials]
        return list(accumulate(within, min))

    def fits(self, bound: int) -> Tuning:
        """Return all points, with those over the bound marked."""
        trials = [
            replace(point, status="over the bound") if (point.memory or 0) > bound else point
            for point in self.points.values()
        ]
        return Tuning(trials, bound, "GPT-2, 4 layers")


def _key(knobs: Knobs) -> str:
    return json.dumps(knobs, sort_keys=True)


def compared(table: Replayed, bound: int, seeds: int) -> dict[str, Any]:
    """Compare the extremes, the best point and the results of the searches under one bound."""
    fits = table.fits(bound)
    found: dict[str, Any] = {"bound": bound, "points": len(fits.trials), "fit": len(fits.select("measured"))}
    for label, knobs in EXTREMES.items():
        point = table.at(knobs)
        found[label] = {"time": point.time, "memory": point.memory, "fits": (point.memory or 0) <= bound}
    found["best"] = fits.best.to_dict()
    for name, sampler in SEARCHES.items():
        runs = [table.search(bound, TRIALS, seed, sampler) for seed in track(range(seeds), f"{name}, {bound:,} bytes")]
        ordered = [sorted(times) for times in zip(*runs, strict=True)]  # one list per number of trials
        found[name] = {
            what: [_finite(times[round(part * (seeds - 1))]) for times in ordered]
            for what, part in (("low", 0.25), ("median", 0.5), ("high", 0.75))
        }
    return found


def _finite(time: float) -> float | None:
    return None if time == math.inf else time


def shown(results: Sequence[dict[str, Any]], seeds: int) -> Table:
    """Return a table with one line per bound and search."""
    table = Table(title=f"best time within the bound, over the original's step: median of {seeds} seeds")
    for heading in ("bound", "points that fit", "", *(f"{count} trials" for count in SHOWN)):
        table.add_column(heading)
    for found in results:
        table.add_section()
        for row, name in enumerate(SEARCHES):
            head = (f"{found['bound'] / 1e6:.0f} MB", f"{found['fit']} of {found['points']}") if not row else ("", "")
            table.add_row(*head, name, *medians(found, name))
        for name in EXTREMES:
            one = found[name]
            said = f"{one['memory'] / 1e6:.0f} MB" + ("" if one["fits"] else ": does not fit")
            table.add_row("", "", name, f"{one['time']:.2f}", said)
        best = found["best"]
        table.add_row("", "", "best there is", f"{best['time']:.2f}", labeled(best["knobs"]))
    return table


def medians(found: dict[str, Any], name: str) -> list[str]:
    """Return the median results of a search after each number of trials in ``SHOWN``."""
    times = [found[name]["median"][count - 1] for count in SHOWN]
    return ["–" if time is None else f"{time:.3f}" for time in times]


def lines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table in the document."""
    yield f"| bound | search | {SHOWN[0]} trials | {' | '.join(map(str, SHOWN[1:]))} |"
    yield "|---|---|" + "---|" * len(SHOWN)
    for found in results:
        best = found["best"]["time"]
        bound = f"{found['bound'] / 1e6:.0f} MB, which {found['fit']} points fit; the best is {best:.3f}"
        for row, name in enumerate(SEARCHES):
            shown_as = "`schedule.tune`" if name == "schedule.tune" else name
            yield f"|{'' if row else f' {bound}'} | {shown_as} | {' | '.join(medians(found, name))} |"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the best time so far by trial for each bound, as median and middle half of the seeds."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, found in zip(panels, results, strict=True):
        for name, color in zip(SEARCHES, ("#e07b00", "#2a6fbb", "#8a8a8a"), strict=True):
            low, median, high = (
                [math.nan if time is None else time for time in found[name][what]] for what in ("low", "median", "high")
            )
            count = range(1, len(median) + 1)
            axes.step(count, median, where="post", color=color, label=name, linewidth=1.6)
            axes.fill_between(count, low, high, step="post", color=color, alpha=0.12, linewidth=0)
        axes.axhline(found["best"]["time"], color="#333333", linewidth=0.8, linestyle=":", label="best there is")
        axes.set_title(
            f"at most {found['bound'] / 1e6:.0f} MB: {found['fit']} of {found['points']} points", fontsize=10
        )
        axes.set_xlabel("trials")
        axes.set_xlim(1, TRIALS)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("best step within the bound")
    panels[-1].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, search, print the tables, and write JSON and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help="take the points from the last run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--storage", type=Path, default=ROOT / "build" / "tuning.journal")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--curves", type=Path, default=CURVES)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    if options.replay:
        stored = json.loads(options.output.read_text())
        points = [Trial(**point) for point in stored["results"]["points"]]
    else:
        points = again(measured(options.rounds, options.storage), options.rounds, options.storage)
    write_json(options.output, {"points": [point.to_dict() for point in points]})
    table = Replayed(points)
    results = [compared(table, bound, options.seeds) for bound in BOUNDS]
    Console(width=150).print(shown(results, options.seeds))
    print("\n".join(lines(results)))
    write_json(options.output, {"points": [point.to_dict() for point in points], "searches": results})
    table.fits(BOUNDS[-1]).plot(options.picture, EXTREMES)
    draw(results, options.curves)


if __name__ == "__main__":
    main()
