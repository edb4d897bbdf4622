"""A small transformer on real text, written twice over one set of parameters' names: with fused ops and in plain torch.

Its layers differ, so that between them they use every family: norms of both kinds with and without the residual,
rotary embedding, four ways to the softmax, plain and gated activations, bias + dropout + residual, both losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fused

Tensor = torch.Tensor

TEXT = Path(__file__).parents[1] / "data" / "shakespeare.txt"
WIDTH, HEADS, CONTEXT, DROPOUT = 64, 4, 48, 0.1
SCALE = 1 / math.sqrt(WIDTH // HEADS)


class Plain:
    """The expressions as models write them."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias)

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.layer_norm(total, weight, bias), total

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

        return turn(q), turn(k)

    def softmax(self, layer: int, scores: Tensor, hidden: Tensor) -> Tensor:
        filled = (scores * SCALE).masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = F.softmax(filled, -1, dtype=torch.float32).to(scores.dtype)
        return F.dropout(weights, DROPOUT) if layer == 3 else weights

    def activation(self, layer: int, x: Tensor, bias: Tensor) -> Tensor:
        if layer == 0:
            gate, up = (x + bias).chunk(2, -1)
            return F.silu(gate) * up
        if layer == 1:
            return F.gelu(x + bias, approximate="tanh")
        if layer == 2:
            gate, up = x.chunk(2, -1)
            return F.gelu(gate) * up
        return F.relu(x + bias).square()

    def bias_dropout_add(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + F.dropout(x + bias, DROPOUT)

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), targets)

    def linear_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return self.loss(hidden, weight, targets)


class Fused(Plain):
    """The same by fused ops, none left out."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return fused.rms_norm(x, weight, 1e-6)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fused.add_rms_norm(x, residual, weight, 1e-6)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused.layer_norm(x, weight, bias, 1e-5)

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return fused.add_layer_norm(x, residual, weight, bias, 1e-5)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return fused.rotary_embedding(q, k, cos, sin)

    def softmax(self, layer: int, scores: Tensor, hidden: Tensor) -> Tensor:
        if layer == 0:
            return fused.ScaledUpperTriangMaskedSoftmax.apply(scores, SCALE)
        if layer == 1:
            return fused.ScaledMaskedSoftmax.apply(scores, hidden, SCALE)
        if layer == 2:
            additive = torch.zeros(hidden.shape, dtype=scores.dtype)
            return fused.scaled_masked_softmax(scores, additive.masked_fill(hidden, -torch.inf), SCALE)
        return fused.scaled_masked_softmax(scores, None, SCALE, causal=True, dropout_p=DROPOUT)

    def activation(self, layer: int, x: Tensor, bias: Tensor) -> Tensor:
        if layer == 0:
            return fused.bias_swiglu(x, bias)
        if layer == 1:
            return fused.bias_gelu(x, bias)
        if layer == 2:
            return fused.gated_activation(*x.chunk(2, -1), "gelu")
        return fused.bias_activation(x, bias, "relu2")

    def bias_dropout_add(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return fused.bias_dropout_add(x, bias, residual, DROPOUT, True)

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return fused.cross_entropy(hidden @ weight.T, targets)

    def linear_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return fused.linear_cross_entropy(hidden, weight, targets)


class Layer(nn.Module):
    """Attention and a feed-forward part, normalized before each: RMSNorm in even layers, LayerNorm in odd ones."""

    def __init__(self, number: int, ops: Plain) -> None:
        super().__init__()
        self.number, self.ops = number, ops
        inner = 4 * WIDTH
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out_bias = nn.Parameter(torch.zeros(WIDTH))
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.up_bias = nn.Parameter(torch.zeros(inner))
        self.down = nn.Linear(inner // 2 if number in (0, 2) else inner, WIDTH)
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self.shifts = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        even, ops = self.number % 2 == 0, self.ops
        normed = ops.rms_norm(x, self.scales[0]) if even else ops.layer_norm(x, self.scales[0], self.shifts[0])
        q, k, v = self.qkv(normed).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        q, k = ops.rotary(q, k, cos, sin)
        weights = ops.softmax(self.number, q @ k.transpose(-1, -2), hidden)
        attended = self.out((weights @ v).transpose(1, 2).flatten(2))
        if even:
            normed, x = ops.add_rms_norm(attended + self.out_bias, x, self.scales[1])
        else:
            x = ops.bias_dropout_add(attended, self.out_bias, x)
            normed, x = ops.add_layer_norm(self.shifts[1].expand_as(x), x, self.scales[1], self.shifts[0])
        return x + self.down(ops.activation(self.number, self.up(normed), self.up_bias))


class Model(nn.Module):
    """Four layers over characters; the loss of one half of the batch from logits, of the other without them."""

    def __init__(self, characters: int, ops: Plain) -> None:
        super().__init__()
        self.ops = ops
        self.embedding = nn.Embedding(characters, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.ModuleList(Layer(number, ops) for number in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        batch, length = inputs.shape
        half = WIDTH // HEADS // 2
        angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(half) / half)
        cos, sin = (torch.cat([f(angles)] * 2, -1).expand(batch, -1, -1) for f in (torch.cos, torch.sin))
        x = self.embedding(inputs)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, cos, sin, hidden)
        rows = (x.flatten(0, 1), targets.flatten())
        (first, second), (seen, unseen) = (tensor.chunk(2) for tensor in rows)
        weight = self.embedding.weight
        return 0.5 * (self.ops.loss(first, weight, seen) + self.ops.linear_loss(second, weight, unseen))


@dataclass(frozen=True)
class Curves:
    """Losses by step of the plain and the fused model, from one start and one order of the text."""

    plain: list[float]
    fused: list[float]

    def apart(self) -> float:
        """The largest distance of the two curves."""
        return max(abs(a - b) for a, b in zip(self.plain, self.fused, strict=True))


def curves(steps: int, autocast: bool) -> Curves:
    """Train both models alike."""
    return Curves(losses(Plain(), steps, autocast), losses(Fused(), steps, autocast))


def losses(ops: Plain, steps: int, autocast: bool) -> list[float]:
    """The loss at each step of AdamW on batches of 8 passages."""
    text = TEXT.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([numbers[character] for character in text])
    torch.manual_seed(0)
    model = Model(len(numbers), ops)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(ids) - CONTEXT - 1, (8,), generator=generator)
        batch = torch.stack([ids[start : start + CONTEXT + 1] for start in starts.tolist()])
        torch.manual_seed(step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve
