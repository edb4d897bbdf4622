"""Like layers that differ in ties or deep settings; what a forward asks the process; dtypes of settings; heads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of
from tests.zoo import batch, build

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
X = torch.linspace(-2, 2, 32).reshape(4, 8)


class Layer(nn.Module):
    """An MLP with a setting two modules down, which may share its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a, self.a.b = nn.Module(), nn.Module()
        self.a.b.k, self.config = 2.0, SimpleNamespace(text=SimpleNamespace(gain=1.0))
        self.table = dict[str, float]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a.b.k * self.fc2(F.gelu(self.fc1(x))) * self.config.text.gain


def tied(layer: Any) -> None:
    layer.fc2.weight = layer.fc1.weight


def half_tied(layer: Any) -> None:
    layer.fc2.bias = layer.fc1.bias


def deep(layer: Any) -> None:
    layer.a.b.k = 3.0


def deep_type(layer: Any) -> None:
    layer.a.b.k = 2


def deep_object(layer: Any) -> None:
    layer.config.text.gain = 3.0


def one_module(layer: Any) -> None:
    layer.fc2 = layer.fc1


def assert_trains_alike(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    for each in (ours, theirs):
        each.zero_grad()
        each(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("rules", ["default", "all"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("differ", [tied, half_tied, deep, deep_type, deep_object, one_module])
def test_layers_that_differ_do_not_share_a_graph(differ: Callable[[Any], None], first: bool, rules: str) -> None:
    torch.manual_seed(0)
    layers = [Layer(), Layer(), Layer()]
    for layer in layers[:1] if first else layers[1:]:
        differ(layer)
    model = nn.Sequential(*layers)
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, X, rules=rules, cost_guard=False)
    assert report.applied
    assert_trains_alike(model, twin, X)
    assert_trains_alike(model, twin, X[:3] + 1)


class Asking(nn.Module):
    """A forward that asks the process."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        super().__init__()
        self.fc, self.ask = nn.Linear(8, 8), ask

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x)) * (2.0 if self.ask() else 3.0)


@contextmanager
def initialized() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


ASKED: dict[str, tuple[Callable[[], bool], Callable[[], AbstractContextManager[Any]]]] = {
    "grad": (torch.is_grad_enabled, torch.no_grad),
    "inference": (torch.is_inference_mode_enabled, torch.inference_mode),
    "distributed": (dist.is_initialized, initialized),
    "autocast": (torch.is_autocast_enabled, lambda: torch.autocast("cpu", enabled=False)),
    "deterministic": (torch.are_deterministic_algorithms_enabled, nullcontext),
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", ASKED)
def test_what_the_process_answers_counts(name: str) -> None:
    ask, changed = ASKED[name]
    model = Asking(ask)
    twin = copy.deepcopy(model)
    schedule.optimize(model, X, cost_guard=False)
    torch.testing.assert_close(model(X), twin(X))
    with changed():
        torch.testing.assert_close(model(X), twin(X))
    torch.testing.assert_close(model(X), twin(X))


class Counting(nn.Module):
    """Multiplies integers with a setting, whose type decides about the dtype of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.value = nn.Linear(8, 8), 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.arange(8) * self.value
        return F.gelu(self.fc(x)) * count, count


@pytest.mark.parametrize("value", [2.0, True, 3])
def test_the_type_of_a_setting_decides_about_the_dtype(value: Any) -> None:
    model = Counting()
    twin = copy.deepcopy(model)
    schedule.optimize(model, X, cost_guard=False)
    for each in (model, twin):
        each.value = value
    for ours, theirs in zip(model(X), twin(X), strict=True):
        torch.testing.assert_close(ours, theirs)  # and of one dtype


class Keeping(Layer):
    """Sets an item of its own dict, appends to its own list."""

    def __init__(self) -> None:
        super().__init__()
        self.log = list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.table["calls"] = self.table.get("calls", 0) + 1
        self.log.append(x.shape[0])
        return super().forward(x) * self.table["calls"]


def test_a_forward_that_sets_items_of_its_own_does_so_at_each_call() -> None:
    model = nn.Sequential(Keeping(), Layer())
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, X, cost_guard=False)
    assert report.applied and model[0].table == {} and model[0].log == []
    for x in (X, X[:2]):
        torch.testing.assert_close(model(x), twin(x))
    assert model[0].table == twin[0].table == {"calls": 2} and model[0].log == [4, 2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rules", ["memory", "qkv_merge", "all"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_biases_that_appear_count_in_the_loss_too(name: str, rules: str) -> None:
    model, twin, inputs = build(name).eval(), build(name).eval(), batch(name)
    schedule.optimize(model, inputs, rules=rules, cost_guard=False)

    def compare() -> None:
        for each in (model, twin):
            each.zero_grad()
            each(**inputs).loss.backward()
        ours, theirs = model(**inputs), twin(**inputs)
        torch.testing.assert_close(ours.loss, theirs.loss)
        torch.testing.assert_close(ours.logits, theirs.logits)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)

    compare()
    for each in (model, twin):
        torch.manual_seed(3)
        each.lm_head = nn.Linear(32, 64, bias=True)
    compare()
    if name == "llama":
        for each in (model, twin):
            for projection in ("q_proj", "k_proj"):
                getattr(each.model.layers[0].self_attn, projection).bias = nn.Parameter(
                    torch.linspace(0, 1, getattr(each.model.layers[0].self_attn, projection).out_features)
                )
        compare()
    state = state_of(model)
    assert state is None or state.fallbacks <= 4
