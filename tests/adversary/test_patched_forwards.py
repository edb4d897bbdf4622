"""Layers whose forward, or a function that it calls, was replaced: they are never taken for torch's."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from transformers.pytorch_utils import Conv1D

import schedule


class Block(nn.Module):
    """Every kind of layer that a rule knows, each where a rule looks for it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 8), Conv1D(8, 8)
        self.act, self.norm, self.drop, self.soft = nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.1), nn.Softmax(-1)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.drop(self.second(self.act(self.first(x)))))
        scores = self.soft(x @ x.transpose(-1, -2) / 3 + torch.zeros(x.shape[-2], x.shape[-2]))
        return self.third(scores @ x)


LAYERS = [nn.Embedding, nn.Linear, Conv1D, nn.GELU, nn.LayerNorm, nn.Dropout, nn.Softmax]
FUNCTIONS = ["embedding", "linear", "gelu", "layer_norm", "dropout", "softmax"]
CHANGES = {"half": lambda y: y * 0.5, "longer": lambda y: torch.cat([y, y], 1) if y.ndim == 3 else y}
"""What the replacement does to the result; the second changes sizes."""


def changed(original, change):
    @functools.wraps(original)
    def forward(*args, **kwargs):
        return change(original(*args, **kwargs))

    return forward


def assert_equal_to_untouched(model, twin):
    for mode in (False, True):
        for rows, length in ((2, 5), (3, 4)):
            ids = torch.arange(rows * length).view(rows, length) % 12
            results, draws = [], []
            for each in (model.train(mode), twin.train(mode)):
                torch.manual_seed(0)
                each.zero_grad()
                result = each(ids)
                result.square().sum().backward()
                results.append(result)
                draws.append(torch.rand(1))
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*draws)
            for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad, msg=name)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


