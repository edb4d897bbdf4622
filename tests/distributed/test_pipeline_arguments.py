"""Arguments of a pipeline's step: those of the model, and the target of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import schedule
from schedule.distributed.pipeline import Pipeline
from tests.needs import needs_torch


@needs_torch("2.13", "a rank that sends to itself before the first step, which gloo refuses")
def test_arguments_of_a_step(tmp_path: Path) -> None:
    """A loss without a target gets none, and a call that the model does not take is refused."""
    given: list[Any] = []

    def loss(outputs: Any, target: Any) -> torch.Tensor:
        given.append(target)
        total: torch.Tensor = outputs[0].square().mean()
        return total

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        x, target = torch.randn(4, 4), torch.arange(4)
        sch = schedule.create_schedule(model, x)
        sch["0"].cut_pipeline_stage()
        stages = schedule.build(sch, pipeline=Pipeline(2, "interleaved1f1b", loss=loss)).train()
        stages.step(x)
        assert given and all(each is None for each in given)
        given.clear()
        stages.step(x, target=target)
        assert torch.equal(torch.cat(given), target)
        with pytest.raises(schedule.NotApplicable, match="too many positional arguments"):
            stages.step(x, x)
        with pytest.raises(schedule.NotApplicable, match="unexpected keyword argument 'mask'"):
            stages.step(x, mask=x)
    finally:
        dist.destroy_process_group()
