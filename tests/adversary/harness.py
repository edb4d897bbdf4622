"""Cases of (model, schedule, disturbance, call), each run on a scheduled model and on an untouched twin.

Both live in worlds of their own: the Python file that defines the model is loaded twice, so that global variables,
class attributes and closures of one are not those of the other. What is shared (torch's modes, the environment) is
disturbed in one run after the other, and put back in between.
"""

from __future__ import annotations

import io
import logging
import random
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch._dynamo  # it wraps functions of torch when it is first imported, which is no leftover of ours
from torch import nn

import schedule
from fused.checks import MismatchError
from schedule.capture import is_hooked
from schedule.rules import select_rules
from schedule.runtime.call_kinds import is_only_traced
from schedule.runtime.scheduled import ScheduledState, state_of
from schedule.util.errors import ScheduleError
from tests.adversary.calls import STEP, TRAINED, USUAL
from tests.adversary.cases import (
    EQUAL,
    FALLBACK,
    REFUSED,
    VACUOUS,
    WRONG,
    Batch,
    Call,
    Case,
    Disturbance,
    Model,
    Verdict,
    World,
)
from tests.adversary.models import FIRST_CALL
from tests.adversary.snapshot import (
    Snapshot,
    differences,
    process_state,
    random_states,
    snapshot,
    world_state,
)

SEED = 20

# -- one run --------------------------------------------------------------------------------------------------------


@dataclass
class _Observed:
    """What was seen in one run, stage by stage."""

    stages: dict[str, Snapshot] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)
    vacuous: str = ""
    fallbacks: int = 0
    tolerances: dict[str, float] = field(default_factory=dict)


