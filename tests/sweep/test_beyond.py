"""Models of other libraries in the sweep: named, built, and called with other sizes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.sweep import beyond
from tests.sweep.beyond import case, diffusion, timm
from tests.sweep.beyond.torch_nn import TORCH
from tests.sweep.models import NotBuilt, build
from tests.sweep.parts import inputs_for


@pytest.mark.parametrize("name", TORCH)
def test_built_by_name(name: str) -> None:
    assert f"torch:{name}" in beyond.names() and "," not in name  # `--only` takes a list of names
    built = build(f"torch:{name}")
    built.model(**built.batch)
    built.model(**inputs_for(built.model, 3, 9))
    (first, *_), (other, *_) = built.batch.values(), inputs_for(built.model, 3, 9).values()
    assert first.shape[0] == 2 and other.shape[0] == 3


def test_what_is_too_large_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "MAX_PARAMETERS", 10)
    with pytest.raises(NotBuilt, match="too large: more than 10 parameters"):
        build("torch:ResNet")


def test_a_batch_is_described_by_shapes_functions_and_constants() -> None:
    batch = case.given(x=(case.N, case.L, 4), nested={"y": [(case.N, 2)]}, mask=case.ones(case.L), height=7)(3, 5)
    assert batch["x"].shape == (3, 5, 4) and batch["nested"]["y"][0].shape == (3, 2)
    assert batch["mask"].tolist() == [1.0] * 5 and batch["height"] == 7


class _Picky(nn.Linear):
    """Takes images of 96 pixels or more."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.shape[-1] < 96:
            raise RuntimeError("small")
        return super().forward(image)


def _library(*widths: int) -> Any:
    return SimpleNamespace(
        __version__="0",
        list_models=lambda module: [f"of {width}" for width in widths],
        create_model=lambda name, num_classes: _Picky(int(name[3:]), num_classes),
        get_pretrained_cfg=lambda name: SimpleNamespace(input_size=(3, 96, 96)),
    )


def test_a_family_stands_for_its_smallest_model_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timm, "COUNTS", tmp_path)
    monkeypatch.setattr(timm, "library", lambda: _library(10**9, 960, 96, 8))
    found = timm.of_timm("family")
    assert found.make().in_features == 96  # that of 8 pixels takes no images that are tried
    assert found.batch(2, 12)["image"].shape == (4, 3, 96, 96)
    monkeypatch.setattr(case, "MAX_PARAMETERS", 10)
    monkeypatch.setattr(timm, "library", lambda: _library())  # what was counted is known
    with pytest.raises(case.Unavailable, match="too large"):
        timm.of_timm("family")


def test_the_package_that_stands_in_for_torchvision_is_gone_after_the_import() -> None:
    before = importlib.util.find_spec("torchvision")
    with timm._torchvision():
        assert importlib.import_module("torchvision.transforms").InterpolationMode.BILINEAR == "BILINEAR"
    assert importlib.util.find_spec("torchvision") == before and (before or "torchvision.transforms" not in sys.modules)


def test_weights_that_a_model_leaves_uninitialized_are_random() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.ones(8))

    model = diffusion._initialized(Raw)
    assert 0 < model.weight.std() < 0.1 and torch.equal(model.scale, torch.ones(8))
    assert not torch.are_deterministic_algorithms_enabled()
