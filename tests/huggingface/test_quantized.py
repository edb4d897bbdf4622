"""Training of quantized layers, and fine-tuning with LoRA: quantized first or scheduled first, beside a twin.

The libraries are installed by ``make sweep-beyond``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import schedule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
Quantize = Callable[[nn.Module], None]


def model_and_batch() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    return hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def layers_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of the blocks: where each is, its name and itself."""
    found = []
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and ".layers." in path and "lora" not in path:
            parent, _, name = path.rpartition(".")
            found.append((model.get_submodule(parent), name, module))
    return found


def in_bits(make: Callable[[Any, nn.Linear], nn.Module]) -> Quantize:
    bnb = pytest.importorskip("bitsandbytes")

    def quantize(model: nn.Module) -> None:
        for parent, name, linear in layers_of(model):
            new = make(bnb, linear)
            new.load_state_dict(linear.state_dict())
            setattr(parent, name, new.to("cpu"))

    return quantize


def nf4() -> Quantize:
    return in_bits(
        lambda bnb, linear: bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
    )


def int8() -> Quantize:
    return in_bits(
        lambda bnb, linear: bnb.nn.Linear8bitLt(
            linear.in_features, linear.out_features, bias=False, has_fp16_weights=False
        )
    )


def by_torchao(module: str, config: str) -> Quantize:
    """Quantize by a configuration of torchao's, named with the module that has it."""
    configs, quantization = pytest.importorskip(module), pytest.importorskip("torchao.quantization")

    def quantize(model: nn.Module) -> None:
        linears = {id(linear) for _, _, linear in layers_of(model)}
        made = getattr(configs, config)()
        quantization.quantize_(model, made, filter_fn=lambda module, path: id(module) in linears)

    return quantize


def torchao_int8() -> Quantize:
    return by_torchao("torchao.quantization", "Int8WeightOnlyConfig")


QUANTIZED: dict[str, Callable[[], Quantize]] = {"nf4": nf4, "int8": int8, "torchao int8": torchao_int8}


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def trained(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and trained weights of twenty steps."""
    trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: each.detach().clone() for name, each in trainable.items()}


@pytest.mark.parametrize("first", ["quantized", "scheduled", "scheduled, then LoRA"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_twenty_steps_are_those_of_the_untouched_twin(name: str, first: str) -> None:
    quantize = QUANTIZED[name]()
    (model, batch), (twin, _) = model_and_batch(), model_and_batch()
    quantize(twin)
    tuned_twin = with_lora(twin)
    if first == "quantized":
        quantize(model)
        tuned = with_lora(model)
        report = schedule.optimize(tuned, batch, rules="memory", cost_guard=False)
    elif first == "scheduled":
        report = schedule.optimize(model, batch, rules="memory", cost_guard=False)
        quantize(model)
        tuned = with_lora(model)
    else:
        quantize(model)
        report = schedule.optimize(model, batch, rules="memory", cost_guard=False)
        tuned = with_lora(model)
    assert report.count("rms_norm_llama") + report.count("add_rms_norm_llama") == 5
    (ours, weights), (theirs, expected) = trained(tuned, batch), trained(tuned_twin, batch)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-4)
    assert weights.keys() == expected.keys() and len(weights) == 8
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-3, atol=1e-4)
    if first == "quantized":  # in the other orders, layers around quantized products run their original forward
        assert report.active >= 0.7 * report.count(), report.declined


def torchao_float8() -> Quantize:
    float8 = pytest.importorskip("torchao.float8")

    def quantize(model: nn.Module) -> None:
        linears = {id(linear) for _, _, linear in layers_of(model)}
        config = float8.Float8LinearConfig(emulate=True)  # the products themselves need a card
        float8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, path: id(module) in linears
        )

    return quantize


def torchao_int8_training() -> Quantize:
    return by_torchao("torchao.prototype.quantized_training", "int8_mixed_precision_training")


TRAINED: dict[str, Callable[[], Quantize]] = {"float8": torchao_float8, "int8": torchao_int8_training}


@pytest.mark.parametrize("first", ["quantized", "scheduled"])
@pytest.mark.parametrize("name", TRAINED)
def test_training_of_quantized_layers(name: str, first: str) -> None:
    """All weights are trained, those of the quantized layers too, whose rounding draws random numbers."""
    quantize = TRAINED[name]()
    (model, batch), (twin, _) = model_and_batch(), model_and_batch()
    quantize(twin)
    if first == "quantized":
        quantize(model)
    report = schedule.optimize(model, batch, cost_guard=False)
    if first == "scheduled":
        quantize(model)
    assert report.count("rms_norm_llama") + report.count("add_rms_norm_llama") == 5
    results = []
    for each in (model, twin):
        torch.manual_seed(3)
        results.append(trained(each, batch))
    (ours, weights), (theirs, expected) = results
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-3)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        found = weights[key]
        torch.testing.assert_close(found + 0.0, value + 0.0, rtol=1e-2, atol=5e-3, msg=lambda m, k=key: f"{k}: {m}")
    assert report.active == report.count() >= 8, report.declined
