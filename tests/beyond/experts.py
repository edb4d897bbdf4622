"""Mixtures of experts, one by one and all together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
