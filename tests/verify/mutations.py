"""Ways to get a block wrong; each must be caught."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .models import Block


class WrongScale(Block):
    def scale(self) -> float:
        return super().scale() * 1.25


class MissingBias(Block):
    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, self.up.weight), approximate="tanh")


class ErfForTanh(Block):
    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x))


class SwappedQueryAndKey(Block):
    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return super().scores(x).transpose(-1, -2)


class MaskDropped(Block):
    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        return scores


class DropoutSkipped(Block):
    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return x


class DropoutUnseeded(Block):
    """Draws a mask of its own: right on average, and different from eager under one seed."""

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.rand(1)
        return super().drop(x)


class DropoutInEval(Block):
    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.p, True)


class DetachedGradient(Block):
    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return super().scores(x.detach())


class FrozenWeight(Block):
    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, self.up.weight.detach(), self.up.bias), approximate="tanh")


class StaleWeight(Block):
    """Forward from a copy taken at the first call, gradient to the original: equal until a step is taken."""

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cached"):
            object.__setattr__(self, "cached", self.up.weight.detach().clone())
        weight = self.cached + (self.up.weight - self.up.weight.detach())
        return F.gelu(F.linear(x, weight, self.up.bias), approximate="tanh")


class BakedLength(Block):
    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, torch.finfo(scores.dtype).min)


class HalvedInputGradient(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.5 + x.detach() * 0.5)


class OtherStructure(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x),)  # type: ignore[return-value]


MUTATIONS: dict[type[Block], str] = {
    WrongScale: "gradient",
    MissingBias: "gradient up.bias: is None",
    ErfForTanh: "perturbed weights",
    SwappedQueryAndKey: "gradient",
    MaskDropped: "gradient",
    DropoutSkipped: "train mode",
    DropoutUnseeded: "random state cpu",
    DropoutInEval: "eval mode",
    DetachedGradient: "gradient",
    FrozenWeight: "gradient up.weight: is None",
    StaleWeight: "output after training",
    BakedLength: "RuntimeError",
    HalvedInputGradient: "input gradient",
    OtherStructure: "returns tuple",
}


def frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def mutated(model: Block, mutation: type[Block]) -> Block:
    model.__class__ = mutation
    return model


Mutation = Callable[[nn.Module], None]
