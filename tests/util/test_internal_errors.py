"""Errors of our own code: told as ours, contained, once; never as those of the user's forward."""

from __future__ import annotations

import ast
import copy
import importlib
import operator
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.capture.guards.sources import Item, Self
from schedule.util import internal_errors
from schedule.util.errors import NotApplicable
from schedule.util.internal_errors import InternalError, InternalErrorWarning, as_python_does, own_errors, perform


class Block(nn.Module):
    """Layers, an attribute, a branch, a loop, a container and formatting: what a trace follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.settings = {"scale": 2.0, "times": 2}
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = F.gelu(self.first(self.norm(x)), approximate="tanh")
        for _ in range(self.settings["times"]):
            y = y * self.settings["scale"]
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return self._shifted(self.last(y)) + x[:, : x.shape[1]]

    def _shifted(self, y: Tensor) -> Tensor:
        return y + self.shift

    @property
    def shift(self) -> float:
        return self.settings["scale"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


X, MASK = torch.randn(2, 3, 8), torch.rand(2, 3, 16) < 0.5

SCHEDULING = (
    # what optimize does before it looks at the model
    "schedule.core.node:Tree._at",
    "schedule.core.history:History.__init__",
    "schedule.rules.rule_registry:select_rules",
    # capture: the recorded run
    "schedule.capture.recording.recording:recorded",
    "schedule.capture.recording.recording:Recording.describe",
    "schedule.capture.recording.recording:Recording.add",
    "schedule.capture.snapshots.snapshot:Snapshot.difference",
    # capture: traces
    "schedule.capture.specializing.specialization:specialize",
    "schedule.capture.graph.signature:SignatureBuilder.build",
    "schedule.capture.tracing.tracer:ModuleTracer.run",
    "schedule.capture.tracing.tracer:ModuleTracer.emit",
    "schedule.capture.tracing.tracer:ModuleTracer.track",
    "schedule.capture.tracing.tracer:ModuleTracer._evaluate",
    "schedule.capture.tracing.tracer:ModuleTracer._spec",
    "schedule.capture.effects.layers:Memory.computed",
    "schedule.capture.effects.writes:written_tensors",
    "schedule.capture.tracing.state_nodes:StateNodes.tensor",
    "schedule.capture.tracing.module_calls:ModuleCalls.call",
    "schedule.capture.effects.torch_calls:written_call",
    "schedule.capture.graph.scalars:scalar_of",
    "schedule.capture.effects.autograd_functions:is_of_library",
    "schedule.capture.python.calling:Calling.call_function",
    "schedule.capture.python.calling:Calling._call_method",
    "schedule.capture.python.attribute_reads:AttributeReads.default_attr",
    "schedule.capture.python.attribute_reads:AttributeReads._bind",
    "schedule.capture.python.item_reads:ItemReads.item",
    "schedule.capture.python.state_reads:Reads.read",
    "schedule.capture.guards.resolution:found_in",
    "schedule.capture.python.instrument:instrumented",
    "schedule.capture.guards.plain_values:is_atom",
    "schedule.capture.specializing.expansion:expand",
    "schedule.capture.guards.own_forward:has_own_forward",
    # core
    "schedule.core.graphs:Graphs._specialized",
    "schedule.core.graphs:Graphs.check",
    "schedule.core.graphs:difference",
    "schedule.core.adapting:adapter_for",
    "schedule.core.edits:SetSpecializations.apply",
    # patterns and rules
    "schedule.patterns.normalize:normalize",
    "schedule.patterns.matcher:search",
    "schedule.patterns.side_effects:effects",
    "schedule.patterns.rewriting:rewrite_in_place",
    "schedule.rules.applying:find_all",
    "schedule.rules.applying:_rejected",
    "schedule.primitives.splicing:splice_in",
    # runtime
    "schedule.runtime.dispatch:generated_select",
    "schedule.runtime.scheduled:install",
)
"""Functions that scheduling the model runs."""
CALLING = (
    "schedule.core.adapting:Adapter.adapt",
    "schedule.core.adapting:_signature",
    "schedule.core.adapting:_check",
    "schedule.core.adapting:Shadow.__init__",
    "schedule.capture.specializing.specialization:specialize",
    "schedule.capture.tracing.tracer:ModuleTracer.emit",
    "schedule.capture.recording.recording:Recording.describe",
    "schedule.rules.applying:find_all",
    "schedule.runtime.dispatch:generated_select",
    "schedule.runtime.scheduled:ScheduledState._with",
    "schedule.runtime.scheduled:ScheduledState.selected",
    "schedule.runtime.call_kinds:is_only_traced",
    "schedule.capture.recording.hooks:acts_on_all",
)
"""Functions that a call of another kind runs, which the model adapts to."""
ERRORS = (AttributeError, RuntimeError)


def _function(where: str) -> types.FunctionType:
    module, _, name = where.partition(":")
    found: Any = operator.attrgetter(name)(importlib.import_module(module))
    while not isinstance(found, types.FunctionType):
        found = found.__wrapped__
    return getattr(found, "__wrapped__", found)


def _plant(monkeypatch: pytest.MonkeyPatch, where: str, error: type[Exception] = AttributeError) -> str:
    """Let a function of ours raise, wherever it is called by, and return its file."""
    function = _function(where)
    assert not function.__code__.co_freevars, "choose a function that is no closure"
    code = _code_raising(error).replace(
        co_filename=function.__code__.co_filename, co_name=function.__name__, co_qualname=function.__qualname__
    )
    monkeypatch.setattr(function, "__code__", code)
    return function.__code__.co_filename


def _code_raising(error: type[Exception]) -> types.CodeType:
    namespace: dict[str, Any] = {}
    exec(f"def planted(*args, **kwargs): raise {error.__name__}('planted')", namespace)
    return namespace["planted"].__code__


@pytest.fixture(autouse=True)
def _contained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As for users: an error is contained, and none was told before."""
    monkeypatch.delenv("FXSCHEDULE_INTERNAL_ERRORS")
    monkeypatch.setattr(internal_errors, "_told", set())
    yield