@pytest.mark.one_in(3)
@pytest.mark.unreplayable("a layer's class is changed beside the schedule")
@pytest.mark.parametrize("rules", ["default", "all"])
@pytest.mark.parametrize("when", ["before", "after", "undone"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_replaced_forward_of_a_class(block, kind, when, rules, monkeypatch):
    twin, ids = copy.deepcopy(block), torch.arange(10).view(2, 5)
    replacement = changed(kind.forward, CHANGES["half"])
    if when == "undone":  # replaced while it is scheduled, torch's own afterwards
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", replacement)
            schedule.optimize(block, (ids,), rules=rules)
            assert_equal_to_untouched(block, twin)
    else:
        if when == "before":
            monkeypatch.setattr(kind, "forward", replacement)
        schedule.optimize(block, (ids,), rules=rules)
        monkeypatch.setattr(kind, "forward", replacement)
    assert_equal_to_untouched(block, twin)


@pytest.mark.unreplayable("a layer is changed beside the schedule")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "name, change",
    [
        *((name, "half") for name in ("embed", "first", "act", "norm", "drop", "third")),
        *((name, "longer") for name in ("embed", "norm", "third")),
    ],  # what is added to another keeps its length
)
def test_a_replaced_forward_of_one_layer(block, name, when, change):
    twin, ids = copy.deepcopy(block), torch.arange(10).view(2, 5)
    if when == "after":
        schedule.optimize(block, (ids,))
    for each in (block, twin):
        layer = each.get_submodule(name)
        layer.forward = changed(layer.forward, CHANGES[change])
    if when == "before":
        schedule.optimize(block, (ids,))
    assert_equal_to_untouched(block, twin)


@pytest.mark.one_in(3)
@pytest.mark.unreplayable("a function is changed beside the schedule")
@pytest.mark.parametrize("rules", ["default", "all"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replaced_function(block, name, when, rules, monkeypatch):
    twin, ids = copy.deepcopy(block), torch.arange(10).view(2, 5)
    replacement = changed(getattr(F, name), CHANGES["half"])
    if when == "before":
        monkeypatch.setattr(F, name, replacement)
    schedule.optimize(block, (ids,), rules=rules)
    monkeypatch.setattr(F, name, replacement)
    assert_equal_to_untouched(block, twin)


@pytest.mark.unreplayable("a function is changed beside the schedule")
def test_a_function_in_the_place_of_another(block, monkeypatch):
    twin = copy.deepcopy(block)
    monkeypatch.setattr(F, "gelu", lambda x, approximate="none": F.silu(x))
    schedule.optimize(block, (torch.arange(10).view(2, 5),))
    assert_equal_to_untouched(block, twin)
    monkeypatch.setattr(F, "gelu", F.silu)
    monkeypatch.setattr(nn.GELU, "forward", nn.SiLU.forward)
    for each in (block, twin):
        each.act.inplace = False
    assert_equal_to_untouched(block, twin)


@pytest.mark.unreplayable("a class is changed beside the schedule")
@pytest.mark.parametrize("when", ["before", "after"])
def test_replaced_layers_in_gpt2(when, monkeypatch):
    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    model = hf.GPT2LMHeadModel(config).eval()
    twin, ids = copy.deepcopy(model), torch.arange(12).view(2, 6)
    if when == "after":
        schedule.optimize(model, {"input_ids": ids})
    monkeypatch.setattr(Conv1D, "forward", changed(Conv1D.forward, lambda y: y * 1.5))
    monkeypatch.setattr(nn.Linear, "forward", changed(nn.Linear.forward, lambda y: y - 1))
    if when == "before":
        schedule.optimize(model, {"input_ids": ids})
    for batch in (ids, ids[:, :4]):
        torch.testing.assert_close(model(batch).logits, twin(batch).logits)


def test_functions_replaced_before_this_package_is_imported():
    code = """
        import copy, torch, torch.nn.functional as F
        from torch import nn
        gelu, softmax, norm = F.gelu, F.softmax, F.layer_norm
        F.gelu = lambda x, approximate="none": 0.5 * gelu(x, approximate=approximate)
        F.softmax = lambda *args, **kwargs: 2 * softmax(*args, **kwargs)
        F.layer_norm = lambda *args, **kwargs: 3 * norm(*args, **kwargs)
        import schedule

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down, self.norm, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU()
            def forward(self, x):
                x = self.norm(x + self.down(F.gelu(self.up(x))))
                x = self.norm(x + self.down(self.act(self.up(x))))
                return F.softmax(x @ x.transpose(-1, -2) / 3, dim=-1)

        model, x = Model(), torch.randn(2, 3, 8)
        twin = copy.deepcopy(model)
        schedule.optimize(model, (x,), rules="all")
        for given in (x, torch.randn(4, 5, 8)):
            torch.testing.assert_close(model(given), twin(given))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_lambda_in_place_of_a_function_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph cannot name it, so the module that calls it is left alone."""
    namespace: dict[str, Any] = {"norm": F.layer_norm}
    exec("tripled = lambda *args, **kwargs: 3 * norm(*args, **kwargs)", namespace)  # without a source
    monkeypatch.setattr(F, "layer_norm", namespace["tripled"])
    sch = schedule.create_schedule(torch.nn.LayerNorm(8), torch.randn(2, 8))
    with pytest.raises(schedule.TraceError, match="replaced by a lambda"):
        sch.trace()


class Convolved(nn.Module):
    """A convolution, a batch norm and an activation, each of which a rule may take for torch's."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


CALLED = [
    (nn.Conv2d, "forward"),
    (nn.Conv2d, "_conv_forward"),
    (F, "conv2d"),
    (nn.BatchNorm2d, "forward"),
    (nn.BatchNorm2d, "_check_input_dim"),
    (F, "batch_norm"),
    (F, "relu"),
]


@pytest.mark.parametrize(("owner", "name"), CALLED, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("rules", ["default", "inference"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_a_convolution_or_batch_norm_that_was_replaced(owner, name, rules, before, monkeypatch):
    torch.manual_seed(0)
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args, **kwargs):
        result = original(*args, **kwargs)
        return 3 * args[1].mean() if result is None else result * 0.5  # a check has no result, and returns nothing

    model, x = Convolved(), torch.randn(2, 3, 6, 6)
    twin = copy.deepcopy(model)
    if before:
        monkeypatch.setattr(owner, name, replaced)
    schedule.optimize(model, x, rules=rules, cost_guard=False)
    monkeypatch.setattr(owner, name, replaced)
    for training in (True, False):
        model.train(training), twin.train(training)
        torch.testing.assert_close(model(x), twin(x))
        for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, theirs)
