"""Blocks to shard, their schedules, and the comparison with a twin that stays whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import schedule
from schedule.distributed import full_tensor
from tests.zoo import build

SHAPES = ((2, 5), (3, 7), (1, 4))


class Mlp(nn.Module):
    """Linear, GELU, Linear, as OPT and many others have it."""

    def __init__(self, width: int = 16, hidden: int = 32, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] → the same."""
        result: Tensor = self.fc2(self.act(self.fc1(x)))
        return result


class Gated(nn.Module):
    """Llama's MLP."""

    def __init__(self, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] → the same."""
        result: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


def gpt2_block(part: str) -> nn.Module:
    """``mlp`` or ``attn`` of a small GPT-2, without dropout, with biases that are not zero."""
    model = build("gpt2")
    block: nn.Module = model.get_submodule(f"transformer.h.0.{part}")
    for module in block.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    return block


def shard_mlp(sch: Any, first: str = "fc1", second: str = "fc2", column: int = 0, bias: bool = True) -> None:
    """Column-parallel, then row-parallel; ``column`` is the axis of the outputs in a weight."""
    sch[first].shard("weight", axis=column)
    if bias:
        sch[first].shard("bias", axis=0)
    sch[first].sync("bwd_post", "all_reduce")
    sch[second].shard("weight", axis=1 - column)
    sch[second].sync("fwd_post", "all_reduce")


def shard_gated(sch: Any) -> None:
    """Llama's: two column-parallel modules share one reduction of the input's gradient."""
    sch["gate"].shard("weight", axis=0)
    sch["up"].shard("weight", axis=0)
    sch.sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1)
    sch["down"].sync("fwd_post", "all_reduce")


def shard_attention(sch: Any) -> None:
    """GPT-2's: packed q, k and v by heads, then the projection by its inputs."""
    sch["c_attn"].shard("weight", axis=1, parts=3)
    sch["c_attn"].shard("bias", axis=0, parts=3)
    sch["c_attn"].sync("bwd_post", "all_reduce")
    sch["c_proj"].shard("weight", axis=0)
    sch["c_proj"].sync("fwd_post", "all_reduce")


def scheduled(block: nn.Module, mesh: Any, apply: Callable[[Any], None], width: int) -> tuple[Any, nn.Module]:
    """A schedule of ``block`` with ``apply`` done, and the whole twin."""
    twin = copy.deepcopy(block)
    example = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
    sch = schedule.create_schedule(block, batch=example, mesh=mesh)
    apply(sch)
    return sch, twin


def observed(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output, gradient of the input, gradients of all parameters, gathered where they are sharded."""
    x = x.clone().requires_grad_()
    block.zero_grad()
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    seen = {"output": y.detach(), "input gradient": x.grad}
    seen |= {name: full_tensor(p.grad) for name, p in block.named_parameters() if p.grad is not None}
    return {name: tensor for name, tensor in seen.items() if tensor is not None}


def compare(block: nn.Module, twin: nn.Module, width: int, shapes: Any = SHAPES) -> None:
    """Raise unless both compute the same, in train and eval mode, at all shapes."""
    for training in (True, False):
        block.train(training)
        twin.train(training)
        for rows, length in shapes:
            x = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(rows))
            ours, theirs = observed(block, x), observed(twin, x)
            assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
            for name in theirs:
                torch.testing.assert_close(
                    ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )
