"""Cases of (model, schedule, disturbance, call), each run on a scheduled model and on an untouched twin.

Both live in worlds of their own: the Python file that defines the model is loaded twice, so that global variables,
class attributes and closures of one are not those of the other. What is shared (torch's modes, the environment) is
disturbed in one run after the other, and put back in between.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import itertools
import logging
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import schedule
from schedule.errors import ScheduleError
from schedule.report import Report
from schedule.runtime import ScheduledModule, is_only_traced, state_of
from tests.adversary.snapshot import (
    Snapshot,
    differences,
    process_state,
    random_states,
    snapshot,
    world_state,
)

EQUAL, FALLBACK, REFUSED, WRONG = "equal", "fallback", "refused", "WRONG"
SEED = 20
_numbers = itertools.count()


@dataclass
class World:
    """Python modules of our own, loaded for one run.

    Attributes:
        modules: the file's stem → the module.
        undo: what puts shared state back at the end of the run.
    """

    modules: dict[str, types.ModuleType] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)

    def load(self, file: str | Path) -> types.ModuleType:
        """Import ``file`` under a new name."""
        path = Path(file)
        if path.stem not in self.modules:
            name = f"adversary_{next(_numbers)}_{path.stem}"
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise ImportError(f"{path} cannot be imported")
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            self.undo.callback(sys.modules.pop, name, None)
            spec.loader.exec_module(module)
            self.modules[path.stem] = module
        return self.modules[path.stem]

    def __getattr__(self, name: str) -> Any:
        """A global variable of whichever module has it."""
        for module in self.__dict__.get("modules", {}).values():
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of something that both worlds share; it is put back."""
        before = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)
        setattr(owner, name, value)
        self.undo.callback(delattr if before is _ABSENT else setattr, owner, name, *(() if before is _ABSENT else (before,)))


_ABSENT = object()

Batch = dict[str, Any]
Apply = Callable[[nn.Module, World], nn.Module | None]
"""Changes a model or its world; returns another model where the run goes on with that."""
Run = Callable[[nn.Module, Batch, World], Any]
"""Calls a model; returns what is to be compared, as any structure."""


@dataclass(frozen=True)
class Model:
    """How a model is built, and what it is called with.

    Attributes:
        name: of the model.
        build: makes it from its world, after the seeds were set.
        batch: makes a batch.
        tags: what it has, for the choice of disturbances.
    """

    name: str
    build: Callable[[World], nn.Module]
    batch: Callable[[], Batch]
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Call:
    """A way to call a model; ``run`` gets a fresh copy of the batch."""

    name: str
    run: Run
    baseline: bool = True


@dataclass(frozen=True)
class Disturbance:
    """Something that is done to a model.

    Attributes:
        name: says what is done.
        apply: does it.
        models: names or tags of the models it is for.
        whens: ``before`` and ``after`` the model is scheduled.
        call: how the model is called, if not as usual.
    """

    name: str
    apply: Apply
    models: tuple[str, ...]
    whens: tuple[str, ...] = ("after",)
    call: Call | None = None


@dataclass(frozen=True)
class Case:
    """One experiment."""

    model: Model
    rules: str
    disturbance: Disturbance
    when: str
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        called = "+".join(call.name for call in self.calls)
        return f"{self.model.name}-{self.rules}-{self.disturbance.name} {self.when}-{called}".replace(" ", "_")


@dataclass
class Verdict:
    """How a case went.

    Attributes:
        kind: :data:`EQUAL`, :data:`FALLBACK`, :data:`REFUSED` or :data:`WRONG`.
        found: what differs, or why it was refused.
        stage: where the first difference was.
        fallbacks: how many calls of modules ran the original forward after the disturbance.
    """

    kind: str
    found: list[str] = field(default_factory=list)
    stage: str = ""
    fallbacks: int = 0

    def __str__(self) -> str:
        return "\n".join([f"{self.kind} at {self.stage or 'no stage'}", *(f"  {line}" for line in self.found[:12])])


# -- one run --------------------------------------------------------------------------------------------------------


@dataclass
class _Observed:
    """What was seen in one run, stage by stage."""

    stages: dict[str, Snapshot] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)
    fallbacks: int = 0


