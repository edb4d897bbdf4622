"""Tiny models and a stand-in for a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from schedule.core.node import Node, Tree
from schedule.recipes.step_recording import recorded

VOCABULARY = 61


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
        loss_type="ForCausalLMLoss",
    )
    return GPT2LMHeadModel(config)


def bert() -> BertForMaskedLM:
    config = BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    return BertForMaskedLM(config)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "bert": bert, "llama": llama}


def token_batch() -> dict[str, torch.Tensor]:
    """Two rows of ten tokens, the second padded at the end."""
    ids = torch.randint(1, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


class Block(nn.Module):
    """Attention and MLP, written out so that tests can get every part of it wrong."""

    def __init__(self, hidden: int = 16, heads: int = 2, p: float = 0.1) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.norm = nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.o = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        for linear in (self.q, self.k, self.v, self.o, self.up, self.down):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def scale(self) -> float:
        return float((self.q.weight.shape[0] // self.heads) ** -0.5)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.split(self.q(x)) @ self.split(self.k(x)).transpose(-1, -2) * self.scale()

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), torch.finfo(scores.dtype).min)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.p, self.training)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.up(x), approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        attention = self.drop(self.mask(self.scores(y)).softmax(-1))
        x = x + self.o((attention @ self.split(self.v(y))).transpose(1, 2).flatten(2))
        return x + self.down(self.activate(self.norm(x)))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@dataclass
class FakeEdit:
    apply: Callable[[], None]
    revert: Callable[[], None]


class FakeSchedule(Node):
    """A schedule whose steps do anything."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(Tree(module, None, None, Node, recorded), module)

    def apply(self, description: str, do: Callable[[], None], revert: Callable[[], None]) -> None:
        with self.tree.history.transaction("fake", [""], {}, description):
            self.commit([FakeEdit(do, revert)])

    def swap_class(self, path: str, new: type[nn.Module], description: str) -> None:
        """Give a module another class, as the real thing does."""
        module = self.module.get_submodule(path)
        old = type(module)
        self.apply(
            description,
            lambda: setattr(module, "__class__", new),
            lambda: setattr(module, "__class__", old),
        )
