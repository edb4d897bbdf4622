"""Everything that is checked of one architecture; runs in a process of its own."""

from __future__ import annotations

import copy
import json
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
import transformers.masking_utils
import transformers.models.bert.modeling_bert
from torch import nn

import fused
import schedule
from schedule import Schedule
from schedule.batches import Inputs
from schedule.core.adapting import adapter_for
from schedule.report.entries import Entry
from schedule.runtime.scheduled import MAX_ADAPTATIONS, install, state_of
from schedule.util.errors import ScheduleError, TraceError, VerificationError
from schedule.util.generators import seed_all
from schedule.util.named_values import call, named_values
from schedule.verify.equivalence import equivalent
from schedule.verify.equivalence_report import EquivalenceReport
from schedule.verify.preserve import preserved
from tests.sweep import REFUSALS
from tests.sweep.models import Built, NotBuilt, build
from tests.sweep.rounding import is_rounding
from tests.sweep.shapes import OTHER_SHAPES, bound_to, fallbacks, missed, other_inputs

STEPS = 1


@dataclass
class Outcome:
    """What is known of one architecture, whatever is checked; None is "not reached".

    Attributes:
        name: the model type.
        model: its class.
        inputs: shapes of the example.
        kept: categories of sizes that could not be made small.
        built: a tiny model exists and runs.
        equal: what was made of the model computed the same everywhere.
        reasons: kind → what is in the way, in the words of the error.
        seconds: all of it.
    """

    name: str
    model: str = ""
    inputs: dict[str, list[int]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    built: bool = False
    equal: bool | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write what is known so far, whole or not at all."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1))
        part.replace(path)


OutcomeT = TypeVar("OutcomeT", bound=Outcome)


@dataclass
class Result(Outcome):
    """What is known of the rewritten and of the traced model.

    Attributes:
        rules: rule → in how many places it was applied.
        left: places that look like a rule's construct and were not rewritten, by reason.
        untraced: innermost modules that a rule would be about, such as attentions, MLPs and norms, and that were not
            traced, or in one mode only, by reason.
        untraced_around: the same of modules around such, which a rule would be about too.
        shapes: how many shapes that was compared at.
        fallbacks: calls that ran the original forward, of the rewritten modules, at the recorded shape.
        fallbacks_elsewhere: the same at another shape.
        undone: everything undone gives the original, to the bit.
        traced: ``whole``, or ``calls`` if modules with parts of their own stayed calls.
        trace_equal: the traced root computed the same everywhere.
        trace_missed: modes, train or eval, in which its recorded call ran the original forward.
        trace_further: kinds of calls of other shapes that got graphs of their own.
        every_rule: as ``rules``, with ``rules="all"``.
        every_equal: with all rules it computed the same, at two shapes.
    """

    rules: dict[str, int] | None = None
    left: dict[str, int] = field(default_factory=dict)
    untraced: dict[str, int] = field(default_factory=dict)
    untraced_around: dict[str, int] = field(default_factory=dict)
    shapes: int = 0
    fallbacks: int = 0
    fallbacks_elsewhere: int = 0
    undone: bool | None = None
    traced: str | None = None
    trace_equal: bool | None = None
    trace_missed: list[str] = field(default_factory=list)
    trace_further: int = 0
    every_rule: dict[str, int] | None = None
    every_equal: bool | None = None


OUT_OF_MEMORY = "allocate memory"  # of the limit that `run` sets, as torch says it

Check = Callable[[str, Callable[[Outcome], None]], Outcome]
"""Checks an architecture by name, and hands over what it knows as it goes on."""


def run(check: Check, name: str, path: Path, seconds: int, memory: int) -> None:
    """Do ``check`` of ``name`` and keep ``path`` up to date; the entry point of a process.

    Args:
        seconds: of processor time; then the process is stopped.
        memory: bytes that it may map.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))  # a signal that tells, before the one that kills
    with path.with_suffix(".log").open("w") as log:  # what models and torch print would tear the progress bar
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    check(name, lambda outcome: outcome.save(path))


def check(name: str, save: Callable[[Outcome], None] = lambda outcome: None) -> Result:
    """Build, rewrite, compare, undo, trace, compare, rewrite by all rules, compare, as far as that goes."""
    result = Result(name)
    staged(result, (_rewritten, _traced, _rewritten_by_all), save)
    return result


def staged(
    outcome: OutcomeT, stages: Sequence[Callable[[nn.Module, Inputs, OutcomeT], None]], save: Callable[[Outcome], None]
) -> None:
    """Build the tiny model and take it through ``stages``, each noting in ``outcome`` what it found."""
    start = time.monotonic()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    save(outcome)
    with warnings.catch_warnings(), fused.backend("reference"):
        warnings.simplefilter("ignore")
        built = _built(outcome)
        for stage in stages if built is not None else ():
            save(outcome)
            with _reasons(outcome, stage.__name__.strip("_")):
                stage(built.model, built.batch, outcome)
    outcome.seconds = round(time.monotonic() - start, 1)
    save(outcome)


def _built(outcome: Outcome) -> Built | None:
    """The tiny model; None, with the reason noted, if there is none that can be compared."""
    try:
        built = build(outcome.name)
    except NotBuilt as error:
        outcome.reasons[error.kind] = error.why
        return None
    outcome.model, outcome.built, outcome.kept = type(built.model).__name__, True, sorted(built.kept)
    outcome.inputs = {name: list(getattr(value, "shape", ())) for name, value in built.batch.items()}
    try:
        _seen(built.model, built.batch)
    except REFUSALS as error:
        kind = "too large" if _is_of_memory(error) else "original refuses training"
        outcome.reasons[kind] = f"{type(error).__name__}: {_line(error)}"
        return None
    return built


@contextmanager
def _reasons(result: Outcome, stage: str) -> Iterator[None]:
    """What a stage raises becomes a reason; only an error of ours, or of the model, is one."""
    try:
        yield
    except TraceError as error:
        result.reasons["not traced"] = f"{_line(error)} at {error.where.splitlines()[0] if error.where else '?'}"
    except VerificationError as error:
        kinds = {
            OUT_OF_MEMORY: "too large",
            "not finite": "original not finite",
            "repeat itself": "original not repeatable",
        }
        kind = next((kinds[text] for text in kinds if text in error.why), f"WRONG, {stage}")
        if kind.startswith("WRONG"):
            result.equal = False
        result.reasons[kind] = f"{error}"[:800]
    except (ScheduleError, *REFUSALS) as error:
        if _is_of_memory(error):  # an error of the model's, or ours about it
            result.reasons["too large"] = f"{type(error).__name__}: {_line(error)}"
            return
        if isinstance(error, ScheduleError):
            result.reasons[f"refused, {stage}"] = f"{error}"[:500]
            return
        where = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename][-1:]
        place = f" at {where[0].filename.rpartition('/main/')[2]}:{where[0].lineno}" if where else ""
        result.reasons[f"crashed, {stage}"] = f"{type(error).__name__}: {_line(error)}{place}"


def _rewritten(model: nn.Module, batch: Inputs, result: Result) -> None:
    before = _seen(model, batch)
    sch = schedule.create_schedule(model, batch)
    report = schedule.optimize(sch, cost_guard=False)
    result.rules = report.applied
    for entry in report.entries:
        counts = _counts_of(entry, report.entries, result, _is_untraced(sch, entry))
        if counts is not None:
            reason = f"{entry.rule}: {entry.reason.splitlines()[0]}" + (f" ({entry.source})" if entry.source else "")
            counts[reason] = counts.get(reason, 0) + entry.count
    try:
        if sch.history:
            _compared(sch, batch, result)
    finally:  # what follows begins with the original, whatever came of this
        while sch.history:
            sch.undo()
    result.undone = all(state_of(module) is None for module in model.modules()) and _same(before, _seen(model, batch))
    if not result.undone:
        result.reasons["WRONG, undo"] = "the model is not what it was"


def _rewritten_by_all(model: nn.Module, batch: Inputs, result: Result) -> None:
    sch = schedule.create_schedule(model, batch)
    result.every_rule = schedule.optimize(sch, rules="all", cost_guard=False).applied
    if not sch.history:
        return
    result.every_equal = False
    other = other_inputs(model, batch, *OTHER_SHAPES[0])
    batches = (batch, other) if other else (batch,)
    try:
        for each in batches:
            schedule.verify(sch, each, steps=STEPS)
    except VerificationError:
        if not is_rounding(lambda seed: build(result.name, seed).model, batches, STEPS):
            raise
    result.every_equal = True


def _compared(sch: schedule.Schedule, batch: Inputs, result: Result) -> None:
    """The rewritten model beside the original, at this shape and others; what runs the original forward is counted."""
    model = sch.module
    found = [schedule.verify(sch, batch, steps=STEPS).report]
    while len(_shapes(found)) < 3 and len(found) <= len(OTHER_SHAPES):
        other = other_inputs(model, batch, *OTHER_SHAPES[len(found) - 1])
        found.append(schedule.verify(sch, other, steps=STEPS).report if other else EquivalenceReport())
    result.equal, result.shapes = True, len(_shapes(found))
    result.fallbacks = fallbacks(model, batch)
    other = other_inputs(model, batch, *OTHER_SHAPES[0])
    result.fallbacks_elsewhere = fallbacks(model, other) if other else 0


def _is_untraced(sch: schedule.Schedule, entry: Entry) -> bool:
    """Whether ``entry`` says that its module has no graph in some mode, not that a rule cannot rewrite a place."""
    if entry.status != "skipped" or entry.reason.startswith(("in training: ", "in evaluation: ")):
        return entry.status == "skipped"
    try:
        return not (sch[entry.path] if entry.path else sch).specializations
    except ScheduleError:
        return True


def _counts_of(entry: Entry, entries: Sequence[Entry], result: Result, untraced: bool = False) -> dict[str, int] | None:
    """Where a place that was not rewritten counts; None for those that were, and those that would not pay."""
    if not untraced:
        return result.left if entry.status in ("near miss", "skipped") else None
    inside = f"{entry.path}." if entry.path else ""
    around = any(other.path.startswith(inside) and other.path != entry.path for other in entries)
    return result.untraced_around if around else result.untraced


def _traced(model: nn.Module, batch: Inputs, result: Result) -> None:
    with torch.no_grad():
        model(**batch)  # BigBird has other attention modules from its first call with a short batch on
    sch = schedule.create_schedule(model, batch)
    sch.trace(flatten=True)
    calls = [str(node.target) for node in sch.graph.nodes if node.op == "call_module"]
    result.traced = "calls" if any(_has_parts(model.get_submodule(path)) for path in calls) else "whole"
    twin = _twin(model, sch)
    report = equivalent(model, twin, batch, steps=0)
    if report.equal and len(_shapes([report])) < 3:
        other = other_inputs(model, batch, *OTHER_SHAPES[0])
        report = equivalent(model, twin, other, steps=0) if other else report
    result.trace_equal = report.equal
    if not report.equal and not equivalent(model, copy.deepcopy(model), batch, steps=0).equal:
        result.reasons["original not copyable"] = "a copy of the untouched model does not compute the same"
        result.trace_equal = None
    elif not report.equal:
        result.reasons["WRONG, traced"] = str(report.failed)
    result.trace_missed = missed(twin, batch)
    if result.trace_missed:
        kind = {"train": "traced for eval only", "eval": "traced for training only"}.get(" ".join(result.trace_missed))
        result.reasons[kind or "trace never runs"] = "the recorded call ran the original forward"
    bound = bound_to(twin, model, batch, result.trace_missed)
    state = state_of(twin)
    result.trace_further = sum(bool(each.specializations) for each in state.adaptations) if state else 0
    if bound and state and len(state.adaptations) >= MAX_ADAPTATIONS:  # perhaps by the shapes before
        bound = bound_to(_twin(model, sch), model, batch, result.trace_missed) or f"{MAX_ADAPTATIONS} shapes"
    if bound:
        result.reasons[f"traced for {bound}"] = f"the original forward runs: {state and state.last_miss}"


def _twin(model: nn.Module, sch: Schedule) -> nn.Module:
    """A copy of ``model`` that runs the graphs of its schedule, and makes further ones.

    A copy, as transformers leaves the weights of some experts uninitialized: another build has others.
    """
    twin = copy.deepcopy(model)
    install(twin, sch.specializations, adapter=adapter_for(sch, ()))
    return twin


def _has_parts(module: nn.Module) -> bool:
    """Whether a call of ``module`` hides modules of the model; torch's own are leaves."""
    return any(True for _ in module.children()) and not type(module).__module__.startswith("torch.nn.")


def _shapes(reports: list[EquivalenceReport]) -> set[str]:
    return {case.shapes for report in reports for case in report.cases}


def _seen(model: nn.Module, batch: Inputs) -> list[dict[str, Any]]:
    """Outputs and gradients in both modes."""
    seen: list[dict[str, Any]] = []
    for mode in (True, False):
        with preserved(model):
            seed_all(0)
            output = named_values(call(model.train(mode), batch))
            loss = output.get("loss")
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.sum().backward()
            seen += [output, {name: p.grad for name, p in model.named_parameters()}]
    return seen


def _same(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
    return all(
        a.keys() == b.keys() and all(_identical(a[name], b[name]) for name in a) for a, b in zip(one, two, strict=True)
    )


def _identical(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.shape == two.shape and bool(
            torch.equal(torch.nan_to_num(one.detach()), torch.nan_to_num(two.detach()))
        )
    return bool(one == two)


def _is_of_memory(error: BaseException) -> bool:
    return OUT_OF_MEMORY in str(error)


def _line(error: BaseException) -> str:
    text = error.why if isinstance(error, ScheduleError) else str(error)
    return (text.strip().splitlines() or ["no message"])[0][:300]
