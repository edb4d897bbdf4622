"""What pictures are made of in the tests."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from torch import nn

import schedule
from schedule.api.schedule import Schedule
from schedule.distributed.communication.groups import SimulatedRanks
from schedule.distributed.communication.mesh import SimulatedMesh
from schedule.report.costs import TimeRatio
from schedule.report.report import Report

IDS = torch.arange(32).reshape(2, 16)


@cache
def gpt2() -> Report:
    """A small GPT-2 of three layers, optimized."""
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    batch = {"input_ids": IDS, "labels": IDS}
    return schedule.optimize(transformers.GPT2LMHeadModel(config), batch, cost_guard=False)


def _llama(layers: int) -> nn.Module:
    sizes = {"num_hidden_layers": layers, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0)
    return transformers.LlamaForCausalLM(config)


@cache
def llama(layers: int) -> Report:
    """A narrow Llama, optimized."""
    batch = {"input_ids": IDS, "labels": IDS}
    return schedule.optimize(_llama(layers), batch, cost_guard=False)


def verified(report: Report) -> Report:
    """The report after a comparison with the original."""
    report.verify(steps=1)
    return report


@cache
def slower_bert() -> Report:
    """A BERT that was measured to be slower than the original: the figures are made up."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, attn_implementation="eager")
    batch = {"input_ids": IDS, "labels": IDS}
    report = schedule.optimize(transformers.BertForMaskedLM(config), batch, cost_guard=False)
    report.timing = TimeRatio(1.18, 1.12, 1.25, 5, (0.0412, 0.0486))
    return report


def unchanged() -> Report:
    """A model in which no rule applies."""
    return schedule.optimize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.ones(2, 8))


_ranks: list[SimulatedRanks] = []


def mesh(ranks: int, rank: int = 0) -> SimulatedMesh:
    """Simulated ranks, which are known by name as long as they are there."""
    _ranks.append(SimulatedRanks(ranks))
    return SimulatedMesh(_ranks[-1], rank)


def planned_llama() -> Schedule:
    """A small Llama in two stages, sharded over two simulated ranks."""
    batch = {"input_ids": IDS, "use_cache": False}
    sch = schedule.create_schedule(_llama(2), batch, mesh(2))
    plan = sch.shard_plan()
    sch["model.layers.0"].cut_pipeline_stage()
    sch.apply_plan(plan)
    return sch


def hostile() -> Schedule:
    """A model whose names are markup: of modules, classes, patterns and inputs."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) + 1.0

    Inner.__name__ = '</script><script>alert(1)</script>" onclick="alert(1)'
    model = nn.Sequential()
    model.add_module("<img src=x onerror=alert(1)>", Inner())
    model.add_module("' onclick=alert(1) x='</template>", Inner())

    def pattern(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    pattern.__name__ = "<b>{{ 7 * 7 }}</b>"
    sch = schedule.create_schedule(model, torch.ones(2, 4))
    inner = sch["<img src=x onerror=alert(1)>"]
    inner.fuse(inner.find(pattern, expect=1), compiler=None)
    return sch
