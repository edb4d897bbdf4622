"""Layers that look at their own parameters, buffers, children and flags: loaded twice, once a world."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


class Stack(nn.Module):
    """Three layers of one class."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([cls() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


class Optional(nn.Module):
    """Parameters and buffers that may be None or absent."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_parameter("gain", None)
        self.register_parameter("shift", nn.Parameter(torch.full((WIDTH,), 0.1)))
        self.register_buffer("mask", None)
        self.register_buffer("offset", torch.full((WIDTH,), 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use what there is."""
        hidden = F.gelu(self.fc1(x))
        if self.gain is not None:
            hidden = hidden * self.gain
        if self.mask is not None:
            hidden = hidden * self.mask
        if self.shift is not None:
            hidden = hidden + self.shift
        if self.offset is not None:
            hidden = hidden - self.offset
        if hasattr(self, "late"):
            hidden = hidden * self.late
        return x + self.fc2(hidden)


class Looping(nn.Module):
    """Goes through its parameters, buffers and children."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.gains = nn.ParameterList([torch.full((WIDTH,), 1.1), torch.full((WIDTH,), 0.9)])
        self.table = nn.ModuleDict({"out": nn.Linear(WIDTH, WIDTH)})
        self.register_buffer("offset", torch.full((WIDTH,), 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all of it."""
        for each in self.steps:
            x = x + F.gelu(each(x))
        for gain in self.gains:
            x = x * gain
        for _, buffer in self.named_buffers(recurse=False):
            x = x + buffer
        for child in self.table.values():
            x = child(x)
        return x


class Own(nn.Module):
    """Two linear layers of one shape, that may share their parameters, and a norm with two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An MLP with a residual."""
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class OwnTied(Own):
    """The same, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2.weight = self.fc1.weight


class Identities(nn.Module):
    """Asks whether its parts are the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Halve where both layers are tied."""
        hidden = self.fc2(F.gelu(self.fc1(x)))
        if self.fc1.weight is self.fc2.weight:
            hidden = hidden * 0.5
        return x + hidden


class Two(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, WIDTH)
        self.fc2 = self.fc1
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through both names."""
        return x + self.out(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class Flags(nn.Module):
    """Reads flags of its children and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.act = nn.GELU()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by flags."""
        hidden = self.act(self.fc1(x))
        if self.drop.training:
            hidden = hidden * 2.0
        hidden = self.norm(hidden.flatten(0, -2)).view_as(hidden)
        return x + self.drop(self.fc2(hidden)) * (1.0 + self.drop.p)


class Normed(nn.Module):
    """A convolution with a batch norm and an activation, and a batch norm with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU()
        self.fc, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        for norm in (self.norm, self.last):
            nn.init.uniform_(norm.running_mean, -0.5, 0.5)
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the tokens, and over the rows of each."""
        hidden = self.act(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        rows = self.fc(hidden).flatten(0, -2)
        return F.silu(self.last(rows) + x.flatten(0, -2)).view_as(x)


class Frozen(nn.Module):
    """Asks whether its parameters are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add where they are not."""
        hidden = F.gelu(self.fc1(x))
        if self.fc1.weight.requires_grad:
            hidden = hidden + 0.5
        return x + self.fc2(hidden)


class Attended(nn.Module):
    """Attention with optional biases, an attribute for the activation, and a residual with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.functional.gelu
        self.scale = WIDTH**-0.5

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attention, then an MLP."""
        hidden = self.norm(x)
        scores = self.q_proj(hidden) @ self.k_proj(hidden).transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        x = x + self.drop(self.o_proj(F.softmax(scores, dim=-1) @ self.v_proj(hidden)))
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm(x)))))


class Headed(nn.Module):
    """An embedding, layers, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([Attended() for _ in range(2)])
        self.lm_head = nn.Linear(WIDTH, 16, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(F.gelu(x))
