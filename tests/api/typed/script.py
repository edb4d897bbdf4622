"""What a user writes, with every primitive; it has to pass ``mypy --strict`` and is not run."""

from __future__ import annotations

import torch
from torch import nn

import fused
import schedule
from schedule import Group, Match, Recipe, Report, Schedule


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
    sch: Schedule = schedule.create_schedule(model, batch=batch)
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
    sch.undo(steps=2)
    sch.undo_all()
    return report


def other_spellings(model: nn.Module, batch: dict[str, torch.Tensor]) -> Schedule:
    """Use the names that people guess."""
    sch = schedule.create_schedule(model, batch)
    sch["layers.*"].fuse("bias_gelu_tanh")
    sch.checkpoint(budget="2GB")
    equal: bool = bool(schedule.verify(model, batch, steps=1, progress=False))
    recipe: Recipe = Recipe.load(sch.recipe().save("r.json"))
    again: Schedule = schedule.load_recipe("folder", model)
    schedule.replay(model, "r.json", batch)
    tuning = schedule.tune(model, schedule_by_hand, {"every": [1, 2]}, batch, memory="24GB", trials=2)
    tuning.apply(model, batch)
    norm, gate = fused.RMSNorm(8), fused.SwiGLU()
    loss: torch.Tensor = fused.CrossEntropyLoss()(gate(norm(batch["x"])), batch["labels"])
    print(schedule.__version__, equal, recipe.diff(again.recipe()), loss)
    return again
