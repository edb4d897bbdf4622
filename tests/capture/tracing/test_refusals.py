"""Forwards that cannot be traced are refused with the model's line, whatever they raise or draw on the way."""

from __future__ import annotations

import copy
import enum
import functools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from fused.torch_internals.tensor_kinds import ObservingFakeMode
from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import FallbackWarning, install, state_of
from schedule.util.errors import TraceError


def traced(module, example):
    recording = record(module, example)
    call = recording.calls[module][0]
    return [specialize(module, type(module).forward, call, recording, training) for training in (True, False)]


class RaisingInTraining(nn.Module):
    def forward(self, x):
        if self.training:
            raise IndexError("no such thing")
        return x


class WithNumpy(nn.Module):
    def forward(self, x):
        if self.training:
            np.put_along_axis(np.zeros((2, 3)), np.array([x.shape]), 1, -1)
        return x


@pytest.mark.parametrize("cls", [RaisingInTraining, WithNumpy])
def test_what_a_forward_raises_is_a_trace_error_with_its_line(cls):
    with pytest.raises(TraceError, match="the forward raises") as caught:
        traced(cls(), torch.randn(2, 3))
    assert "test_refusals.py" in caught.value.where and "in forward" in caught.value.where and caught.value.fix
    assert caught.value.__cause__ is not None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class RaisingMlp(Mlp):
    def forward(self, x):
        return super().forward(torch.from_numpy(x.detach().numpy()))


def test_optimize_skips_what_raises_and_rewrites_the_rest():
    model = nn.Sequential(Mlp(), RaisingMlp())
    report = schedule.optimize(model, torch.randn(2, 8), cost_guard=False)
    assert state_of(model[0]) is not None and state_of(model[1]) is None
    assert any(e.status == "skipped" and "RuntimeError" in e.reason and e.path == "1" for e in report.entries)


class DroppingMlp(Mlp):
    def forward(self, x):
        if self.training and torch.rand([]) < 0.5:
            return x
        return super().forward(x)


def test_a_module_that_traces_in_evaluation_only_is_rewritten_there_and_the_report_says_so():
    model = nn.Sequential(DroppingMlp())
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, torch.randn(2, 8), cost_guard=False)
    assert report.applied and any("in training: " in e.reason for e in report.entries if e.status == "skipped")
    x = torch.randn(3, 8)
    torch.testing.assert_close(model.eval()(x), twin.eval()(x))
    assert state_of(model[0]).fallbacks == 0
    for seed in range(4):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            ours = model.train()(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, twin.train()(x), rtol=0, atol=0)
    assert state_of(model[0]).fallbacks == 4


def test_tracing_needs_one_mode_only():
    sch = schedule.create_schedule(DroppingMlp(), torch.randn(2, 8)).trace()
    assert [made.training for made in sch.specializations] == [False]
    assert any(node.target == "up" for node in sch.graph.nodes)


@pytest.mark.parametrize("draw", [lambda: random.choice([1, 2]), lambda: np.random.rand(1)[0]], ids=["random", "numpy"])
def test_a_random_number_of_python_is_not_baked_in(draw):
    class Dropping(nn.Module):
        def forward(self, x):
            return x * draw()

    module = Dropping()
    recording = record(module, torch.randn(2))
    before = random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(TraceError, match="random number outside torch"):
        specialize(module, Dropping.forward, recording.calls[module][0], recording, True)
    assert random.getstate() == before[0] and (np.random.get_state()[1] == before[1]).all()


class Mode(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


class WithMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.mode = Mode.DOUBLE

    def forward(self, x):
        return x * 2 if self.mode is Mode.DOUBLE else x * 3


def test_a_member_of_an_enum_is_a_setting():
    module, x = WithMode(), torch.randn(2, 3)
    install(module, traced(module, x))
    assert torch.equal(module(x), x * 2) and state_of(module).fallbacks == 0
    module.mode = Mode.TRIPLE
    with pytest.warns(FallbackWarning):
        assert torch.equal(module(x), x * 3)
    assert type(module.mode) is Mode


class Unsubclassable:
    limit = 1

    def __init_subclass__(cls):
        raise RuntimeError("final")


def test_a_class_that_wants_no_subclass_is_left_alone():
    module, x = WithMode(), torch.randn(2, 3)
    module.final = Unsubclassable()
    install(module, traced(module, x))
    assert torch.equal(module(x), x * 2) and state_of(module).fallbacks == 0


@functools.lru_cache
def steps(rows):
    return torch.arange(rows)[:, None]


@functools.lru_cache
def columns_of(shape):
    return torch.arange(shape[1])[None].expand(*shape)


class Cached(nn.Module):
    @functools.lru_cache(maxsize=8)  # noqa: B019
    def grid(self, rows, columns):
        return torch.ones(rows, columns).cumsum(0) + steps(rows)

    def forward(self, x):
        return x + self.grid(*x.shape) + columns_of(x.shape)


def test_cached_results_are_computed_in_the_graph_and_no_data_free_one_stays():
    module, x = Cached(), torch.randn(2, 3)
    twin = copy.deepcopy(module)
    Cached.grid.cache_clear()
    steps.cache_clear()
    install(module, traced(module, x))
    for shape in ((2, 3), (4, 5)):
        x = torch.randn(shape)
        assert torch.equal(module(x), twin(x)) and type(twin.grid(*shape)) is torch.Tensor
        assert type(steps(shape[0])) is type(columns_of(x.shape)) is torch.Tensor
    assert state_of(module).fallbacks == 0 and isinstance(vars(Cached)["grid"], functools._lru_cache_wrapper)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x, offsets):
        y = F.grouped_mm(x, self.weight, offs=offsets)
        return y.view(x.shape[0], 2, 8).sum(1)


def test_grouped_products_are_traced_in_any_dtype():
    module = Experts()
    twin = copy.deepcopy(module)
    install(module, traced(module, (torch.randn(6, 8), torch.tensor([2, 3, 6], dtype=torch.int32))))
    x, offsets = torch.randn(9, 8), torch.tensor([1, 4, 9], dtype=torch.int32)
    assert torch.equal(module(x, offsets), twin(x, offsets)) and state_of(module).fallbacks == 0


@pytest.mark.parametrize(
    "a, b", [((6, 8), (3, 8, 16)), ((4, 8), (8, 16)), ((3, 4, 8), (3, 8, 16)), ((3, 4, 8), (8, 16))]
)
def test_the_shape_of_a_grouped_product_is_told_as_torch_computes_it(a, b):
    offsets = None if len(a) == len(b) == 3 else torch.tensor([1, 4, 6], dtype=torch.int32)
    one, two = torch.randn(a), torch.randn(b)
    computed = F.grouped_mm(one, two, offs=offsets)
    mode = ObservingFakeMode(allow_non_fake_inputs=True)
    with mode:
        told = F.grouped_mm(*map(mode.from_tensor, (one, two)), offs=offsets)
    assert told.shape == computed.shape and told.dtype is computed.dtype
