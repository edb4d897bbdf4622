"""A block of a UNet as diffusers writes it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResnetBlock(nn.Module):
    def __init__(self, channels: int, out: int, temb: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time_emb_proj = nn.Linear(temb, out)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.dropout, self.nonlinearity = nn.Dropout(0.1), nn.SiLU()
        self.conv_shortcut = nn.Conv2d(channels, out, 1) if channels != out else None
        self.output_scale_factor = 1.0

    def forward(self, input_tensor: Tensor, temb: Tensor) -> Tensor:
        hidden_states = self.conv1(self.nonlinearity(self.norm1(input_tensor)))
        temb = self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        hidden_states = hidden_states + temb
        hidden_states = self.nonlinearity(self.norm2(hidden_states))
        hidden_states = self.conv2(self.dropout(hidden_states))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        return (input_tensor + hidden_states) / self.output_scale_factor


class GEGLU(nn.Module):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2)

    def gelu(self, gate: Tensor) -> Tensor:
        if gate.device.type == "mps":
            return F.gelu(gate.to(dtype=torch.float32)).to(dtype=gate.dtype)
        return F.gelu(gate)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * self.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([GEGLU(dim, 4 * dim), nn.Dropout(0.1), nn.Linear(4 * dim, dim)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        for module in self.net:
            hidden_states = module(hidden_states)
        return hidden_states


class CrossAttention(nn.Module):
    """Heads in the batch dimension, ``baddbmm`` and a softmax."""

    def __init__(self, dim: int, heads: int, upcast_softmax: bool = True) -> None:
        super().__init__()
        self.heads, self.scale, self.upcast_softmax = heads, (dim // heads) ** -0.5, upcast_softmax
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), nn.Dropout(0.1)])

    def head_to_batch_dim(self, tensor: Tensor) -> Tensor:
        batch_size, seq_len, dim = tensor.shape
        tensor = tensor.reshape(batch_size, seq_len, self.heads, dim // self.heads).permute(0, 2, 1, 3)
        return tensor.reshape(batch_size * self.heads, seq_len, dim // self.heads)

    def batch_to_head_dim(self, tensor: Tensor) -> Tensor:
        batch_size, seq_len, dim = tensor.shape
        tensor = tensor.reshape(batch_size // self.heads, self.heads, seq_len, dim).permute(0, 2, 1, 3)
        return tensor.reshape(batch_size // self.heads, seq_len, dim * self.heads)

    def get_attention_scores(self, query: Tensor, key: Tensor) -> Tensor:
        dtype = query.dtype
        empty = torch.empty(query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype, device=query.device)
        scores = torch.baddbmm(empty, query, key.transpose(-1, -2), beta=0, alpha=self.scale)
        if self.upcast_softmax:
            scores = scores.float()
        probs = scores.softmax(dim=-1)
        return probs.to(dtype)

    def forward(self, hidden_states: Tensor, context: Tensor | None = None) -> Tensor:
        context = hidden_states if context is None else context
        query, key, value = (
            self.head_to_batch_dim(proj(each))
            for proj, each in ((self.to_q, hidden_states), (self.to_k, context), (self.to_v, context))
        )
        out = self.batch_to_head_dim(torch.bmm(self.get_attention_scores(query, key), value))
        for module in self.to_out:
            out = module(out)
        return out


class TransformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn1, self.attn2, self.ff = CrossAttention(dim, 2), CrossAttention(dim, 2), FeedForward(dim)

    def forward(self, hidden_states: Tensor, context: Tensor) -> Tensor:
        hidden_states = self.attn1(self.norm1(hidden_states)) + hidden_states
        hidden_states = self.attn2(self.norm2(hidden_states), context) + hidden_states
        return self.ff(self.norm3(hidden_states)) + hidden_states


class UNetBlock(nn.Module):
    """A residual block, then a transformer over the pixels, then down by two."""

    def __init__(self, channels: int = 8, out: int = 16) -> None:
        super().__init__()
        self.time_embedding = nn.Sequential(nn.Linear(out, out), nn.SiLU(), nn.Linear(out, out))
        self.resnet = ResnetBlock(channels, out, out)
        self.norm, self.proj_in, self.proj_out = nn.GroupNorm(4, out), nn.Linear(out, out), nn.Linear(out, out)
        self.block = TransformerBlock(out)
        self.downsample = nn.Conv2d(out, out, 3, stride=2, padding=1)
        self.dim = out

    def forward(self, pixel_values: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        half = self.dim // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=timestep.device) / half)
        angles = timestep[:, None].float() * frequencies[None]
        temb = self.time_embedding(torch.cat((angles.sin(), angles.cos()), dim=-1))
        hidden_states = self.resnet(pixel_values, temb)
        batch, channel, height, width = hidden_states.shape
        residual = hidden_states
        hidden_states = self.norm(hidden_states).permute(0, 2, 3, 1).reshape(batch, height * width, channel)
        hidden_states = self.proj_out(self.block(self.proj_in(hidden_states), context))
        hidden_states = hidden_states.reshape(batch, height, width, channel).permute(0, 3, 1, 2).contiguous()
        return self.downsample(hidden_states + residual)
