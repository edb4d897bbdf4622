"""What a user writes, with every primitive; it has to pass ``mypy --strict`` and is not run."""

from __future__ import annotations

import torch
from torch import nn

import schedule
from schedule import Group, Match, Report, Schedule


def act(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The pattern to replace."""
    return nn.functional.gelu(x + bias)


@schedule.primitive
def freeze(sch: Schedule, tag: str = "frozen") -> int:
    """A primitive of the user's own."""
    sch.annotate("weight", tag, True)
    return 1


def schedule_by_hand(model: nn.Module, batch: dict[str, torch.Tensor]) -> Report:
    """Use every primitive once."""
    sch: Schedule = schedule.create_schedule(model, example_inputs=batch)
    layers, first = sch["layers.*"], sch["layers.0"]
    assert isinstance(layers, Group) and isinstance(first, Schedule)
    first.trace(flatten=True)
    first.trace_until("attention")
    matches: list[Match] = first.find(act)
    first.fuse(matches)
    for parallel in first.find_parallel(act):
        first.replace(nn.Identity(), parallel)
    first.replace(nn.Identity())
    sch.replace_all(nn.Dropout, lambda path, old: nn.Identity())
    layers.decompose()
    layers.checkpoint()
    first.annotate("weight", "no_decay", True)
    first.fork_rng()
    first.cut_pipeline_stage()
    first.shard("weight", axis=0)
    first.shard_experts()
    first.sync("fwd_post", "all_reduce")
    first.context_parallel("hidden_states")
    sch.apply_plan(sch.shard_plan(2))
    freeze(first, tag="frozen")
    report = sch.optimize(rules="memory", cost_guard=False)
    with schedule.verify(sch, batch, steps=1):
        schedule.build(sch)
    while sch.history:
        sch.undo()
    return report
