"""Models as they are written outside transformers are traced, rewritten, and compute what they did."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused
import schedule
from schedule.runtime.scheduled import FallbackWarning, state_of
from schedule.util.named_values import call
from tests import beyond
from tests.dispatched import Calls

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with fused.backend("reference"):
        yield


@dataclass(frozen=True)
class Written:
    """A model, what it is called with, and what is rewritten in it.

    Attributes:
        make: builds it.
        batch: makes what it is called with, for so many rows and so long a sequence.
        rules: rule → in at least so many places.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    rules: dict[str, int] = field(default_factory=dict)


def _images(rows: int, _: int) -> Any:
    return {"pixel_values": torch.randn(rows, 3, 8, 8)}


def _tokens(rows: int, length: int) -> Any:
    ids = torch.randint(0, 50, (rows, length))
    return {"idx": ids, "targets": torch.where(ids % 7 == 0, -1, ids.roll(-1, 1))}


def _hidden(rows: int, length: int) -> Any:
    return (torch.randn(rows, length, 16),)


def _target_and_memory(rows: int, length: int) -> Any:
    return torch.randn(rows, length, 16), torch.randn(rows, 5, 16)


def _noise(rows: int, length: int) -> Any:
    return {
        "pixel_values": torch.randn(rows, 8, 6, 6),
        "timestep": torch.arange(rows) * 100,
        "context": torch.randn(rows, length, 16),
    }


BLOCK = {"bias_gelu": 2, "bias_dropout": 4, "add_layer_norm": 2}
MODELS = {
    "ViT": Written(beyond.Vit, _images, {**BLOCK, "attention_softmax": 2}),
    "ViT without dropout": Written(lambda: beyond.Vit(drop=0.0), _images, {"bias_gelu": 2, "add_layer_norm": 2}),
    "ViT, torch's attention": Written(lambda: beyond.Vit(modern=True), _images, {"bias_gelu": 2, "bias_dropout": 4}),
    "nanoGPT": Written(beyond.NanoGpt, _tokens, {**BLOCK, "attention_softmax": 2}),
    "encoder": Written(lambda: beyond.Encoder(False, "relu"), _hidden, {"bias_relu": 2, "add_layer_norm": 2}),
    "encoder, norm first": Written(lambda: beyond.Encoder(True, F.silu), _hidden, {"bias_silu": 2}),
    "decoder": Written(
        lambda: beyond.Decoder(False, "relu"), _target_and_memory, {"bias_relu": 2, "add_layer_norm": 6}
    ),
    "decoder, norm first": Written(lambda: beyond.Decoder(True, F.silu), _target_and_memory, {"bias_silu": 2}),
    "attention": Written(lambda: beyond.Attention(False), _hidden, {"bias_gelu_tanh": 1}),
    "attention with weights": Written(lambda: beyond.Attention(True), _hidden, {"bias_gelu_tanh": 1}),
    "ResNet": Written(beyond.ResNet, _images, {"batch_norm_relu": 10}),
    "EfficientNet": Written(
        beyond.EfficientNet, _images, {"batch_norm_silu": 3, "batch_norm_hard_swish": 2, "batch_norm_add": 2}
    ),
    "UNet block": Written(beyond.UNetBlock, _noise, {"gated_gelu": 1, "bias_dropout": 2, "add_layer_norm": 2}),
    "experts in a loop": Written(
        lambda: beyond.MoeBlock(beyond.LoopedExperts()), _hidden, {"gated_silu": 4, "rms_norm_llama": 1}
    ),
    "experts together": Written(
        lambda: beyond.MoeBlock(beyond.GroupedExperts()), _hidden, {"gated_silu": 1, "rms_norm_llama": 1}
    ),
}


def build(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, batch = MODELS[name].make(), MODELS[name].batch(2, 7)
    return model, batch


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.parametrize("name", MODELS)
def test_rewritten_and_equal(name: str) -> None:
    model, batch = build(name)
    names, parameters = list(model.state_dict()), list(model.parameters())
    sch = schedule.create_schedule(model, batch)
    report = schedule.optimize(sch, cost_guard=False)
    assert {rule: min(report.applied.get(rule, 0), n) for rule, n in MODELS[name].rules.items()} == MODELS[name].rules
    assert report.select(status="skipped") == []
    verified = schedule.verify(sch, batch, steps=2).report
    assert verified.skipped == [] and len({case.shapes for case in verified.cases}) == 5
    assert report.fallbacks.keys() == report.declined.keys() <= {"encoder.layers.0", "encoder.layers.1"}  # see FAST
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.parametrize("name", MODELS)
def test_without_gradients(name: str) -> None:
    """In evaluation, where torch's own modules choose kernels of their own."""
    model, batch = build(name)
    twin = copy.deepcopy(model)
    schedule.optimize(model, batch, cost_guard=False)
    model.eval(), twin.eval()
    for context in (torch.no_grad, torch.inference_mode):
        for rows, length in ((2, 7), (1, 5), (3, 1)):
            inputs = MODELS[name].batch(rows, length)
            with context():
                torch.testing.assert_close(call(model, inputs), call(twin, inputs), rtol=1e-4, atol=1e-5)


def test_a_causal_mask_is_the_buffer_that_the_model_has() -> None:
    model, batch = build("nanoGPT")
    schedule.optimize(model, batch, cost_guard=False)
    twin = copy.deepcopy(model)
    model.eval(), twin.eval()
    before = model(**batch)[0]
    assert isinstance(model.transformer, nn.ModuleDict)
    for each in (model, twin):
        for block in each.transformer.h:
            block.attn.bias.copy_(torch.eye(32).view(1, 1, 32, 32))
    after = model(**batch)[0]
    assert not torch.allclose(before, after)
    with torch.no_grad():
        for module in twin.modules():
            schedule.runtime.scheduled.install(module, ())
    assert not any(state_of(module) for module in twin.modules())
    torch.testing.assert_close(after, twin(**batch)[0], rtol=1e-5, atol=1e-5)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_experts_without_tokens() -> None:
    model, batch = build("experts in a loop")
    twin = copy.deepcopy(model)
    schedule.optimize(model, batch, cost_guard=False)
    for each in (model, twin):
        each.zero_grad()
        each(torch.ones(1, 1, 16)).sum().backward()
    ours, theirs = ([p.grad for p in each.moe.experts.parameters()] for each in (model, twin))
    idle = [grad is None or not grad.any() for grad in theirs]
    assert any(idle) and not all(idle)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


# -- torch's own encoder --------------------------------------------------------------------------------------


def kernels(model: nn.Module, *inputs: Tensor) -> set[str]:
    with Calls() as calls:
        model(*inputs)
    return set(calls.names)


FAST = "_transformer_encoder_layer_fwd"


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_torchs_kernel_for_a_whole_layer_still_runs_without_gradients() -> None:
    model, (x,) = build("encoder")
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, x, cost_guard=False)
    model.eval(), twin.eval()
    with torch.no_grad():
        assert FAST in kernels(twin, x) and FAST in kernels(model, x)
        model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert FAST not in kernels(model, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert report.declined.keys() == {"encoder.layers.0", "encoder.layers.1"}
    assert report.declined["encoder.layers.0"] == ["torch has a kernel of its own for it without gradients"]
    count = dict(report.fallbacks)
    assert FAST not in kernels(model, x), "with gradients, and in training, the graph runs"
    model.train()
    model(x)
    assert report.fallbacks == count


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("recorded", ["padded", "whole"])
def test_padded_sequences_become_nested_tensors(recorded: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    twin = copy.deepcopy(model)
    x, padding = torch.randn(2, 7, 16), torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    batch = {"src": x, "src_key_padding_mask": padding} if recorded == "padded" else {"src": x}
    assert schedule.optimize(model, batch, cost_guard=False).applied["bias_relu"] == 2
    for training in (False, True):
        for gradients in (False, True):
            model.train(training), twin.train(training)
            with torch.set_grad_enabled(gradients):
                ours, theirs = (each(x, src_key_padding_mask=padding) for each in (model, twin))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


ROOTS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32), {"bias_relu": 1}),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False),
        {"bias_relu": 2},
    ),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(16, 4, 32), {"bias_relu": 1, "add_layer_norm": 3}),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32), 2),
        {"bias_relu": 2, "add_layer_norm": 6},
    ),
    "transformer": (
        lambda: nn.Transformer(16, 4, 1, 1, 32),
        {"bias_relu": 2, "add_layer_norm": 5},
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", ROOTS)
def test_torchs_own_modules_are_roots(name: str) -> None:
    """With the sequence first, as torch has it by default."""
    torch.manual_seed(0)
    make, rules = ROOTS[name]
    model = make()
    x, memory = torch.randn(7, 2, 16), torch.randn(5, 2, 16)
    batch = {"src": x} if "encoder" in name else {"tgt": x, "memory": memory}
    batch = {"src": memory, "tgt": x} if name == "transformer" else batch
    sch = schedule.create_schedule(model, batch)
    report = schedule.optimize(sch, cost_guard=False)
    assert {rule: report.applied.get(rule, 0) for rule in rules} == rules
    verified = schedule.verify(sch, batch, steps=1).report
    assert verified.equal and len({case.shapes for case in verified.cases}) > 1


def test_a_quantized_tensor_among_the_inputs_is_refused_with_a_reason() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x.dequantize() + 1)

    model, x = Model(), torch.quantize_per_tensor(torch.randn(2, 4), 0.1, 0, torch.quint8)
    with pytest.raises(schedule.NotApplicable, match=r"quantized tensor cannot be traced[\s\S]*dequantize it"):
        schedule.optimize(model, x)
    assert type(model) is Model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_runs_the_original_forward(layout: torch.layout) -> None:
    model = beyond.GptMlp(8, 0.0)
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, torch.randn(2, 5, 8), cost_guard=False)
    assert report.applied
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout)
        for ours, theirs in zip(model(nested).unbind(), twin(nested).unbind(), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert report.fallbacks == {"": 1}
    with pytest.raises(schedule.NotApplicable, match=r"nested tensor has no one shape[\s\S]*to_padded_tensor"):
        schedule.optimize(twin, nested)
