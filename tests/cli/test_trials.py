"""Example inputs that only the model itself can tell, by what it accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from fxschedule.cli.trials import found_inputs, tried_inputs
from schedule.util.errors import NotApplicable
from tests.small import Mlp, small


def shapes(batch: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in batch.items()}


class Patches(nn.Module):
    """Positions for images of one size, as a ViT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.positions = nn.Conv2d(3, 4, 16, 16), nn.Parameter(torch.zeros(1, 4, 14, 14))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x) + self.positions


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (small, {"ids": (2, 12)}),
        (lambda: Mlp(16), {"hidden": (2, 12, 16)}),
        (lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 2)).requires_grad_(False), {"input": (2, 12, 6)}),
        (lambda: nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)), {"input": (2, 6)}),
        (lambda: nn.Conv2d(3, 4, 3), {"input": (2, 3, 32, 32)}),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 62 * 62, 2)), {"input": (2, 3, 64, 64)}),
        (lambda: nn.Conv3d(3, 4, 3), {"input": (2, 3, 8, 32, 32)}),
        (Patches, {"x": (2, 3, 224, 224)}),
    ],
)
def test_shapes_come_from_the_weights(make: Callable[[], nn.Module], expected: dict[str, tuple[int, ...]]) -> None:
    assert shapes(tried_inputs(make())) == expected


def test_sizes_that_are_asked_for() -> None:
    assert shapes(tried_inputs(small(), rows=3, length=5)) == {"ids": (3, 5)}
    assert shapes(tried_inputs(nn.Conv2d(3, 4, 3), shapes=[(3, 2, 2), (3, 20, 24)])) == {"input": (2, 3, 20, 24)}


class Conditioned(nn.Module):
    """An image, a time for each row and a text: as a UNet of diffusers, with arguments that it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classes = nn.Conv2d(5, 8, 3, padding=1), nn.Embedding(7, 8)
        self.text, self.gate = nn.Linear(24, 8), nn.Linear(6, 8)
        self.calls = 0

    def forward(
        self, sample: Any, timestep: Any, text: Any = None, mask: Any = None, labels: Any = None, scale: float = 1.0
    ) -> torch.Tensor:
        self.calls += 1
        if timestep.ndim != 1:
            raise ValueError("one time for each row")
        hidden = self.conv(sample) + timestep[:, None, None, None] * scale
        hidden = hidden + self.classes(labels)[..., None, None]
        if mask is not None:
            text = text + mask
        hidden = hidden + self.text(text).mean(1)[..., None, None]
        return hidden


def test_arguments_are_found_one_after_the_other() -> None:
    model = Conditioned().train()
    batch = tried_inputs(model)
    assert shapes(batch) == {"sample": (2, 5, 32, 32), "timestep": (2,), "labels": (2,), "text": (2, 12, 24)}
    assert model(**batch).shape == (2, 8, 32, 32) and batch["labels"].max() < 7
    assert model.training and model.calls == 1, "the state before the trials"


class Text(nn.Module):
    """Its text is as wide as one of the images that are tried."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 5, 3), nn.Linear(32, 5)

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return self.fc(text).mean(1)[..., None, None] * self.conv(image)


def test_an_image_is_no_text() -> None:
    assert shapes(tried_inputs(Text())) == {"text": (2, 12, 32), "image": (2, 3, 48, 48)}


def test_numbers_have_the_dtype_of_the_model() -> None:
    assert tried_inputs(Mlp(16).double())["hidden"].dtype is torch.float64


class Session(nn.Module):
    """Refuses every tensor, after some work."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, session: Any) -> torch.Tensor:
        return self.fc(x) + session.state


def test_a_model_with_a_config_is_asked_about_by_its_config() -> None:
    model = Session()
    assert found_inputs(Mlp(16))["hidden"].shape == (2, 12, 16)
    model.config = PretrainedConfig()
    with pytest.raises(NotApplicable, match="the config does not say what"):
        found_inputs(model)


def test_a_module_without_weights_takes_vectors() -> None:
    assert shapes(tried_inputs(nn.ReLU())) == {"input": (2, 12)}


def test_the_error_is_that_of_the_call_that_ran_furthest() -> None:
    with pytest.raises(
        NotApplicable, match=r"(?s)refused x \[2, 12, 4\], .*no attribute 'state' \(test_trials"
    ) as caught:
        tried_inputs(Session())
    assert caught.value.fix == "pass a batch: batch=dict(x=…, session=…)"


def test_a_model_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(NotApplicable, match="no forward of its own"):
        tried_inputs(nn.ModuleList([nn.Linear(2, 2)]))

    class Variadic(nn.Module):
        def forward(self, *args: Any) -> Any:
            return args[0]

    with pytest.raises(NotApplicable, match=r"Variadic"):
        tried_inputs(Variadic())
