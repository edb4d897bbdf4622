"""Commands to run the model: optimize, verify, bench."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table
from torch import nn

from fused.backends.availability import why_unavailable
from fxschedule.cli import options, recipes
from fxschedule.cli.loaded import Loaded
from fxschedule.cli.models import Wanted
from fxschedule.cli.output import Code, command, emit, refuse_unwritable, stage, stderr, stdout
from schedule.api.optimize import optimize as apply_rules
from schedule.api.schedule import Schedule
from schedule.capture.examples.shapes import cut
from schedule.report.comparing import trains
from schedule.report.costs import TimeRatio, measure, step_seconds
from schedule.report.profiling import profile_step
from schedule.report.report import Report
from schedule.util.errors import VerificationError
from schedule.util.files import write
from schedule.util.wording import counted

VERIFIED = (2, 64)
"""Maximum numbers of rows and tokens in a verification, large enough at any model width for compiled ops to run."""
SHORT = 20.0
"""Milliseconds of a step below which its time says little: most of it is Python's part of each operation."""
PROVE = f"Then compare it with the original, on up to {VERIFIED[0]} rows of {VERIFIED[1]} tokens."


@command
def optimize(
    model: options.Name,
    rules: options.Rules = "default",
    recipe: recipes.In = None,
    recipe_out: recipes.Out = None,
    verify: Annotated[bool, typer.Option("--verify", help=PROVE)] = False,
    report: options.ReportFile = None,
    cost_guard: options.CostGuard = None,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    device: options.Device = "cpu",
    batch_size: options.Rows = 4,
    length: options.Length = 128,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Rewrite a model wherever a rule fits, and report the results with reasons.

    Exit codes: 0 done, 1 --verify found a difference, 2 wrong options, 3 no such model here, 4 the model is refused.

    Examples: fxschedule optimize gpt2 --verify --report out.html; fxschedule optimize my_models:make_gpt --rules memory
    """
    rewrite = _rewriter(rules, recipe, options.guarded(cost_guard, tiny), trust_remote_code)
    if report is not None:
        refuse_unwritable(report, "report", (".html", ".json"))
    if recipe_out is not None:
        refuse_unwritable(recipe_out, "recipe", (".json", ".py"))
    asked = options.Asked(Wanted(model, tiny, attention, trust_remote_code), device, batch_size, length)
    loaded, sch, done = _rewritten(asked, rewrite)
    if recipe_out is not None:
        recipes.save(sch, recipe_out)
    done.measure_if_possible()
    verified = _verified(done, cut(sch.tree.graphs.example_inputs, *VERIFIED)) if verify else None
    if report is not None:
        write(report, done.to_html() if report.suffix == ".html" else done.to_json() + "\n")
    if as_json:
        emit({"model": model, "origin": loaded.origin, **done.to_dict(), "verified": verified, "report": report})
    else:
        _print_report(done, loaded.origin, verified, report)
    return Code.NO if verified is not None and not verified["equal"] else Code.DONE


def _rewriter(rules: str, recipe: Path | None, cost_guard: bool, trusted: bool) -> Callable[[Schedule], Report]:
    """Return a function to rewrite a schedule by the recipe if given, else by the rules.

    The recipe or the rules are read and checked now.
    """
    if recipe is not None:
        return partial(recipes.replayed, recipe=recipes.read(recipe, trusted))
    return partial(apply_rules, rules=options.rules_of(rules), cost_guard=cost_guard)


def _rewritten(asked: options.Asked, rewrite: Callable[[Schedule], Report]) -> tuple[Loaded, Schedule, Report]:
    """Load the model and rewrite it."""
    loaded, sch = asked.load()
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


@command
def verify(
    model: options.Name,
    rules: options.Rules = "default",
    recipe: recipes.In = None,
    cost_guard: options.CostGuard = None,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    device: options.Device = "cpu",
    batch_size: options.Rows = 2,
    length: options.Length = 32,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Rewrite a model, and prove its results unchanged.

    Outputs, gradients, random numbers and five AdamW steps are compared with the original model, in training and in
    evaluation mode, with original and with perturbed weights, at the given sizes and at others.

    Exit codes: 0 equal, 1 different, 2 wrong options, 3 no such model here, 4 the model is refused.

    Example: fxschedule verify bert --tiny --rules all
    """
    rewrite = _rewriter(rules, recipe, options.guarded(cost_guard, tiny), trust_remote_code)
    asked = options.Asked(Wanted(model, tiny, attention, trust_remote_code), device, batch_size, length)
    loaded, _, done = _rewritten(asked, rewrite)
    found = _verified(done)
    if as_json:
        emit({"model": model, "origin": loaded.origin, "applied": done.applied, **found})
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


@command
def bench(
    model: options.Name,
    rules: options.Rules = "default",
    cost_guard: options.CostGuard = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile beside it.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Training steps of each, in turns.")] = 7,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    device: options.Device = "cpu",
    batch_size: options.Rows = 4,
    length: options.Length = 128,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Time a training step of the original model, under torch.compile, and rewritten by fxschedule.

    Steps are timed in turns, and each time is divided by the time of the original in the same round, so that a busy
    machine slows all of them alike. The results are medians of these ratios with quartiles; below 1 is faster.

    Exit codes: 0 done, 2 wrong options, 3 no such model here, 4 the model is refused.

    Example: fxschedule bench gpt2 --batch-size 4 --length 256
    """
    chosen = options.rules_of(rules)
    asked = options.Asked(Wanted(model, tiny, attention, trust_remote_code), device, batch_size, length)
    loaded, sch = asked.load()
    batch = sch.tree.graphs.example_inputs
    candidates: dict[str, nn.Module] = {"eager": copy.deepcopy(sch.module)}
    why_not = why_unavailable("inductor", torch.device(device).type) if compiled else "not asked for"
    if why_not is None:
        candidates["compile"] = torch.compile(copy.deepcopy(sch.module))  # type: ignore[assignment]
    with stage("rewriting"):
        done = apply_rules(sch, rules=chosen, cost_guard=options.guarded(cost_guard, tiny))
    candidates["ours"] = sch.module
    with trains():
        with stage("counting what is saved for backward"):
            saved = {name: measure(candidates[name], batch).saved_bytes for name in ("eager", "ours")}
        seconds = _seconds(candidates, batch, rounds)
    ratios = {name: TimeRatio.of(each, seconds["eager"]) for name, each in seconds.items()}
    milliseconds = {name: 1000 * statistics.median(each) for name, each in seconds.items()}
    if as_json:
        times = {name: asdict(ratio) for name, ratio in ratios.items()}
        emit(
            {"model": model, "origin": loaded.origin, "applied": done.applied, "time": times, "saved_bytes": saved}
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


@command
def profile(
    model: options.Name,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the profile there, as JSON.")],
    rules: options.Rules = "default",
    recipe: recipes.In = None,
    cost_guard: options.CostGuard = None,
    tiny: options.Tiny = False,
    attention: options.Attention = "",
    device: options.Device = "cpu",
    batch_size: options.Rows = 4,
    length: options.Length = 128,
    trust_remote_code: options.Remote = False,
    as_json: options.Json = False,
) -> Code:
    """Profile a training step of the rewritten model, with each rewrite named by its rule and module.

    The file opens in https://ui.perfetto.dev and in chrome://tracing.

    Exit codes: 0 done, 2 wrong options, 3 no such model here, 4 the model is refused.

    Example: fxschedule profile gpt2 --tiny --out step.json
    """
    rewrite = _rewriter(rules, recipe, options.guarded(cost_guard, tiny), trust_remote_code)
    refuse_unwritable(out, "profile", (".json",))
    asked = options.Asked(Wanted(model, tiny, attention, trust_remote_code), device, batch_size, length)
    loaded, sch, done = _rewritten(asked, rewrite)
    with stage("profiling a training step"):
        profile_step(sch, out)
    if as_json:
        emit({"model": model, "origin": loaded.origin, "applied": done.applied, "profile": str(out)})
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
    for name in ("", "median", "time", "quartiles", "saved for backward", ""):
        table.add_column(name, justify="right" if name else "left")
    longest = max(ratio.median for ratio in ratios.values())
    for name, ratio in ratios.items():
        bar = "█" * max(1, round(30 * ratio.median / longest))
        share = f"{saved[name] / max(saved['eager'], 1):.2f} ×" if name in saved else "–"
        took = f"{milliseconds[name]:.1f} ms"
        table.add_row(name, took, f"{ratio.median:.2f} ×", f"{ratio.low:.2f} to {ratio.high:.2f}", share, bar)
    return table
