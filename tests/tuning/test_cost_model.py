"""The modeled step: its parts against figures worked out by hand, and the split that ``tune`` finds by it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import schedule
from benchmarks.ranks import sent
from schedule import NotApplicable
from schedule.api.simulate import simulate
from schedule.tuning import Machine, Mixture, ModeledStep, Network, Shape
from schedule.tuning.cost_model import expert_bytes, peak_bytes, step_time
from tests.tuning.synthetic import plan_nothing

SMALL = Shape(parameters=7_000_000_000, layers=32, hidden=4096, heads=32)
FAST = Machine(peak=1e15, reached=1.0, inside=Network(0.0, 1e30), between=Network(0.0, 1e30))
"""Where messages take no time."""


def test_products_are_counted() -> None:
    time = step_time(SMALL, FAST, 4096, tokens=1_000)
    assert time.seconds() == pytest.approx((6 * 7e9 + 12 * 32 * 4096 * 4096) * 1_000 / 1e15)
    again = step_time(SMALL, FAST, 4096, tokens=1_000, recomputed=True)
    assert again.seconds() == pytest.approx(4 / 3 * time.seconds()), "one more forward pass of three"
    assert step_time(SMALL, FAST, 4096, 1_000, tensor=4).seconds() == pytest.approx(time.seconds() / 4)


def test_a_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    whole = step_time(SMALL, FAST, 4096, 8_000).seconds()
    for stages, parts in ((2, 1), (4, 8)):
        staged = step_time(SMALL, FAST, 4096, 8_000, stages=stages, parts=parts).seconds()
        assert staged == pytest.approx(whole / stages * (parts + stages - 1) / parts, rel=1e-6)


def test_messages_take_the_network_that_they_need() -> None:
    machine = Machine(peak=1e30, inside=Network(1e-3, 1e30), between=Network(1.0, 1e30), node=8)
    layers = 32
    assert step_time(SMALL, machine, 1, 1, tensor=8).tensor == pytest.approx(4 * layers * 2 * 7 * 1e-3)
    assert step_time(SMALL, machine, 1, 1, tensor=16).tensor == pytest.approx(4 * layers * 2 * 15 * 1.0)
    recomputed = step_time(SMALL, machine, 1, 1, tensor=8, recomputed=True)
    assert recomputed.tensor == pytest.approx(6 * layers * 2 * 7 * 1e-3)
    parts = step_time(SMALL, machine, 1, 4, stages=2, parts=4)
    assert parts.stages == pytest.approx(5 * 2 * 1e-3), "five slots, a message each way"
    assert step_time(SMALL, machine, 1, 1, data=4).data == pytest.approx(6.0)


def test_memory_is_of_the_fullest_device() -> None:
    tokens, hidden, layers = 1_000, 4096, 32
    states = 16 * 7 * 10**9
    assert peak_bytes(SMALL, tokens) == states + 34 * tokens * hidden * layers
    assert peak_bytes(SMALL, tokens, tensor=8) == states // 8 + 13 * tokens * hidden * layers
    staged = peak_bytes(SMALL, tokens, stages=4, parts=16)
    assert staged == states // 4 + 34 * tokens * hidden * layers, "four micro-batches of a quarter of the layers"
    assert peak_bytes(SMALL, tokens, recomputed=True) == states + (2 * layers + 34) * tokens * hidden


def test_the_shape_of_a_model_is_read_from_its_config() -> None:
    config = hf.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, vocab_size=100
    )
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert Shape.of(model) == Shape(parameters, layers=3, hidden=64, heads=2)
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=8))
    assert Shape.of(gpt2) == Shape(sum(p.numel() for p in gpt2.parameters()), 2, 32, 4)
    with pytest.raises(NotApplicable, match="num_hidden_layers"):
        Shape.of(nn.Linear(2, 2))


SPACE: dict[str, Any] = {"split": schedule.splits(16), "micro_batch": [1, 2, 4], "recomputed": [False, True]}


@pytest.mark.parametrize("bound", [20 * 10**9, 40 * 10**9, 80 * 10**9])
def test_the_split_that_is_found_is_the_best_of_all(bound: int) -> None:
    cost = ModeledStep(SMALL, devices=16, rows=64, sequence=4096)
    tuning = schedule.tune(
        nn.Linear(1, 1), plan_nothing, SPACE, torch.ones(1, 1), memory=bound, trials=40, cost=cost, progress=False
    )
    fitting: dict[tuple[Any, ...], float] = {}
    for point in itertools.product(SPACE["split"].values, SPACE["micro_batch"], SPACE["recomputed"]):
        try:
            found = cost(None, *point)  # type: ignore[arg-type]
        except NotApplicable:
            continue
        if found.memory is not None and found.memory <= bound:
            fitting[point] = found.time
    assert tuple(tuning.best.knobs.values()) == min(fitting, key=fitting.__getitem__)


def test_what_does_not_share_out_is_recorded() -> None:
    cost = ModeledStep(Shape(10**9, layers=6, hidden=512, heads=4), devices=8, rows=8, sequence=128)
    tuning = schedule.tune(
        nn.Linear(1, 1),
        plan_nothing,
        {"split": schedule.splits(8), "micro_batch": [1, 16]},
        torch.ones(1, 1),
        trials=100,
        cost=cost,
        progress=False,
    )
    reasons = " ".join(trial.reason for trial in tuning.select("failed"))
    for said in ("4 heads cannot be split evenly into 8", "6 layers cannot be split evenly into 4", "8 rows cannot be"):
        assert said in reasons
    with pytest.raises(NotApplicable, match="8 devices cannot be split evenly into 3"):
        cost(None, (3, 1))  # type: ignore[arg-type]


MIXED = Shape(7 * 10**9, layers=32, hidden=4096, heads=32, mixture=Mixture(6 * 10**9, layers=16, experts=8, chosen=2))


def test_experts_compute_with_their_tokens_only() -> None:
    time = step_time(MIXED, FAST, 1, tokens=1_000)
    assert time.compute == pytest.approx((6 * (1e9 + 6e9 / 4) + 12 * 32 * 4096) * 1_000 / 1e15)


def test_spread_experts_cost_messages_and_save_memory() -> None:
    machine = Machine(peak=1e30, inside=Network(1e-3, 1e30), between=Network(1.0, 1e30), node=8)
    whole = step_time(MIXED, machine, 1, 1, data=4)
    spread = step_time(MIXED, machine, 1, 1, data=4, experts=4)
    assert (whole.experts, whole.tensor) == (0.0, 0.0)
    assert spread.experts == pytest.approx(16 * 5 * 3e-3), "three all-to-alls forward, two backward"
    assert spread.data == pytest.approx(6.0), "of all but the experts, which no other group has"
    assert step_time(MIXED, machine, 1, 1, data=8, experts=4).data == pytest.approx(14.0 + 2.0)
    beside = step_time(MIXED, machine, 1, 1, tensor=2, data=4, experts=4)
    assert beside.tensor == pytest.approx((4 * 32 - 16) * 2 * 1e-3), "two all-gathers cost one all-reduce"
    assert beside.experts == pytest.approx(16 * 5 * 7e-3)
    wide = Machine(peak=1e30, inside=Network(0.0, 1e9), node=8)
    seconds = step_time(MIXED, wide, 1, 1_000, data=4, experts=4).experts
    assert seconds == pytest.approx(16 * (4 * 2 * 2 * 1_000 * 4096 + 8 * 8) * 3 / 4 / 1e9)
    assert peak_bytes(MIXED, 0, experts=4) == 16 * (10**9 + 6 * 10**9 // 4)
    assert peak_bytes(MIXED, 0, tensor=2, experts=4) == 16 * (10**9 // 2 + 6 * 10**9 // 8)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_spread_experts(ranks: int) -> None:
    """As many as simulated ranks send that have the same tokens, the same number of them for each expert."""
    module = experts(count=4, hidden=64)
    index = torch.arange(32)[:, None] % 4
    tokens, weights = torch.randn(32, 64, requires_grad=True), torch.rand(32, 2, requires_grad=True)
    batch = (tokens, torch.cat((index, (index + 1) % 4), 1), weights)
    seen = simulate(module, batch, lambda sch: sch.shard_experts(), ranks)
    assert seen.equal()
    sizes = sum(parameter.numel() for parameter in module.parameters())
    shape = Shape(sizes, layers=1, hidden=64, heads=1, mixture=Mixture(sizes, layers=1, experts=4, chosen=2))
    exchanged, gathered = expert_bytes(shape, tokens=32, experts=1, tensor=ranks, number=4)
    collectives = [*seen.forward, *seen.backward]
    assert exchanged == sent([one for one in collectives if one.op == "all_to_all"], ranks)
    assert exchanged + gathered == pytest.approx(sent(collectives, ranks), rel=0.05)


def experts(count: int, hidden: int) -> nn.Module:
    """Experts of Mixtral."""
    config = hf.MixtralConfig(hidden_size=hidden, intermediate_size=16, num_local_experts=count)
    config._experts_implementation = "eager"
    module: nn.Module = MixtralExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


def test_bytes_of_experts_by_micro_batches_and_stages() -> None:
    """The numbers of tokens are told in each micro-batch and each forward pass; a stage has its own layers."""
    once = expert_bytes(MIXED, 1_000, experts=2, tensor=2)
    pairs, counts = 4 * 2 * 1_000 * 4096 * 2 / 2, 8 * 8
    assert once == pytest.approx((16 * (pairs + counts) * 3 / 4, 16 * 2 * 2 * 1_000 * 4096 / 2))
    again = expert_bytes(MIXED, 1_000, experts=2, tensor=2, stages=4, parts=5, recomputed=True)
    assert again == pytest.approx((4 * (1.5 * pairs + 2 * 5 * counts) * 3 / 4, once[1] * 1.5 / 4))


def test_what_cannot_be_spread() -> None:
    cost = ModeledStep(MIXED, devices=8, rows=8, sequence=128)
    sch: Any = None
    assert cost(sch, experts=8).memory < cost(sch).memory
    with pytest.raises(NotApplicable, match="2 data-parallel groups cannot be split evenly into 4"):
        cost(sch, split=(4, 1), experts=4)
    with pytest.raises(NotApplicable, match="8 experts cannot be split evenly into 16"):
        ModeledStep(MIXED, devices=16, rows=16, sequence=128)(sch, experts=16)
    with pytest.raises(NotApplicable, match="1 experts cannot be split evenly into 2"):
        ModeledStep(SMALL, devices=8, rows=8, sequence=128)(sch, experts=2)


def test_experts_of_models() -> None:
    config = hf.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_local_experts=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.MixtralForCausalLM(config)
    assert Shape.of(model).mixture == Mixture(3 * 4 * 3 * 16 * 24, layers=3, experts=4, chosen=2)
