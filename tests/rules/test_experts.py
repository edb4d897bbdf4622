"""Mixtures of experts as transformers writes them: the activation between the experts' products is one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import fused
import schedule
import schedule.runtime.scheduled
from fused.gated import gated_halves

_SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
)
_ROUTED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
_LATENT = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
_DEEPSEEK = dict(
    _SIZES,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    n_shared_experts=1,
)

CONFIGS: dict[str, tuple[Callable[[], Any], int]] = {
    "mixtral": (lambda: hf.MixtralConfig(**_SIZES, num_local_experts=4), 2),
    "qwen3_moe": (lambda: hf.Qwen3MoeConfig(**_SIZES, **_ROUTED, head_dim=8), 2),
    # one dense layer; then the routed experts and the shared one
    "deepseek_v3": (
        lambda: hf.DeepseekV3Config(**_DEEPSEEK, **_LATENT, n_group=1, topk_group=1, first_k_dense_replace=1),
        3,
    ),
}


def build(name: str, implementation: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = CONFIGS[name][0]()
    model = hf.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation=implementation
    )
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    return model, dict(input_ids=ids, labels=ids)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_is_rewritten(name: str, implementation: str) -> None:
    model, inputs = build(name, implementation)
    sch = schedule.create_schedule(model, inputs)
    with fused.backend("reference"):
        report = sch.optimize(rules="gated_mlp", cost_guard=False)
        assert report.applied == {"gated_silu": CONFIGS[name][1]}
        schedule.verify(sch, inputs, steps=1)
    packed = [n for m in model.modules() for n in _nodes(m) if n.target in (fused.swiglu, gated_halves)]
    assert len(packed) == sum(type(m).__name__.endswith("Experts") for m in model.modules())


@pytest.mark.filterwarnings("error::schedule.FallbackWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_padding_mask_is_adapted_to(name: str) -> None:
    model, inputs = build(name, "grouped_mm")
    twin, mask = copy.deepcopy(model), torch.ones_like(inputs["input_ids"])
    mask[0, :3] = 0
    assert schedule.optimize(model, inputs, rules="memory", cost_guard=False).applied
    for training in (True, False):
        for rows in (2, 1):
            given = {key: value[:rows] for key, value in (inputs | {"attention_mask": mask}).items()}
            ours, theirs = (each.train(training)(**given) for each in (model, twin))
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)


def _nodes(module: nn.Module) -> list[Any]:
    state = schedule.runtime.state_of(module)
    return list(state.specializations[0].graph.nodes) if state is not None else []


@pytest.mark.filterwarnings("ignore")
def test_a_loop_over_the_experts_that_were_hit_has_a_graph_for_each_number_of_them() -> None:
    model, inputs = build("mixtral", "eager")
    twin = copy.deepcopy(model)
    with fused.backend("reference"):
        report = schedule.optimize(model, inputs, rules="gated_mlp", cost_guard=False)
        assert report.count("gated_silu") == 2 * 4, "two layers, four experts, all of them hit"
        states = [s for m in model.modules() if (s := schedule.runtime.state_of(m)) is not None]
        for ids, adapted in ((torch.arange(3, 59).view(2, 28), False), (torch.tensor([[5]]), True)):
            ours, theirs = (each(input_ids=ids, labels=ids) for each in (model, twin))
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
            assert not any(state.fallbacks for state in states)
            assert any(state.adaptations for state in states) is adapted


class Experts(nn.Module):
    """Packed projections of all experts; ``read`` takes them apart."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.packed, self.read = nn.Parameter(torch.randn(3, 8, 16) * 0.3), read

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read(torch.bmm(tokens, self.packed))


def _clamped(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=1.0)) * up


READS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "halves": (lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1], 1),
    "every second": (lambda y: F.silu(y[..., ::2]) * y[..., 1::2], 1),
    "clamped": (_clamped, 1),
    "halves of the tokens": (lambda y: F.silu(y.chunk(2, 1)[0]) * y.chunk(2, 1)[1], 1),
    "one half alone": (lambda y: F.silu(y[..., :8]) * 2, 0),
    "scaled": (lambda y: F.silu(y.chunk(2, -1)[0]) * (y.chunk(2, -1)[1] + 1), 1),
}


@pytest.mark.parametrize("name", READS)
def test_packed_experts(name: str) -> None:
    """However they are packed, with tokens for every expert and without any."""
    read, places = READS[name]
    module = Experts(read)
    twin, tokens = copy.deepcopy(module), torch.randn(3, 4, 8)
    with fused.backend("reference"):
        assert schedule.optimize(module, tokens, rules="gated_mlp", cost_guard=False).count("gated_silu") == places
        for count in (4, 6, 0):
            given = [torch.randn(3, count, 8).requires_grad_() for _ in range(2)]
            given[1].data.copy_(given[0])
            outputs = [each(x) for each, x in zip((module, twin), given, strict=True)]
            torch.testing.assert_close(*outputs)
            for output in outputs:
                output.square().sum().backward()
            torch.testing.assert_close(given[0].grad, given[1].grad)
    torch.testing.assert_close(module.packed.grad, twin.packed.grad)
