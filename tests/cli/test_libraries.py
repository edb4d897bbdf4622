"""Models of timm, torchvision and diffusers, each in place of the library itself."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from fxschedule.cli.models import load_model
from fxschedule.cli.options import Asked
from fxschedule.cli.output import Code, CommandError
from tests.cli.test_cli import data, run


class Patches(nn.Module):
    """Images of one size."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.conv = side, nn.Conv2d(3, 4, 8, 8)
        self.pretrained_cfg = {"input_size": (3, 96, 96)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.side:
            raise ValueError("another size")
        return self.conv(x)


class Free(nn.Module):
    """Images of any size from 48 pixels on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 48)
        self.default_cfg = {"input_size": (3, 128, 128)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class UNet(nn.Module):
    """Settings that belong together, as those of diffusers do."""

    def __init__(self, block_out_channels: tuple[int, ...] = (320, 640, 1280), cross_attention_dim: int = 512) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *[nn.Conv2d(i, o, 1) for i, o in zip((4, *block_out_channels), block_out_channels, strict=False)]
        )
        self.context = nn.Linear(cross_attention_dim, block_out_channels[-1])

    def forward(self, sample: torch.Tensor, timestep: Any, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        if timestep.ndim != 1:
            raise ValueError("one time for each row")
        context = self.context(encoder_hidden_states).mean(1)
        return self.convs(sample) + context[..., None, None] * timestep[:, None, None, None]


class Never(nn.Module):
    """Runs for nobody."""

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for it")


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the functions of the libraries that are called."""

    def create_model(name: str, pretrained: bool = True, **settings: Any) -> nn.Module:
        assert not pretrained
        if name == "broken":
            raise RuntimeError("no such layer")
        return Patches(settings.get("img_size", 96)) if name == "vit_tiny" else Free(**settings)

    def get_model(name: str, weights: Any = "DEFAULT") -> nn.Module:
        assert weights is None and name == "resnet18"
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))

    timm, vision, diffusers = (types.ModuleType(name) for name in ("timm", "torchvision.models", "diffusers"))
    vars(timm).update(create_model=create_model, list_models=lambda: ["vit_tiny", "resnet", "broken"])
    vars(vision).update(get_model=get_model, list_models=lambda: ["resnet18"])
    vars(diffusers).update(UNet=UNet, Never=Never, Pipeline=object)
    for module in (timm, vision, diffusers, types.ModuleType("torchvision")):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        (("timm:vit_tiny",), "[2, 3, 96, 96]"),
        (("timm:vit_tiny", "--tiny"), "[2, 3, 64, 64]"),
        (("timm:resnet",), "[2, 3, 128, 128]"),
        (("timm:resnet.a1_in1k", "--tiny"), "[2, 3, 64, 64]"),
        (("torchvision:resnet18", "0"), "[2, 3, 224, 224]"),
        (("torchvision:resnet18", "0", "--tiny"), "[2, 3, 64, 64]"),
    ],
)
def test_images_have_the_size_that_the_library_says_or_a_small_one(arguments: tuple[str, ...], shape: str) -> None:
    name, path, *options = (*arguments[:1], *(arguments[1:] if arguments[1:2] == ("0",) else ("conv", *arguments[1:])))
    assert data("show", name, path, *options)["graph"][0].endswith(f"float32{shape}")


def test_settings_of_diffusers_are_reduced_for_a_tiny_model() -> None:
    small = load_model(Asked("diffusers:UNet", tiny=True))
    assert small.origin == "diffusers, random weights, tiny"
    assert [conv.out_channels for conv in small.model.convs] == [32, 64, 128] and small.model.context.in_features == 64
    whole = load_model(Asked("diffusers:UNet"))
    assert whole.origin == "diffusers, random weights" and whole.model.context.in_features == 512
    assert data("optimize", "diffusers:UNet", "--tiny")["origin"] == small.origin


def test_a_tiny_model_is_the_same_each_time() -> None:
    one, two = (load_model(Asked("timm:vit_tiny", tiny=True)).model for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(
    ("wanted", "why", "fix"),
    [
        (Asked("timm:vit_tyni"), "timm has no model 'vit_tyni'", "did you mean 'vit_tiny'?"),
        (Asked("timm:hf_hub:timm/x"), "timm has no model 'hf_hub:timm/x'", "3 names, such as vit_tiny"),
        (Asked("timm:broken"), "no broken can be made: no such layer", "module:factory"),
        (Asked("diffusers:Unet"), "has no model 'Unet'", "did you mean 'UNet'"),
        (Asked("diffusers:Pipeline"), "it is no nn.Module", "module:factory"),
        (Asked("diffusers:Never", tiny=True), "what is Never called with?", "--tiny out"),
    ],
)
def test_what_a_library_does_not_have(wanted: Asked, why: str, fix: str) -> None:
    with pytest.raises(CommandError) as caught:
        load_model(wanted)
    assert why in caught.value.why and fix in caught.value.fix and caught.value.code == Code.NO_MODEL


def test_a_library_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    result = run("optimize", "timm:resnet50")
    assert result.exit_code == 3 and "timm is not installed" in result.stderr and "pip install timm" in result.stderr


def test_attention_is_for_models_of_transformers() -> None:
    assert run("show", "timm:resnet", "--attention", "eager").exit_code == 2
