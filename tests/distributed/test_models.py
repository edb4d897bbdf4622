"""Whole models under the planner's plan, on two and four gloo processes, against the single-device run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import schedule
from schedule.distributed import full_tensor, mixed_parameters
from tests.distributed import launch
from tests.zoo import batch, build

LENGTH = 8


def whole_run(model: nn.Module, name: str, steps: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Logits, gradients of the first step (gathered), collectives of that step; then ``steps`` of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    logits, gradients, count = torch.empty(0), dict[str, torch.Tensor](), 0
    for step in range(steps):
        given = batch(name, 2, LENGTH, seed=step)
        optimizer.zero_grad()
        with CommDebugMode() as seen:
            output = model(**given)
            output.loss.backward()
        if step == 0:
            logits, count = output.logits.detach(), int(seen.get_total_counts())
            gradients = {n: full_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        with mixed_parameters():
            optimizer.step()
    return logits, gradients, count


def trained_alike(name: str, mesh: Any, sequence: bool, steps: int = 5) -> None:
    model = build(name).eval()
    twin, start = copy.deepcopy(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    sch = schedule.create_schedule(model, batch(name, 2, LENGTH), mesh)
    plan = sch.shard_plan(sequence=sequence)
    assert bool(plan.boundaries) == sequence
    sch.apply_plan(plan)
    ours, our_gradients, count = whole_run(model, name, steps)
    theirs, their_gradients, none = whole_run(twin, name, steps)
    assert count >= len(plan.syncs) and not none
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


def gpt2(mesh: Any) -> None:
    trained_alike("gpt2", mesh, False)


def llama_in_sequence(mesh: Any) -> None:
    trained_alike("llama", mesh, True)


def bert(mesh: Any) -> None:
    trained_alike("bert", mesh, False)


def t5(mesh: Any) -> None:
    trained_alike("t5", mesh, False)


def vit(mesh: Any) -> None:
    trained_alike("vit", mesh, False)


def falcon(mesh: Any) -> None:
    trained_alike("falcon", mesh, False)


def gpt_neox(mesh: Any) -> None:
    trained_alike("gpt_neox", mesh, False)


def opt(mesh: Any) -> None:
    trained_alike("opt", mesh, False)


def gpt2_in_sequence(mesh: Any) -> None:
    trained_alike("gpt2", mesh, True)


def bert_in_sequence(mesh: Any) -> None:
    trained_alike("bert", mesh, True)


def opt_in_sequence(mesh: Any) -> None:
    trained_alike("opt", mesh, True)


def gpt_neox_in_sequence(mesh: Any) -> None:
    trained_alike("gpt_neox", mesh, True)


def t5_in_sequence(mesh: Any) -> None:
    trained_alike("t5", mesh, True)


def llama(mesh: Any) -> None:
    """On four ranks two after one another have the same key-value head."""
    trained_alike("llama", mesh, False)


QUICK = [gpt2, llama_in_sequence]
SLOW = [
    bert, t5, vit, falcon, gpt_neox, opt,
    gpt2_in_sequence, bert_in_sequence, opt_in_sequence, gpt_neox_in_sequence, t5_in_sequence,
]  # fmt: skip


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    launch.passes(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.__name__)
def test_more_on_two_ranks(case: Any) -> None:
    launch.passes(case)


def test_four_ranks() -> None:
    launch.passes(llama, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [gpt2, llama_in_sequence, t5], ids=lambda case: case.__name__)
def test_more_on_four_ranks(case: Any) -> None:
    launch.passes(case, 4)
