"""Models with fused MLPs, and whether anything of a schedule is left in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import schedule
from schedule.runtime import classes
from tests.small import ids, small


def fused() -> tuple[nn.Module, schedule.Schedule]:
    """A model with scheduled MLPs, in evaluation."""
    torch.manual_seed(0)
    model = small().eval()
    sch = schedule.create_schedule(model, ids())
    mlps = sch["blocks.*.mlp"]
    mlps.fuse(mlps.find("bias_gelu_tanh", expect=2))
    return model, sch


def mlp_of(model: nn.Module) -> Any:
    return model.get_submodule("blocks.0.mlp")


def is_clean(model: nn.Module) -> bool:
    """Whether nothing of a schedule is left."""
    return not any(
        classes.STATE in vars(module) or any(classes.ORIGINAL in vars(cls) for cls in type(module).__mro__)
        for module in model.modules()
    )
