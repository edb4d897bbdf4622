"""Attention weights of models scheduled with ``rules="attention"``: whoever asks for them later gets them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import states_in
from tests.zoo import batch, build

pytestmark = pytest.mark.filterwarnings("ignore")
ARCHITECTURES = ("gpt2", "llama", "bert", "t5")
RULES = ("attention", "all")
Ask = Callable[[str, nn.Module], Any]


def in_a_call(name: str, model: nn.Module) -> Any:
    return [*attentions(model(**batch(name), output_attentions=True))]


def in_the_config(name: str, model: nn.Module) -> Any:
    for module in model.modules():  # an encoder has a config of its own
        if hasattr(module, "config"):
            module.config.output_attentions = True
    return [*attentions(model(**batch(name)))]


def attentions(output: Any) -> tuple[Tensor, ...]:
    found = getattr(output, "attentions", None)
    return output.encoder_attentions + output.decoder_attentions + output.cross_attentions if found is None else found


def in_generate(name: str, model: nn.Module) -> Any:
    if not model.can_generate():
        pytest.skip("it generates nothing")
    found = model.generate(
        batch(name)["input_ids"],
        max_new_tokens=3,
        do_sample=False,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    return found.attentions if hasattr(found, "attentions") else (found.encoder_attentions, found.decoder_attentions)


def in_a_hook(name: str, model: nn.Module, keep: Callable[[Tensor], Any] = Tensor.clone) -> Any:
    seen: list[Any] = []
    for module in attention_modules(model):
        module.register_forward_hook(lambda module, args, output: seen.append(keep(output[1])))
    model(**batch(name))
    return seen


def kept_by_a_hook(name: str, model: nn.Module) -> Any:
    return in_a_hook(name, model, lambda weights: weights)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The innermost modules called attention, as all four architectures do."""
    names = ("GPT2Attention", "LlamaAttention", "BertSelfAttention", "T5Attention")
    return [module for module in model.modules() if type(module).__name__ in names]


ASKS: dict[str, Ask] = {
    "call": in_a_call,
    "config": in_the_config,
    "generate": in_generate,
    "hook": in_a_hook,
    "kept by a hook": kept_by_a_hook,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_those_of_the_original(name: str, rules: str, ask: str, training: bool) -> None:
    model, twin = build(name), build(name)
    report = schedule.optimize(model, batch(name), rules=rules, cost_guard=False)
    assert report.applied["sdpa_without_weights"]
    found = []
    for each in (model, twin):
        torch.manual_seed(0)
        found.append(ASKS[ask](name, each.train(training)))
    ours, theirs = found
    assert theirs
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_loss_of_the_weights_has_its_gradient() -> None:
    gradients = []
    for scheduled in (True, False):
        model = build("llama")
        if scheduled:
            schedule.optimize(model, batch("llama"), rules="attention", cost_guard=False)
        output = model(**batch("llama"), output_attentions=True)
        entropy = sum((weights * weights.clamp_min(1e-9).log()).sum() for weights in output.attentions)
        (output.loss + 0.1 * entropy).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_adapts_to_other_kinds_of_calls(name: str) -> None:
    """To a padding mask, to autocast and to bfloat16, with its rewrites where they mean the same."""
    model, twin = build(name).eval(), build(name).eval()
    given = {key: value for key, value in batch(name).items() if key not in ("attention_mask", "labels")}
    if name == "t5":
        given["decoder_input_ids"] = given["input_ids"]
    schedule.optimize(model, given, rules="attention", cost_guard=False)
    mask = torch.ones_like(given["input_ids"])
    mask[0, -2:] = 0
    autocast = torch.autocast("cpu", torch.bfloat16)
    for dtype, around, added in (
        (torch.float32, nullcontext(), {}),
        (torch.float32, nullcontext(), {"attention_mask": mask}),
        (torch.float32, autocast, {}),
        (torch.float32, autocast, {"attention_mask": mask}),
        (torch.bfloat16, nullcontext(), {}),
        (torch.bfloat16, nullcontext(), {"attention_mask": mask}),
    ):
        with around, torch.no_grad():
            ours, theirs = (each.to(dtype)(**given, **added) for each in (model, twin))
        close = 5e-2 if dtype is torch.bfloat16 or around is autocast else 1e-4
        torch.testing.assert_close(ours[0].float(), theirs[0].float(), rtol=close, atol=close)
    states = [state for module in attention_modules(model) for state in states_in(module)]
    assert sum(state.fallbacks for state in states_in(model)) == 0
    summaries = [made.summary for state in states for made in state.adaptations]
    assert any("bfloat16" in each and "sdpa_without_weights" in each for each in summaries)
