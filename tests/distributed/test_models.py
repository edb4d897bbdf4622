"""Whole models under the planner's plan, on two and four gloo processes, against the single-device run."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    ViTConfig,
    ViTForImageClassification,
)

import fused
import schedule
from schedule.distributed import full_tensor, mixed_parameters
from schedule.distributed.planning.plan_data import Plan
from tests.distributed import launch
from tests.zoo import batch, build

LENGTH = 8
GROUPED = "falcon of 8 heads and 4"

MINIMUM = {
    **dict.fromkeys(("gpt2", "llama", "llama of 8 heads and 2", "bert", "opt", "gpt_neox", "vit"), (4, 4)),
    **dict.fromkeys(("falcon", GROUPED), (4, 4)),
    "mixtral": (4, 6),
    "t5": (10, 12),
}
"""Sums over the ranks in two layers, forward and backward: one for each attention and MLP. The keys and values of an
encoder have a gradient of their own in a decoder.

Experts make two sums backward, which is the minimum: a rank's share of their width gives a part of the gradient of
the hidden states, and a part of that of the routing weights, ``[tokens, k]``. Left as a part, the second would go on
through the router and could be summed with the first, but then the router's weight has a partial gradient, which is a
sum again; and a balancing loss adds a whole gradient to it, which would count once a rank.

