"""Blocks of diffusion models: UNets with group norms, transformers with adaptive layer norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule


class ResnetBlock(nn.Module):
    """A block of a UNet, with a scale and shift from the embedding of the time step."""

    def __init__(self, channels: int = 16, groups: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time, self.act = nn.Linear(8, 2 * channels), nn.SiLU()
        for norm in (self.norm1, self.norm2):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(self.act(self.norm1(x)))
        scale, shift = self.time(self.act(time))[:, :, None, None].chunk(2, dim=1)
        return x + self.conv2(self.act(self.norm2(h) * (1 + scale) + shift))


class TransformerBlock(nn.Module):
    """A block of a DiT."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.modulation, self.embed = nn.Linear(hidden, 6 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, parts = self.embed(x), self.modulation(F.silu(time)).chunk(6, dim=1)
        shift, scale, gate, shift2, scale2, gate2 = (part.unsqueeze(1) for part in parts)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale) + shift).chunk(3, -1)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v))
        return x + gate2 * self.down(F.gelu(self.up(self.norm2(x) * (1 + scale2) + shift2), approximate="tanh"))


class LayerScaledBlock(nn.Module):
    """A block of a ConvNeXt, and one of a transformer, with the operands in other orders."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(channels, channels, 3, padding=1), nn.Linear(channels, channels)
        self.of_channels, self.gamma = nn.Parameter(torch.rand(channels, 1, 1)), nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.conv(x) * self.of_channels + x
        rows = x.flatten(2).transpose(1, 2)
        return rows + self.up(rows).mul(self.gamma)


def unet(samples: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 16, size, size + 1), torch.randn(samples, 8)


def dit(samples: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, size, 16), torch.randn(samples, 16)


@pytest.mark.parametrize(
    ("model", "make", "rules"),
    [
        (ResnetBlock, unet, {"group_norm_silu": 2}),
        (TransformerBlock, dit, {"adaptive_layer_norm": 2, "gated_residual": 2}),
        (LayerScaledBlock, unet, {"gated_residual": 2}),
    ],
)
def test_blocks_are_rewritten_and_stay_equal(model: type[nn.Module], make, rules: dict[str, int]) -> None:
    torch.manual_seed(0)
    block = model()
    sch = schedule.create_schedule(block, make(2, 6))
    report = schedule.optimize(sch, cost_guard=False)
    assert rules.items() <= report.applied.items()
    for samples, size in ((2, 6), (3, 5), (1, 9)):
        schedule.verify(sch, make(samples, size), steps=3)


def test_fewer_bytes_are_saved() -> None:
    for model, make, tensors in ((ResnetBlock, unet, 3), (TransformerBlock, dit, 2)):
        batch = make(2, 16)
        cost = schedule.optimize(model(), batch, cost_guard=False).measure()
        saved = cost["before"].saved_bytes - cost["after"].saved_bytes
        assert saved > 0.9 * tensors * batch[0].nbytes


def test_a_scale_of_each_pixel_is_left_alone() -> None:
    class Spatial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.norm(x) * (1 + x) + x)

    report = schedule.optimize(Spatial(), (torch.randn(2, 4, 5, 6),), cost_guard=False)
    assert not report.applied
    assert any("is not one of each channel of a sample" in entry.reason for entry in report.entries)
