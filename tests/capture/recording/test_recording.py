"""One run of the root, by metadata only, that disturbs nothing."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from fused.backends import onednn
from schedule.capture.recording.recording import MAX_SIGNATURES, record
from schedule.capture.recording.structure import TensorSpec, leaves
from schedule.util.errors import NotApplicable
from tests.zoo import batch, build


def test_it_keeps_shapes_and_no_data():
    model = build("bert").train()
    rng, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    recording = record(model, batch("bert"))
    call = recording.calls[model.bert.encoder.layer[0].intermediate][0]
    assert call.args[0] == TensorSpec((2, 7, 32), torch.float32, torch.device("cpu"))
    assert call.output.shape == (2, 7, 64)
    values = [leaf for calls in recording.calls.values() for c in calls for _, leaf in leaves((c.args, c.kwargs))]
    assert not any(isinstance(value, torch.Tensor) for value in values)
    assert torch.equal(rng, torch.get_rng_state()) and modes == [m.training for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize(("name", "products"), [("gpt2", 9), ("llama", 15)])  # Conv1D calls addmm, Linear F.linear
def test_products_go_by_the_faster_library(name: str, products: int, monkeypatch: pytest.MonkeyPatch):
    def outputs() -> list[TensorSpec]:
        calls = [call for each in record(build(name), batch(name)).calls.values() for call in each]
        return [call.output for call in calls if isinstance(call.output, TensorSpec)]

    plain = outputs()
    monkeypatch.setenv("FUSED_ONEDNN", "1")
    monkeypatch.setattr(importlib.import_module("fused.linear"), "LEAST_PRODUCTS", 1)
    calls, product = [], onednn.product
    monkeypatch.setattr(onednn, "product", lambda *args: calls.append(args) or product(*args))
    assert outputs() == plain and len(calls) == products


def test_a_shared_module_is_one_with_one_signature():
    model = build("albert")
    recording = record(model, batch("albert"))
    shared = model.albert.encoder.albert_layer_groups[0].albert_layers[0]
    assert len(recording.calls[shared]) == 1


def test_signatures_are_bounded():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Flagged()

        def forward(self, x):
            for flag in "abcdefgh":
                x = self.inner(x, flag)
            return x

    class Flagged(nn.Module):
        def forward(self, x, flag):
            return x + len(flag)

    model = Many()
    calls = record(model, torch.ones(2)).calls[model.inner]
    assert len(calls) == MAX_SIGNATURES and len({call.args[1] for call in calls}) == MAX_SIGNATURES


def test_inputs_the_model_refuses():
    model = build("gpt2").train()
    with pytest.raises(NotApplicable, match="refused the example inputs: ValueError") as caught:
        record(model, {"pixel_values": torch.ones(1)})
    assert caught.value.fix and isinstance(caught.value.__cause__, ValueError) and model.training
