"""Modules of which one rank may compute something else than the whole model, with or without a plan for them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projections(nn.Module):
    """Two projections with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.heads = nn.Linear(16, 32), nn.Linear(32, 16), 4

    def forward(self, x: Tensor) -> Any:
        return self.down(F.relu(self.up(x)))


class ZerosOfTheSize(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h + torch.zeros(h.shape[-1]))


class ViewOfTheSize(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        sizes = list(h.shape)
        sizes[-1] //= 2
        return self.down(h.view(*sizes, 2).flatten(2))


class Heads(Projections):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        h = torch.softmax(h @ h.transpose(-1, -2), -1) @ h
        return self.down(h.transpose(1, 2).flatten(2))


class ReturnedByName(Projections):
    def forward(self, x: Tensor) -> Any:
        return {"y": self.down(F.relu(self.up(x)))}


class ScaledBySize(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h / h.shape[-1])


class ScaledByRoot(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h / math.sqrt(h.size(-1)))


class ScaledByNumberOfElements(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h / h.numel())


class ScaledByLength(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x)).transpose(0, -1)
        return self.down(h.transpose(0, -1) / len(h))


class ScaledByAttribute(Projections):
    def forward(self, x: Tensor) -> Any:
        return self.down(F.relu(self.up(x)) / self.up.out_features)


class ScaledByHeads(Projections):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        h = torch.softmax(h @ h.transpose(-1, -2) / self.heads, -1) @ h
        return self.down(h.transpose(1, 2).flatten(2))


class ScaledByText(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h * len(str(h.shape[-1] * 5)))


class ScaledByMaximum(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h * max(h.shape[-1] // 16, 1))


class ScaledByTensor(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h / torch.tensor(h.shape[-1]))


class SumOfOnes(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h + h.new_ones(h.shape[-1]).sum())


class BranchOnSize(Projections):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(torch.relu(h) if h.shape[-1] > 16 else torch.tanh(h))


class BranchOnAttribute(Projections):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(torch.relu(h) if self.up.out_features > 16 else torch.tanh(h))


class Padded(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(F.pad(h, (0, 32 - h.shape[-1])))


class SizeReturned(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return self.down(h), h.shape[-1]


class SizeReturnedByName(Projections):
    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.up(x))
        return {"y": self.down(h), "size": h.shape[-1]}


class Shelf:
    """An object that keeps tensors, and is given options by name, as the caches of transformers are."""

    def update(self, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        self.kept = key, value
        return key * options["scale"], value


class Kept(Projections):
    def forward(self, x: Tensor, shelf: Shelf) -> Any:
        h, x = shelf.update(F.relu(self.up(x)), x, {"scale": x.mean(), "shifted": False})
        return x + self.down(h)


class KeptWithSize(Projections):
    def forward(self, x: Tensor, shelf: Shelf) -> Any:
        h = F.relu(self.up(x))
        h, x = shelf.update(h, x, {"scale": x.mean(), "size": h.shape[-1]})
        return x + self.down(h)


class Own(nn.Module):
    """Parameters of its own, used in its own forward."""

    hidden = 32

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, self.hidden) / 4)
        self.down = nn.Parameter(torch.randn(32, 16) / 6)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(x @ self.up) @ self.down


class OwnTied(Own):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = self.up

    def forward(self, x: Tensor) -> Any:
        return (torch.relu(x @ self.up) * (x @ self.gate)) @ self.down


class OwnBiased(Own):
    def __init__(self) -> None:
        super().__init__()
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Any:
        flat = x.flatten(0, 1)
        h = torch.relu(torch.addmm(self.up_bias, flat, self.up))
        return torch.addmm(self.down_bias, h, self.down).unflatten(0, x.shape[:2])


class OwnFunctional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(32, 16) / 4), nn.Parameter(torch.randn(32))
        self.down, self.down_bias = nn.Parameter(torch.randn(16, 32) / 6), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Any:
        return F.linear(torch.relu(F.linear(x, self.up, self.up_bias)), self.down, self.down_bias)


class OwnPlusNumber(Own):
    def forward(self, x: Tensor) -> Any:
        return torch.relu(x @ self.up) @ self.down + 1.5


class OwnRounded(Own):
    def forward(self, x: Tensor) -> Any:
        return (torch.relu(x @ self.up) @ self.down).div(0.25, rounding_mode="floor") + x


class OwnTwice(Own):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(x @ self.up)
        return (h @ self.down) * (h @ self.down)


class OwnTimesShard(Own):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(x @ self.up)
        return ((h @ self.down).mean(-1, keepdim=True) * h) @ self.down


class OwnScaled(Own):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(x @ self.up)
        return h @ self.down / h.shape[-1]


class OwnHeads(Own):
    def forward(self, x: Tensor) -> Any:
        h = (x @ self.up).unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h).transpose(1, 2).flatten(2) @ self.down


