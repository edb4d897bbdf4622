"""What the commands do that run the model: optimize, verify, bench, profile."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.bar import Bar
from rich.progress import track
from rich.table import Table
from torch import nn

from fused.backends.availability import why_unavailable
from fxschedule.cli import options, recipes
from fxschedule.cli.batches import load
from fxschedule.cli.loaded import Loaded
from fxschedule.cli.options import Asked
from fxschedule.cli.output import Code, emit, stage, stderr, stdout
from schedule.api.optimize import optimize as apply_rules
from schedule.api.schedule import Schedule
from schedule.batches import cut
from schedule.report.comparing import trains
from schedule.report.costs import TimeRatio, measure, step_seconds
from schedule.report.profiling import profile_step
from schedule.report.report import Report
from schedule.util.errors import VerificationError
from schedule.util.files import write
from schedule.util.wording import counted

HINTS = {
    "kept for backward": "the model does not train here",
    "training step": "fxschedule bench times steps of both models",
    "same results": "--verify compares it with the original",
}
"""Name of a figure of the report → the option or command that gets it."""

SHORT = 20.0
"""Milliseconds of a step below which its time says little: most of it is Python's part of each operation."""


@dataclass(frozen=True)
class Rewriting:
    """How a command rewrites: by rules, or by a recipe in their place.

    Attributes:
        rules: their names.
        recipe: a file.
        cost_guard: whether what does not pay is left alone.
    """

    rules: list[str]
    recipe: Path | None
    cost_guard: bool

    def rewriter(self, asked: Asked) -> Callable[[Schedule], Report]:
        """Return a function to rewrite a schedule. The recipe or the rules are read and checked now."""
        if self.recipe is not None:
            return partial(recipes.replayed, recipe=recipes.read(self.recipe, asked.trust_remote_code))
        return partial(apply_rules, rules=self.rules, cost_guard=self.cost_guard)


def optimize(
    asked: Asked, how: Rewriting, recipe_out: Path | None, verified_too: bool, report: Path | None, as_json: bool
) -> Code:
    """Rewrite the model, and report the results."""
    rewrite = how.rewriter(asked)
    loaded, sch, done = _rewritten(asked, rewrite)
    done.hints = HINTS
    if recipe_out is not None:
        recipes.save(sch, recipe_out)
    done.measure_if_possible()
    verified = _verified(done, cut(sch.tree.graphs.batch, *options.VERIFIED)) if verified_too else None
    if report is not None:
        write(report, done.to_html() if report.suffix == ".html" else done.to_json() + "\n")
    if as_json:
        emit({"model": asked.name, "origin": loaded.origin, **done.to_dict(), "verified": verified, "report": report})
    else:
        _print_report(done, loaded.origin, verified, report)
    return Code.NO if verified is not None and not verified["equal"] else Code.DONE


def _rewritten(asked: Asked, rewrite: Callable[[Schedule], Report]) -> tuple[Loaded, Schedule, Report]:
    """Load the model and rewrite it."""
    loaded, sch = load(asked)
    with stage("rewriting"):
        return loaded, sch, rewrite(sch)


def _print_report(done: Report, origin: str, verified: dict[str, Any] | None, report: Any) -> None:
    console = stdout()
    console.print(done)
    console.print(f"model: {origin}")
    if verified is not None:
        console.print(_verdict(verified))
    if report is not None:
        console.print(f"report: {report}", soft_wrap=True)


def verify(asked: Asked, how: Rewriting, as_json: bool) -> Code:
    """Rewrite the model, and compare it with the original."""
    rewrite = how.rewriter(asked)
    loaded, _, done = _rewritten(asked, rewrite)
    found = _verified(done)
    if as_json:
        emit({"model": asked.name, "origin": loaded.origin, "applied": done.applied, **found})
    else:
        rewrites = ", ".join(f"{rule} ×{count}" for rule, count in done.applied.items())
        stdout().print(f"rewritten: {rewrites or 'nothing'}")
        for case in found["cases"]:
            stdout().print(case)
        stdout().print(_verdict(found))
    return Code.DONE if found["equal"] else Code.NO


def _verified(done: Report, batch: Any = None) -> dict[str, Any]:
    """Verify the schedule of a report, and return the result as plain data."""
    try:
        with stage("verifying outputs, gradients and training steps"):
            found = done.verify(batch)
    except VerificationError as error:
        stderr().print(error, soft_wrap=True)
        return {"equal": False, "cases": [], "max_deviation": None, "why": error.to_dict()}
    return {"equal": True, "cases": [str(case) for case in found.cases], "max_deviation": found.max_deviation}


def _verdict(verified: dict[str, Any]) -> str:
    if not verified["equal"]:
        return "verified: DIFFERENT from the original model"
    count = len(verified["cases"])
    if not count:
        return "verified: nothing was rewritten, so there is nothing to compare"
    return f"verified: equal in all {count} cases, largest relative deviation {verified['max_deviation']:.2g}"


def bench(asked: Asked, rules: list[str], cost_guard: bool, compiled: bool, rounds: int, as_json: bool) -> Code:
    """Time steps of the original model, under torch.compile, and rewritten."""
    loaded, sch = load(asked)
    batch = sch.tree.graphs.batch
    candidates: dict[str, nn.Module] = {"eager": copy.deepcopy(sch.module)}
    why_not = why_unavailable("inductor", torch.device(asked.device).type) if compiled else "not asked for"
    if why_not is None:
        candidates["compile"] = torch.compile(copy.deepcopy(sch.module))  # type: ignore[assignment]
    with stage("rewriting"):
        done = apply_rules(sch, rules=rules, cost_guard=cost_guard)
    candidates["ours"] = sch.module
    with trains():
        with stage("counting what is kept for backward"):
            saved = {name: measure(candidates[name], batch).saved_bytes for name in ("eager", "ours")}
        seconds = _seconds(candidates, batch, rounds)
    ratios = {name: TimeRatio.of(each, seconds["eager"]) for name, each in seconds.items()}
    milliseconds = {name: 1000 * statistics.median(each) for name, each in seconds.items()}
    if as_json:
        times = {name: asdict(ratio) for name, ratio in ratios.items()}
        emit(
            {"model": asked.name, "origin": loaded.origin, "applied": done.applied, "time": times, "saved_bytes": saved}
            | {"milliseconds": milliseconds, "not_compiled": why_not}
        )
    else:
        stdout().print(_chart(ratios, milliseconds, saved))
        if milliseconds["eager"] < SHORT:
            stdout().print(
                f"A step takes {milliseconds['eager']:.1f} ms: most of it is Python, so this says little about a real "
                "size. Raise --batch-size and --length, or leave out --tiny."
            )
        notes = [f"model: {loaded.origin}", f"rewritten: {counted(sum(done.applied.values()), 'match', 'matches')}"]
        stdout().print("; ".join(notes + ([f"torch.compile: {why_not}"] if why_not else [])))
    return Code.DONE


def profile(asked: Asked, how: Rewriting, out: Path, as_json: bool) -> Code:
    """Profile a step of the rewritten model."""
    rewrite = how.rewriter(asked)
    loaded, sch, done = _rewritten(asked, rewrite)
    with stage("profiling a training step"):
        profile_step(sch, out)
    if as_json:
        emit({"model": asked.name, "origin": loaded.origin, "applied": done.applied, "profile": str(out)})
    else:
        rewritten = counted(sum(done.applied.values()), "match", "matches")
        stdout().print(f"profile: {out}; rewritten: {rewritten}. Open it in https://ui.perfetto.dev", soft_wrap=True)
    return Code.DONE


def _seconds(candidates: dict[str, nn.Module], batch: Any, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each candidate, one for each round."""
    with stage("warming up"):
        for each in candidates.values():
            step_seconds(each, batch)
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in track(range(rounds), "timing", console=stderr(), transient=True):
        for name, each in candidates.items():
            found[name].append(step_seconds(each, batch))
    return found


def _chart(ratios: dict[str, TimeRatio], milliseconds: dict[str, float], saved: dict[str, int]) -> Table:
    table = Table(title="time of a training step, original = 1", title_justify="left")
    for name in ("", "median", "time", "quartiles", "kept for backward"):
        table.add_column(name, justify="right" if name else "left")
    table.add_column(max_width=30)
    longest = max(ratio.median for ratio in ratios.values())
    for name, ratio in ratios.items():
        share = f"{saved[name] / max(saved['eager'], 1):.2f} ×" if name in saved else "–"
        took = f"{milliseconds[name]:.1f} ms"
        quartiles, bar = f"{ratio.low:.2f} to {ratio.high:.2f}", Bar(longest, 0, ratio.median)
        table.add_row(name, took, f"{ratio.median:.2f} ×", quartiles, share, bar)
    return table
