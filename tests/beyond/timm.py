"""Models as timm writes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
