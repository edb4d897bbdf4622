"""A small transformer of our own, with what primitives are about: biases, dropout, parallel projections, ties."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Attention of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.q(hidden), self.k(hidden), self.v(hidden)
        scores = query @ key.transpose(-1, -2) * 0.25
        if mask is not None:
            scores = scores + mask
        return self.out(self.dropout(F.softmax(scores, dim=-1)) @ value)


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc10 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc10(self.act(self.fc1(hidden)))


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), Attention(width), Mlp(width)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden + self.attn(self.norm(hidden), mask=mask)
        return hidden + self.mlp(hidden)


class Branching(nn.Module):
    """Its forward depends on data, which no graph can hold."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.detach().numpy().sum() > 0:
            return hidden * 1.0
        return hidden


class Small(nn.Module):
    """Embedding, blocks, a module that cannot be traced, and a head tied to the embedding."""

    def __init__(self, depth: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.branching = Branching()
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.branching(hidden))


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The pattern of most tests."""
    return F.gelu(x + bias, approximate="tanh")


def small(depth: int = 2) -> Small:
    """The model, seeded."""
    torch.manual_seed(0)
    return Small(depth)


def ids(rows: int = 2, length: int = 5) -> dict[str, torch.Tensor]:
    """A batch for it."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return {"ids": torch.randint(0, 32, (rows, length), generator=generator)}