With sequence parallelism the first stays an all-reduce, where a reduce-scatter would do for half of its bytes: a rank
needs the sum for its own tokens only. But in the block it is added to the router's gradient, which every rank has
whole, for all tokens, and only what comes out of that is taken apart. As many collectives, n(ranks - 1)/ranks more
bytes.
"""

QUICK = [
    (2, "gpt2", False),
    (2, "llama", True),
    (2, "mixtral", True),
    (2, GROUPED, True),
    (4, "llama", False),
]
ALL = [(ranks, name, sequence) for ranks in (2, 4) for name in MINIMUM for sequence in (False, True)]
LONG = [case for case in ALL if case not in QUICK]


def made(name: str) -> nn.Module:
    """A model in evaluation mode: no dropout."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    if name == "vit":  # fifteen patches and a token: a sequence that two and four ranks can share
        config = ViTConfig(**sizes, num_attention_heads=4, image_size=(12, 20), patch_size=4)
        return ViTForImageClassification._from_config(config, attn_implementation="eager").eval()
    few: PretrainedConfig
    if name == GROUPED:  # as Falcon-40B has them, packed by groups
        wide = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
        few = FalconConfig(**wide, num_attention_heads=8, num_kv_heads=4, new_decoder_architecture=True)
    elif name == "llama of 8 heads and 2":
        few = LlamaConfig(**sizes, vocab_size=64, num_attention_heads=8, num_key_value_heads=2)
    elif name == "mixtral":
        few = MixtralConfig(**sizes, vocab_size=64, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    else:
        return build(name).eval()
    model: nn.Module = AutoModelForCausalLM.from_config(few, attn_implementation="eager")
    return model.eval()


def given(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of two."""
    if name != "vit":
        return batch(name.partition(" ")[0], 2, LENGTH, seed=seed)
    pixels = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "labels": torch.tensor([seed % 2, 1])}


def expected(plan: Plan, model: nn.Module) -> Counter[str]:
    """The collectives of one step: those of the plan's steps and of their gradients, and no more."""
    counts: Counter[str] = Counter()
    for step in plan.syncs:
        counts.update(_MADE[step.mode, step.op.partition("->")[0]])
        biased = model.get_submodule(step.path)._parameters.get("bias") is not None
        counts["all_reduce"] += biased and step.op == "reduce_scatter"  # each rank adds it to other tokens
    counts["all_reduce"] += sum(step.replicas > 1 or step.common > 0 for step in plan.shards)
    return +counts


_MADE: dict[tuple[str, str], tuple[str, ...]] = {
    ("fwd_post", "all_reduce"): ("all_reduce",),
    ("bwd_post", "all_reduce"): ("all_reduce",),
    ("fwd_post", "all_gather"): ("all_gather",),
    ("fwd_post", "reduce_scatter"): ("reduce_scatter", "all_gather"),
    ("fwd_pre", "all_gather"): ("all_gather", "reduce_scatter"),
    ("fwd_pre", "scatter"): ("all_gather",),
    ("fwd_pre", "RSR"): ("all_gather",),
    ("fwd_post", "RSR"): ("all_gather",),
    ("fwd_post", "RRR"): ("all_gather",),
    ("fwd_post", "dtensor"): (),
}
"""Forward and backward."""


def sums(plan: Plan, model: nn.Module) -> tuple[int, int]:
    """How often layers add something up over the ranks that is no parameter, forward and backward."""
    steps = [step for group in plan.groups if not group.name.startswith("vocabulary") for step in group.syncs]
    forward = [step for step in steps if step.mode == "fwd_post" and step.op in ("all_reduce", "reduce_scatter")]
    backward = [step for step in steps if step.op in ("all_reduce", "all_gather") and step.mode != "fwd_post"]
    own = [step for step in backward if step.argument in model.get_submodule(step.path)._parameters]
    return len(forward), len(backward) - len(own)


class Counted(CommDebugMode):
    """Without its hooks on modules: autograd refuses some of what Falcon, T5 and ViT do under them."""

    observes_only = True

    def __enter__(self) -> Counted:
        super().__enter__()
        self.advanced_module_tracker.__exit__()
        return self

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)


def whole_run(model: nn.Module, name: str, steps: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], Counter[str]]:
    """Logits, gradients of the first step (gathered), collectives of that step; then ``steps`` of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    logits, gradients, counts = torch.empty(0), dict[str, torch.Tensor](), Counter[str]()
    for step in range(steps):
        optimizer.zero_grad()
        with Counted() as seen:
            output = model(**given(name, step))
            output.loss.backward()
        if step == 0:
            logits = output.logits.detach()
            counts = counted(seen)
            gradients = {n: full_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        with mixed_parameters():
            optimizer.step()
    return logits, gradients, counts


def counted(seen: CommDebugMode) -> Counter[str]:
    """How many of each kind."""
    short = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
    kinds = {str(kind).rpartition(".")[2]: count for kind, count in seen.get_comm_counts().items()}
    return +Counter({short.get(kind, kind): count for kind, count in kinds.items()})


def trained_alike(mesh: Any, name: str, sequence: bool, steps: int = 5) -> None:
    """Outputs, gradients, updates and collectives of one model."""
    model = made(name)
    twin, start = copy.deepcopy(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    sch = schedule.create_schedule(model, given(name), mesh)
    plan = sch.shard_plan(sequence=sequence)
    assert bool(plan.boundaries) == sequence and sums(plan, model) == MINIMUM[name]
    sch.apply_plan(plan)
    ours, our_gradients, counts = whole_run(model, name, steps)
    theirs, their_gradients, none = whole_run(twin, name, steps)
    assert counts == expected(plan, model) and not none, (counts, expected(plan, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert our_gradients.keys() == their_gradients.keys()
    largest = max(float(one.abs().max()) for one in their_gradients.values())
    for key, gradient in their_gradients.items():
        assert (our_gradients[key] - gradient).abs().max() <= 1e-4 * largest, key
    updates = {n: p.detach() - start[n] for n, p in twin.named_parameters()}
    for key, parameter in model.named_parameters():
        moved = full_tensor(parameter.detach()) - start[key]
        if their_gradients[key].abs().max() > 1e-4 * largest:  # below, AdamW divides rounding by rounding
            assert (moved - updates[key]).norm() <= 2e-2 * updates[key].norm(), key


def _name(ranks: int, name: str, sequence: bool) -> str:
    return f"{name}{' in sequence' if sequence else ''}, {ranks} ranks"


def _cases(chosen: list[tuple[int, str, bool]]) -> Any:
    return pytest.mark.parametrize(("ranks", "name", "sequence"), chosen, ids=[_name(*case) for case in chosen])


def loss_of_shared_logits(mesh: Any) -> None:
    """Nothing as large as the logits is sent: they stay a DTensor, of which the loss needs three numbers a token."""
    for name in ("gpt2", "llama"):
        model = made(name)
        twin = copy.deepcopy(model)
        sch = schedule.create_schedule(model, given(name), mesh)
        plan = sch.shard_plan(parallel_loss=True)
        sch.apply_plan(plan)
        with loss_parallel(), Counted() as seen:
            ours = model(**given(name))
            ours.loss.backward()
        theirs = twin(**given(name))
        theirs.loss.backward()
        sent = counted(seen)
        assert set(sent) == {"all_reduce"} and sent["all_reduce"] <= expected(plan, model)["all_reduce"] + 3
        assert isinstance(ours.logits, DTensor) and ours.logits.to_local().shape[-1] == 32
        torch.testing.assert_close(full_tensor(ours.loss), theirs.loss)
        torch.testing.assert_close(full_tensor(ours.logits), theirs.logits, rtol=1e-4, atol=1e-5)
        for key, parameter in twin.named_parameters():
            own = full_tensor(dict(model.named_parameters())[key].grad)
            torch.testing.assert_close(own, parameter.grad, rtol=1e-3, atol=1e-6, msg=f"{name}: {key}")
        labels = given(name)["labels"]
        with Counted() as seen:
            rows = fused.cross_entropy(ours.logits.detach()[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(full_tensor(rows), theirs.loss.detach())
        assert "all_gather" not in counted(seen)


def test_loss_of_shared_logits() -> None:
    launch.passes(loss_of_shared_logits)


@pytest.mark.one_in(2)
@_cases(QUICK)
def test_models(ranks: int, name: str, sequence: bool) -> None:
    launch.passes(partial(trained_alike, name=name, sequence=sequence), ranks)


@pytest.mark.slow
@_cases(LONG)
def test_more_models(ranks: int, name: str, sequence: bool) -> None:
    launch.passes(partial(trained_alike, name=name, sequence=sequence), ranks)
