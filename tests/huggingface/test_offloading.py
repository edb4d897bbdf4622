"""accelerate's offloading: weights that are elsewhere between calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import schedule
from tests.zoo import batch, build

Offload = Callable[[nn.Module, Path], Any]
OFFLOADS: dict[str, Offload] = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, execution_device=torch.device("cpu")),
    "dispatched": lambda model, folder: accelerate.dispatch_model(
        model,
        {name: "disk" if name == "lm_head" else "cpu" for name in ("model", "lm_head")},
        main_device="cpu",
        offload_dir=folder,
        force_hooks=True,
    ),
}


@pytest.mark.parametrize("name", OFFLOADS)
def test_a_model_whose_weights_are_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    model, twin = build("llama").eval(), build("llama").eval()
    OFFLOADS[name](model, tmp_path)
    with pytest.raises(
        schedule.NotApplicable, match=r"runs accelerate\.hooks[\s\S]*brought for each call[\s\S]*stay in place"
    ):
        schedule.optimize(model, batch("llama"), cost_guard=False)
    with torch.no_grad():
        assert torch.equal(model(**batch("llama")).logits, twin(**batch("llama")).logits)


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.parametrize("name", OFFLOADS)
def test_a_scheduled_model_that_is_offloaded_runs_its_original_forward(name: str, tmp_path: Path) -> None:
    model, twin = build("llama").eval(), build("llama").eval()
    report = schedule.optimize(model, batch("llama"), rules="memory", cost_guard=False)
    OFFLOADS[name](model, tmp_path)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(**batch("llama")).logits, twin(**batch("llama")).logits)
    assert report.active < report.count() and "not in effect" in report.sentence
    assert any(
        "forward of its own, set on the object: accelerate.hooks" in why
        for whys in report.declined.values()
        for why in whys
    )