def seed() -> None:
    """Seed every generator."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def schedule_model(model: nn.Module, batch: Batch, rules: str) -> list[str]:
    """Schedule ``model`` by a set of rules, or by hand where ``rules`` is ``"fuse"``; what was refused."""
    if rules == "fuse":
        return _by_hand(model, batch)
    report = schedule.optimize(model, batch, rules=rules, cost_guard=False)
    return [f"{each.path}: {each.rule}: {each.reason}" for each in report.select(status="skipped")]


def _by_hand(model: nn.Module, batch: Batch) -> list[str]:
    sch, refused = schedule.create_schedule(model, batch), []
    for path in [path for path, module in model.named_modules() if next(module.children(), None) is not None]:
        for rule in select_rules("default"):
            try:
                node = sch[path] if path else sch
                node.fuse(node.find(rule.name))
            except ScheduleError as error:
                refused.append(str(error))
    return refused


def run(case: Case, scheduled: bool) -> _Observed:
    """One side of ``case``: build, schedule, disturb, call."""
    seen, world = _Observed(), World()
    with world.undo, state_put_back():
        seed()
        model = case.model.build(world)
        if case.when == "before":
            model = _disturbed(case, model, world, seen)
        if scheduled:
            _scheduled(case, model, world, seen)
        with _watching(seen, model, "baseline" if scheduled else ""):
            for _ in range(2 if FIRST_CALL in case.model.tags else 1):
                seen.stages["before the disturbance"] = observe(model, STEP, case.model.batch(*case.sizes), world)
        if case.when == "after":
            model = _disturbed(case, model, world, seen)
        before = _fallbacks(model) if case.when == "after" else 0
        with _watching(seen, model, "after" if scheduled else ""):
            for number, call in enumerate(case.calls):
                seen.tolerances[f"call {number}, {call.name}"] = call.tolerance
                seen.stages[f"call {number}, {call.name}"] = observe(model, call, case.model.batch(*call.sizes), world)
        seen.fallbacks = _fallbacks(model) - before
    return seen


def _disturbed(case: Case, model: nn.Module, world: World, seen: _Observed) -> nn.Module:
    raised = None
    try:
        model = case.disturbance.apply(model, world) or model
    except Exception as error:  # the twin must raise the same
        raised = f"{type(error).__name__}: {error}"
    seen.stages["disturbance"] = {"raised": ("str", raised)}
    return model


@contextmanager
def state_put_back() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])


def _scheduled(case: Case, model: nn.Module, world: World, seen: _Observed) -> None:
    def state() -> Snapshot:
        return snapshot(model=model, world=world_state(world.modules), batch=batch)

    batch = case.model.batch(*case.sizes)
    before, randoms, process = state(), random_states(), process_state()
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            seen.refused += schedule_model(model, batch, case.rules)
    except ScheduleError as error:
        seen.refused.append(f"{type(error).__name__}: {error}")
    found = list(differences(state(), before, exact=True))
    found += [] if random_states() == randoms else ["a random state was moved"]
    now = process_state()
    found += [f"{name} was replaced" for name, value in process.items() if now.get(name) != value]
    if found:
        seen.wrong["right after scheduling"] = found
    if not any(state_of(module) is not None for module in model.modules()) and not seen.refused:
        seen.vacuous = "nothing was rewritten, and nothing says why not"


def _fallbacks(model: nn.Module) -> int:
    states = (state_of(module) for module in model.modules())
    return sum(state.fallbacks for state in states if state is not None)


@contextmanager
def _watching(seen: _Observed, model: nn.Module, stage: str) -> Iterator[None]:
    """Within, note which scheduled modules ran graphs; an original forward that is not counted is wrong."""
    if not stage:
        yield
        return
    dispatch, graph = ScheduledState.run.__code__, "<schedule graph "
    stack: list[tuple[Any, Any, int, list[bool]]] = []

    def profile(frame: types.FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "call" and code is dispatch:
            module = frame.f_locals["module"]
            first = not frame.f_locals["self"].ran  # what the first call sets up is no difference
            stack.append((frame, module, _count(module), [first]))
        elif event == "call" and code.co_filename.startswith(graph) and stack:
            owner = next(iter(frame.f_locals.values()), None)
            for _, module, _, ran in stack:
                if owner is module:
                    ran[0] = True
                    seen.ran.add(stage)
        elif event == "return" and stack and stack[-1][0] is frame:
            _, module, before, (ran,) = stack.pop()
            traced = is_only_traced((frame.f_locals.get("args"), frame.f_locals.get("kwargs")), {})
            raised = result is None
            if not (raised or ran or traced) and _count(module) == before and not _is_settled(module):
                seen.wrong.setdefault(stage, []).append(f"{type(module).__name__} fell back and did not count it")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _count(module: nn.Module) -> int:
    """The calls that ran the original forward: those counted, and those watched to make a graph past hooks on parts."""
    state = state_of(module)
    if state is None:
        return 0
    is_hooked_inside = any(is_hooked(part) for part in module.modules() if part is not module)
    return state.fallbacks + sum(bool(each.specializations) for each in state.adaptations) * is_hooked_inside


def _is_settled(module: nn.Module) -> bool:
    """Whether calls run the original forward by design: nothing that was rewritten is in them."""
    state = state_of(module)
    return (
        state is None
        or not state.specializations
        or any(not each.specializations and not each.declined.why for each in state.adaptations)
    )


def observe(model: nn.Module, call: Call, batch: Batch, world: World) -> Snapshot:
    """Make ``call`` and note all that comes of it."""
    seed()
    log, printed = _Log(), io.StringIO()
    logging.getLogger().addHandler(log)
    result: Any = None
    try:
        with redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                result = call.run(model, batch, world)
                raised: Any = None
            except ScheduleError as error:
                raised = f"ScheduleError: {error}"
            except MismatchError:
                raised = RuntimeError.__name__  # which it is too
            except Exception as error:  # whatever it is, the twin must raise the same
                raised = type(error).__name__
    finally:
        logging.getLogger().removeHandler(log)
    files = {module.__file__ for module in world.modules.values()}
    told = [str(each.message) for each in warned if each.filename in files]
    found = snapshot(raised=raised, result=result, model=model, batch=batch, world=world_state(world.modules))
    return {
        **found,
        "printed": printed.getvalue(),
        "logged": tuple(log.lines),
        "warned": tuple(told),
        "random": random_states(),
    }


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("adversary"):
            self.lines.append(record.getMessage())


# -- the verdict ----------------------------------------------------------------------------------------------------


def judge(case: Case) -> Verdict:
    """Run ``case`` both ways and compare.

    What sums up to almost nothing keeps the rounding of its terms. Where numbers alone are apart, and by little,
    float64 tells whether they are.
    """
    ours, theirs = run(case, scheduled=True), run(case, scheduled=False)
    verdict = compare(case, ours, theirs)
    if verdict.kind != WRONG or compare(case, ours, theirs, slack=_SLACK).kind != EQUAL:
        return verdict
    with _computing_in(torch.float64):
        precise = compare(case, run(case, scheduled=True), run(case, scheduled=False))
    return precise if precise.kind == EQUAL else verdict


_SLACK = 50.0
"""How many times the tolerance of float32 the rounding of almost nothing may be."""


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare(case: Case, ours: _Observed, theirs: _Observed, slack: float = 1.0) -> Verdict:
    """The verdict on what was seen of the scheduled model and of its twin; ``slack`` times the tolerances."""
    wrong, late = dict(ours.wrong), []
    for stage, expected in theirs.stages.items():
        seen = ours.stages[stage]
        raised = seen.get("raised", ("", None))[1]
        if isinstance(raised, str) and raised.startswith("ScheduleError"):
            late.append(raised)
            break
        found = list(differences(seen, expected, tolerance=theirs.tolerances.get(stage, 0.0), slack=slack))
        if found:
            wrong[stage] = found + wrong.get(stage, [])
            break
    if wrong:
        order = ["right after scheduling", *theirs.stages, "baseline", "after"]
        stage = min(wrong, key=order.index)
        return Verdict(
            WRONG, [line for at in sorted(wrong, key=order.index) for line in wrong[at]], stage, ours.fallbacks
        )
    if late or (ours.refused and "baseline" not in ours.ran):
        return Verdict(REFUSED, late or ours.refused, "a call" if late else "scheduling", ours.fallbacks)
    if ours.vacuous or ("baseline" not in ours.ran and not (case.when == "before" and ours.fallbacks)):
        why = ours.vacuous or "no graph ran before the disturbance"
        return Verdict(VACUOUS, [why], "before the disturbance", ours.fallbacks)
    return Verdict(FALLBACK if ours.fallbacks else EQUAL, [], "", ours.fallbacks)


__all__ = [
    "EQUAL",
    "FALLBACK",
    "REFUSED",
    "STEP",
    "TRAINED",
    "USUAL",
    "VACUOUS",
    "WRONG",
    "Batch",
    "Call",
    "Case",
    "Disturbance",
    "Model",
    "Verdict",
    "World",
    "compare",
    "judge",
    "observe",
    "run",
    "seed",
]
