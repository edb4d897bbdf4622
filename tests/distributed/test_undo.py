"""A shard can be taken back, to the bit, and one that fails leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule.core import history
from schedule.distributed import full_tensor
from tests.distributed import launch
from tests.distributed.blocks import Gated, Mlp, compare, gpt2_block, scheduled, shard_attention, shard_gated, shard_mlp

KINDS: tuple[tuple[Any, Any, int], ...] = (
    (Mlp, shard_mlp, 16),
    (Gated, shard_gated, 16),
    (lambda: gpt2_block("attn"), shard_attention, 32),
)


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Classes, attributes, hooks, parameters (which object, which values) and random state."""
    seen: dict[str, Any] = {"random": torch.get_rng_state().tolist()}
    for path, child in module.named_modules():
        seen[f"{path} class"] = type(child)
        plain = {name: value for name, value in vars(child).items() if isinstance(value, (int, float, str, type(None)))}
        seen[f"{path} attributes"] = plain
        seen[f"{path} names"] = sorted(vars(child))
        seen[f"{path} hooks"] = len(child._load_state_dict_pre_hooks)
        for name, parameter in child._parameters.items():
            if parameter is not None:
                values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                seen[f"{path}.{name}"] = (id(parameter), values.tolist(), parameter.requires_grad)
    return seen


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    assert not different, {name: (ours.get(name), theirs.get(name)) for name in different[:3]}


def undone(mesh: Any) -> None:
    for make, apply, width in KINDS:
        block = make()
        before = fingerprint(block)
        sch, twin = scheduled(block, mesh, apply, width)
        after = fingerprint(block)
        while sch.history:
            sch.undo()
        same(fingerprint(block), before)
        compare(block, twin, width, shapes=((2, 5),))
        block.zero_grad()
        block.train()
        while sch.tree.history._undone:
            sch.redo()
        same(fingerprint(block), after)
        compare(block, twin, width, shapes=((2, 5),))


def undone_after_training(mesh: Any) -> None:
    """What the shards learned stays."""
    sch, twin = scheduled(Mlp(), mesh, shard_mlp, 16)
    twin_weight = twin.fc1.weight.detach().clone()
    with torch.no_grad():
        for parameter in sch.module.parameters():
            parameter.mul_(2.0)
    while sch.history:
        sch.undo()
    assert torch.equal(sch.module.fc1.weight, twin_weight * 2)


def gradients_follow(mesh: Any) -> None:
    block = Mlp()
    block(torch.randn(2, 3, 16)).sum().backward()
    gradient = block.fc1.weight.grad.clone()
    sch = schedule.create_schedule(block, batch=torch.randn(2, 5, 16), mesh=mesh)
    sch["fc1"].shard("weight", axis=0)
    assert torch.equal(full_tensor(block.fc1.weight.grad), gradient)
    sch.undo()
    assert torch.equal(block.fc1.weight.grad, gradient)


def faults(mesh: Any) -> None:
    """An error at any point inside shard and sync leaves everything as it was."""

    class Fault(Exception):
        pass

    steps = (
        lambda sch: sch["c_attn"].shard("weight", axis=1, parts=3),
        lambda sch: sch["c_attn"].shard("bias", axis=0, parts=3),
        lambda sch: sch["c_attn"].sync("bwd_post", "all_reduce"),
        lambda sch: sch["c_proj"].shard("weight", axis=0),
        lambda sch: sch["c_proj"].sync("fwd_post", "all_reduce"),
    )
    block = gpt2_block("attn")
    sch = schedule.create_schedule(block, batch=torch.randn(2, 5, 32), mesh=mesh)
    _ = sch.tree.graphs.recording
    original = history.reached
    for step in steps:
        before, points = fingerprint(block), [0]

        def counting(point: str, points: list[int] = points) -> None:
            points[0] += 1

        history.reached = counting
        step(sch)
        sch.undo()
        total = points[0]
        assert total >= 6 and fingerprint(block) == before
        for at in range(1, total + 1):
            points[0] = 0

            def failing(point: str, points: list[int] = points, at: int = at) -> None:
                points[0] += 1
                if points[0] == at:
                    raise Fault(point)

            history.reached = failing
            with pytest.raises(Fault):
                step(sch)
            assert fingerprint(block) == before, at
        history.reached = original
        step(sch)


def undo_of_fuse_and_shard(mesh: Any) -> None:
    block = Mlp()
    before = fingerprint(block)
    sch, twin = scheduled(block, mesh, shard_mlp, 16)
    sharded = fingerprint(block)
    sch.fuse(sch.find(lambda x, bias: nn.functional.gelu(x + bias), expect=1))
    sch.undo()
    assert fingerprint(block) == sharded
    while sch.history:
        sch.undo()
    assert fingerprint(block) == before
    sch.fuse(sch.find(lambda x, bias: nn.functional.gelu(x + bias), expect=1))
    compare(block, twin, 16, shapes=((2, 5),))


CASES = [undone, undone_after_training, gradients_follow, faults, undo_of_fuse_and_shard]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    launch.passes(case)