class OwnHeadsByWidth(Own):
    def forward(self, x: Tensor) -> Any:
        h = (x @ self.up).unflatten(-1, (-1, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h).transpose(1, 2).flatten(2) @ self.down


class OwnBranch(Own):
    def forward(self, x: Tensor) -> Any:
        h = x @ self.up
        return (torch.relu(h) if h.shape[-1] > 16 else torch.tanh(h)) @ self.down


class OwnNormalized(Own):
    def forward(self, x: Tensor) -> Any:
        return torch.relu(x @ F.normalize(self.up, dim=0)) @ self.down


class OwnGated(Own):
    hidden = 64

    def forward(self, x: Tensor) -> Any:
        gate, h = (x @ self.up).chunk(2, -1)
        return (torch.relu(gate) * h) @ self.down


class OwnSplit(OwnGated):
    def forward(self, x: Tensor) -> Any:
        gate, h = (x @ self.up).split(32, -1)
        return (torch.relu(gate) * h) @ self.down


class OwnRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(x) @ self.weight


class Between(nn.Module):
    """A module between two others."""

    def __init__(self, inner: nn.Module, outer: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.inner, self.after = outer(16, 16), inner, outer(16, 16)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.inner(self.before(x)))


class Scale(nn.Module):
    """A layer that cannot be sharded over features."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


class Layer(nn.Module):
    """A layer of a chain: a norm, an MLP and the residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), Projections()
        self.positions = nn.Parameter(torch.randn(1, 16, 16))

    def forward(self, x: Tensor) -> Any:
        return x + self.mlp(self.norm(x))


class LayerOfRows(Layer):
    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        return x + self.mlp(h.view(-1, 16)).view(h.shape)


class LayerOverLength(Layer):
    def forward(self, x: Tensor) -> Any:
        return x + self.mlp(self.norm(x)) / x.shape[1]


class LayerOverRoot(Layer):
    def forward(self, x: Tensor) -> Any:
        return x + self.mlp(self.norm(x)) / math.sqrt(x.size(1))


class LayerOverElements(Layer):
    def forward(self, x: Tensor) -> Any:
        return x + self.mlp(self.norm(x)) / x.numel()


class LayerOfOnes(Layer):
    def forward(self, x: Tensor) -> Any:
        return x + self.mlp(self.norm(x)) * x.new_ones(x.shape[1]).sum()


class LayerThatBranches(Layer):
    def forward(self, x: Tensor) -> Any:
        h = self.mlp(self.norm(x))
        return x + (h if x.shape[1] > 4 else -h)


class LayerWithPositions(Layer):
    def forward(self, x: Tensor) -> Any:
        return x + self.positions[:, : x.shape[1]] + self.mlp(self.norm(x))


class Chain(nn.Module):
    """Two layers between projections."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(8, 16), nn.Sequential(layer(), layer()), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.layers(self.first(x)))