def _told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if each.category is InternalErrorWarning]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", SCHEDULING)
def test_an_error_while_scheduling_is_ours(where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model().eval()
    twin = copy.deepcopy(model)
    file = _plant(monkeypatch, where, error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = schedule.optimize(model, (X, MASK), cost_guard=False)
    monkeypatch.undo()
    told = _told(caught)
    assert len(told) == 1  # for all modules and modes together
    assert all(error.__name__ in text and "planted" in text and file in text and "torch " in text for text in told)
    assert report.internal_errors and report.select(status="internal error")
    assert report.figures()[0].tone == "bad" and report.sentence[0].isdigit() and "internal error" in report.sentence
    assert "the forward raises" not in f"{report} {told}"
    torch.testing.assert_close(model(X, MASK), twin(X, MASK))


@pytest.mark.parametrize("where", CALLING)
def test_an_error_while_adapting_is_ours(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, (X, MASK), cost_guard=False)
    assert report.applied
    file = _plant(monkeypatch, where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(model(X), twin(X))
    monkeypatch.undo()
    told = _told(caught)
    assert len(told) == 1 and "planted" in told[0] and file in told[0]
    assert report.internal_errors and report.figures()[0].tone == "bad"
    assert "the forward raises" not in f"{report} {told}"
    torch.testing.assert_close(model(X, MASK), twin(X, MASK))
    torch.testing.assert_close(model(X), twin(X))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, KeyError, TypeError])
@pytest.mark.parametrize(
    "where", ["schedule.runtime.dispatch:intact", "schedule.capture.guards.resolution:Resolved.holds"]
)
def test_an_error_while_dispatching_is_ours(
    where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, (X, MASK), cost_guard=False)
    model(X, MASK)
    Block.another = None  # guards on the class are checked again
    monkeypatch.delattr(Block, "another")
    _plant(monkeypatch, where, error)
    with pytest.warns(InternalErrorWarning, match="planted"):
        torch.testing.assert_close(model(X, MASK), twin(X, MASK))
    monkeypatch.undo()
    assert report.internal_errors and report.figures()[0].tone == "bad"
    torch.testing.assert_close(model(X, MASK), twin(X, MASK))


@pytest.mark.parametrize("where", SCHEDULING[::6])
def test_strict_raises_it_and_changes_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before = {name: (type(module), *sorted(vars(module))) for name, module in model.named_modules()}
    _plant(monkeypatch, where)
    with pytest.raises(InternalError, match="planted"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.optimize(model, (X, MASK), cost_guard=False, strict=True)
    monkeypatch.undo()
    assert {name: (type(module), *sorted(vars(module))) for name, module in model.named_modules()} == before


def test_in_our_tests_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSCHEDULE_INTERNAL_ERRORS", "raise")
    _plant(monkeypatch, "schedule.capture.tracing.tracer:ModuleTracer.emit")
    with pytest.raises(InternalError, match="planted"):
        schedule.optimize(Model(), (X, MASK))


class Failing(nn.Module):
    """It raises in training, by its own code or by an operation."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.layer(x), approximate="tanh")
        return self._failed(y) if self.training else y

    def _failed(self, y: Tensor) -> Tensor:
        if self.how == "attribute":
            return y * self.missing
        if self.how == "item":
            return y * {"a": 1}["b"]
        if self.how == "index":
            return y * [1.0][3]
        if self.how == "name":
            return y * no_such_name  # noqa: F821
        if self.how == "function":
            return y * int("x")
        if self.how == "method":
            return y * "a".index("b")
        if self.how == "operation":
            return y @ y
        if self.how == "number":
            return y * (1 / (y.dim() - 3))
        if self.how == "call":
            return y * self.how(1)
        raise ValueError("its own")


@pytest.mark.parametrize(
    "how", ["attribute", "item", "index", "name", "function", "method", "operation", "number", "call", "raise"]
)
def test_an_error_of_the_user_is_the_users(how: str) -> None:
    model = Failing(how).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", InternalErrorWarning)
        report = schedule.optimize(model, (X,), cost_guard=False)
    assert not report.internal_errors
    assert any("the forward raises" in entry.reason for entry in report.select(status="skipped"))


def test_whose_error_it_is() -> None:
    def raised(function: Any, *args: Any) -> Exception:
        try:
            function(*args)
        except Exception as error:
            return error
        raise AssertionError

    assert InternalError.of(raised(int, "x")) is None  # this file is a user's
    assert InternalError.of(raised(perform, int, "x")) is None
    assert InternalError.of(raised(as_python_does, None)) is not None  # None has no attributes
    assert InternalError.of(raised(hash, Item(Self(), []))) is not None  # in a method made by dataclasses
    with pytest.raises(ValueError, match="x"), own_errors():
        int("x")
    with pytest.raises(NotApplicable), own_errors():
        raise NotApplicable("known")


def test_modes_perform_what_the_user_called() -> None:
    """An error of an operator called through a mode of ours has its innermost frame in the mode."""
    handlers, wrong = 0, list[str]()
    for path in Path(schedule.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in ("__torch_function__", "__torch_dispatch__"):
                handlers += 1
                called = {each.arg for each in node.args.args[1:2]}
                calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                direct = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in called]
                wrong += [f"{path.name}:{each.lineno}" for each in direct]
    assert handlers > 10
    assert not wrong


def test_a_model_that_calls_itself_for_ever_is_to_blame() -> None:
    class Endless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.forward(x) if self.training else F.gelu(self.layer(x), approximate="tanh")

    report = schedule.optimize(Endless().eval(), (X,), cost_guard=False)
    assert not report.internal_errors
    assert any("the forward raises RecursionError" in entry.reason for entry in report.select(status="skipped"))


def test_an_error_while_calls_are_patched_does_not_outlast_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted, warnings.catch_warnings():
        warnings.simplefilter("ignore", InternalErrorWarning)
        _plant(planted, "schedule.capture.recording.interception:_watched")
        assert schedule.optimize(Model(), (X,), cost_guard=False).internal_errors
    assert schedule.optimize(Model(), (X,), cost_guard=False).applied