def seed() -> None:
    """Seed every generator."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def schedule_model(model: nn.Module, batch: Batch, rules: str) -> Report | None:
    """Schedule ``model`` by a set of rules, or by hand where ``rules`` is ``"fuse"``."""
    if rules == "fuse":
        return _by_hand(model, batch)
    return schedule.optimize(model, batch, rules=rules, cost_guard=False)


def _by_hand(model: nn.Module, batch: Batch) -> None:
    from schedule.rules import select_rules

    sch = schedule.create_schedule(model, batch)
    for rule in select_rules("default"):
        for path in [path for path, module in model.named_modules() if next(module.children(), None) is not None]:
            with contextlib.suppress(ScheduleError):
                node = sch[path] if path else sch
                node.fuse(node.find(rule.name, expect=None))


def run(case: Case, scheduled: bool) -> _Observed:
    """One side of ``case``: build, schedule, disturb, call."""
    seen, world = _Observed(), World()
    with world.undo, _state_put_back():
        seed()
        model = case.model.build(world)
        if case.when == "before":
            model = case.disturbance.apply(model, world) or model
        if scheduled:
            _scheduled(case, model, world, seen)
        baselines = [call for call in case.calls if call.baseline]
        with _watching(seen, model, "baseline" if scheduled else ""):
            for call in baselines[:1]:
                seen.stages["before the disturbance"] = observe(model, call, case.model.batch(), world)
        if case.when == "after":
            model = case.disturbance.apply(model, world) or model
        before = _fallbacks(model)
        with _watching(seen, model, "after" if scheduled else ""):
            for number, call in enumerate(case.calls):
                seen.stages[f"call {number}, {call.name}"] = observe(model, call, case.model.batch(), world)
        seen.fallbacks = _fallbacks(model) - before
    return seen


@contextmanager
def _state_put_back() -> Iterator[None]:
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

    batch = case.model.batch()
    before, randoms, process = state(), random_states(), process_state()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            report = schedule_model(model, batch, case.rules)
    except ScheduleError as error:
        seen.refused.append(f"{type(error).__name__}: {error}")
        report = None
    found = list(differences(state(), before, exact=True))
    found += [] if random_states() == randoms else ["a random state was moved"]
    now = process_state()
    found += [f"{name} was replaced" for name, value in process.items() if now.get(name) != value]
    if found:
        seen.wrong["right after scheduling"] = found
    if report is not None:
        seen.refused += [f"{e.path}: {e.rule}: {e.reason}" for e in report.select(status="skipped")]
    if not any(state_of(module) is not None for module in model.modules()) and not seen.refused:
        seen.wrong["scheduling"] = ["nothing was rewritten, and nothing says why not"]


def _fallbacks(model: nn.Module) -> int:
    states = (state_of(module) for module in model.modules())
    return sum(state.fallbacks for state in states if state is not None)


@contextmanager
def _watching(seen: _Observed, model: nn.Module, stage: str) -> Iterator[None]:
    """Within, note which scheduled modules ran graphs; an original forward that is not counted is wrong."""
    if not stage:
        yield
        return
    dispatch, graph = ScheduledModule.forward.__code__, "<schedule graph "
    stack: list[tuple[Any, Any, int, list[bool]]] = []

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code is dispatch:
            module = frame.f_locals["self"]
            stack.append((frame, module, _count(module), [False]))
        elif event == "call" and code.co_filename.startswith(graph) and stack:
            owner = next(iter(frame.f_locals.values()), None)
            for _, module, _, ran in stack:
                if owner is module:
                    ran[0] = True
                    seen.ran.add(stage)
        elif event == "return" and stack and stack[-1][0] is frame:
            _, module, before, (ran,) = stack.pop()
            traced = is_only_traced((frame.f_locals.get("args"), frame.f_locals.get("kwargs")), {})
            if not ran and _count(module) == before and not traced and not _is_settled(module) and sys.exc_info()[0] is None:
                seen.wrong.setdefault(stage, []).append(f"{type(module).__name__} fell back and did not count it")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _count(module: nn.Module) -> int:
    state = state_of(module)
    return 0 if state is None else state.fallbacks


def _is_settled(module: nn.Module) -> bool:
    """Whether calls run the original forward by design: nothing that was rewritten is in them."""
    state = state_of(module)
    return state is None or not state.specialisations or any(
        not each.specialisations and not each.declined.why for each in state.adaptations
    )


def observe(model: nn.Module, call: Call, batch: Batch, world: World) -> Snapshot:
    """Make ``call`` and note all that comes of it."""
    seed()
    log, printed = _Log(), io.StringIO()
    logging.getLogger().addHandler(log)
    result: Any = None
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                result = call.run(model, batch, world)
                raised: Any = None
            except ScheduleError as error:
                raised = f"ScheduleError: {error}"
            except Exception as error:  # whatever it is, the twin must raise the same
                raised = type(error).__name__
    finally:
        logging.getLogger().removeHandler(log)
    files = {module.__file__ for module in world.modules.values()}
    told = [str(each.message) for each in warned if each.filename in files]
    found = snapshot(raised=raised, result=result, model=model, batch=batch, world=world_state(world.modules))
    return {**found, "printed": printed.getvalue(), "logged": tuple(log.lines), "warned": tuple(told), "random": random_states()}


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("adversary"):
            self.lines.append(record.getMessage())


# -- the verdict ----------------------------------------------------------------------------------------------------


def judge(case: Case) -> Verdict:
    """Run ``case`` both ways and compare."""
    ours = run(case, scheduled=True)
    theirs = run(case, scheduled=False)
    return compare(ours, theirs)


def compare(ours: _Observed, theirs: _Observed) -> Verdict:
    """The verdict on what was seen of the scheduled model and of its twin."""
    wrong, late = dict(ours.wrong), []
    for stage, expected in theirs.stages.items():
        seen = ours.stages[stage]
        raised = seen["raised"][1]
        if isinstance(raised, str) and raised.startswith("ScheduleError"):
            late.append(raised)
            break
        found = list(differences(seen, expected))
        if found:
            wrong[stage] = found + wrong.get(stage, [])
            break
    if not ours.refused and not late and "before the disturbance" in theirs.stages and "baseline" not in ours.ran:
        wrong.setdefault("before the disturbance", []).append("no graph ran, so that nothing was tested")
    if wrong:
        order = ["scheduling", "right after scheduling", "baseline", *theirs.stages, "after"]
        stage = min(wrong, key=order.index)
        return Verdict(WRONG, [line for at in sorted(wrong, key=order.index) for line in wrong[at]], stage, ours.fallbacks)
    if late or (ours.refused and "baseline" not in ours.ran):
        return Verdict(REFUSED, late or ours.refused, "a call" if late else "scheduling", ours.fallbacks)
    return Verdict(FALLBACK if ours.fallbacks else EQUAL, [], "", ours.fallbacks)


# -- calls ----------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, output: Any, batch: Batch) -> dict[str, Any]:
    """Backward from all of ``output``; the gradients of parameters and inputs, which are cleared."""
    total: Any = 0.0
    for index, tensor in enumerate(_float_tensors(output)):
        if tensor.requires_grad:
            total = total + (tensor.double() * (1 + index)).square().mean()
    if isinstance(total, torch.Tensor):
        total.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    found = {name: tensor.grad for name, tensor in {**named, **inputs}.items()}
    return {name: None if grad is None else grad.clone() for name, grad in found.items()}


def _float_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _float_tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _float_tensors(each)


def clear(model: nn.Module, batch: Batch) -> None:
    """Remove all gradients."""
    for tensor in [*model.parameters(), *(each for each in batch.values() if isinstance(each, torch.Tensor))]:
        if tensor.is_leaf:
            tensor.grad = None


def step(model: nn.Module, batch: Batch, world: World) -> Any:
    """Forward and backward."""
    clear(model, batch)
    output = model(**batch)
    found = gradients(model, output, batch)
    clear(model, batch)
    return output, found


def trained(model: nn.Module, batch: Batch, world: World) -> Any:
    """Two steps of SGD, then a forward without gradients."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    seen = []
    if parameters:
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        for _ in range(2):
            seen.append(step_of(model, batch))
            optimizer.step()
    clear(model, batch)
    with torch.no_grad():
        return seen, model(**batch)


def step_of(model: nn.Module, batch: Batch) -> Any:
    """Backward of one forward, leaving the gradients of parameters in place."""
    clear(model, batch)
    output = model(**batch)
    return output, gradients(model, output, batch)


STEP = Call("step", step)
TRAINED = Call("trained", trained)
USUAL: Sequence[Call] = (STEP, TRAINED)


def in_threads(function: Callable[[], Any], count: int = 2) -> list[Any]:
    """Call ``function`` in ``count`` threads at once; raises what any of them raised."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def work(index: int) -> None:
        try:
            barrier.wait()
            results[index] = function()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def twin_of(model: nn.Module) -> nn.Module:
    """A deep copy."""
    return copy.deepcopy(model)
