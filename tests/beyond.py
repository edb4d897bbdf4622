"""Models as they are written outside transformers: timm, nanoGPT, torch.nn, diffusers, mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


# -- timm -----------------------------------------------------------------------------------------------------


class DropPath(nn.Module):
    """Stochastic depth: whole samples are dropped."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
        if keep_prob > 0.0:
            random_tensor.div_(keep_prob)
        return x * random_tensor


class LayerScale(nn.Module):
    def __init__(self, dim: int, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class VitAttention(nn.Module):
    """qkv packed; softmax written out, or torch's own attention."""

    def __init__(self, dim: int, heads: int, drop: float, fused_attn: bool = False) -> None:
        super().__init__()
        self.fused_attn = fused_attn
        self.num_heads, self.head_dim = heads, dim // heads
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class VitMlp(nn.Module):
    def __init__(self, dim: int, drop: float) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(drop)
        self.norm: nn.Module = nn.Identity()
        self.fc2, self.drop2 = nn.Linear(4 * dim, dim), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class VitBlock(nn.Module):
    def __init__(self, dim: int, drop: float, modern: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn, self.mlp = VitAttention(dim, 4, drop, fused_attn=modern), VitMlp(dim, drop)
        self.ls1, self.ls2 = LayerScale(dim, inplace=modern), LayerScale(dim, inplace=modern)
        self.drop_path1, self.drop_path2 = DropPath(drop), DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class Vit(nn.Module):
    """Patches, a class token, learned positions, two blocks; modern ones use torch's attention and scale in place."""

    def __init__(self, dim: int = 16, drop: float = 0.1, modern: bool = False) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, dim)), nn.Parameter(torch.randn(1, 5, dim))
        self.blocks = nn.Sequential(*(VitBlock(dim, drop, modern) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 7)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patch_embed(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


# -- nanoGPT --------------------------------------------------------------------------------------------------


class OwnLayerNorm(nn.Module):
    """With an optional bias."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """The causal mask is a buffer, cut to the length at hand."""

    bias: Tensor

    def __init__(self, width: int, heads: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd = heads, width
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GptMlp(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(width, 4 * width), nn.GELU()
        self.c_proj, self.dropout = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class GptBlock(nn.Module):
    def __init__(self, width: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = OwnLayerNorm(width, bias=True), OwnLayerNorm(width, bias=True)
        self.attn, self.mlp = CausalSelfAttention(width, 4, block_size, dropout), GptMlp(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """Logits and loss; the head is tied to the embedding."""

    def __init__(self, width: int = 16, vocab: int = 50, block_size: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab, width),
                wpe=nn.Embedding(block_size, width),
                drop=nn.Dropout(dropout),
                h=nn.ModuleList([GptBlock(width, block_size, dropout) for _ in range(2)]),
                ln_f=OwnLayerNorm(width, bias=False),
            )
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        _, t = idx.size()
        assert t <= self.block_size, f"Cannot forward sequence of length {t}, block size is only {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:  # type: ignore[union-attr]
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


# -- torch.nn -------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, which has a path of its own in evaluation."""

    def __init__(self, norm_first: bool, activation: str | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Attention(nn.Module):
    """``nn.MultiheadAttention``, and what follows it."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.fc1, self.fc2, self.act = nn.Linear(16, 32), nn.Linear(32, 16), nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=self.need_weights)
        return self.fc2(self.act(self.fc1(x + y)))


# -- diffusers ------------------------------------------------------------------------------------------------


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


# -- mixtures of experts --------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(dim, ffn, bias=False),
            nn.Linear(ffn, dim, bias=False),
            nn.Linear(dim, ffn, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LoopedExperts(nn.Module):
    """As Mixtral first was: each expert takes the tokens that chose it."""

    def __init__(self, dim: int = 16, ffn: int = 32, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate, self.num_experts, self.top_k = nn.Linear(dim, experts, bias=False), experts, top_k
        self.experts = nn.ModuleList([Expert(dim, ffn) for _ in range(experts)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        routing_weights = F.softmax(self.gate(hidden_states), dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current = self.experts[expert_idx](current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch_size, sequence_length, hidden_dim)


class GroupedExperts(nn.Module):
    """Every expert on every token, as one batched product; the routing weights choose."""

    def __init__(self, dim: int = 16, ffn: int = 32, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate, self.top_k = nn.Linear(dim, experts, bias=False), top_k
        self.gate_up_proj = nn.Parameter(torch.randn(experts, dim, 2 * ffn) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(experts, ffn, dim) * 0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, length, dim = hidden_states.shape
        tokens = hidden_states.reshape(-1, dim)
        logits = self.gate(tokens)
        top, chosen = torch.topk(logits, self.top_k, dim=-1)
        weights = torch.zeros_like(logits).scatter_(1, chosen, F.softmax(top, dim=-1))
        repeated = tokens.unsqueeze(0).expand(self.gate_up_proj.shape[0], -1, -1)
        gate, up = torch.bmm(repeated, self.gate_up_proj).chunk(2, dim=-1)
        expert_out = torch.bmm(F.silu(gate) * up, self.down_proj)
        return (expert_out * weights.t().unsqueeze(-1)).sum(0).view(batch, length, dim)


class MoeBlock(nn.Module):
    """A mixture behind an RMS norm, as decoders have it."""

    def __init__(self, experts: nn.Module, dim: int = 16) -> None:
        super().__init__()
        self.weight, self.moe = nn.Parameter(torch.ones(dim)), experts

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.moe(self.weight * h.to(x.dtype))
