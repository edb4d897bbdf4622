"""From which sizes rewrites pay, by device."""

from __future__ import annotations

import pytest
import torch

from schedule.capture.recording.structure import TensorSpec
from schedule.rules.thresholds import THRESHOLDS, small


def spec(elements: int, device: str) -> TensorSpec:
    return TensorSpec((elements,), torch.float32, torch.device(device))


@pytest.mark.parametrize("kind", ["single", "dropout", "layer_norm", "layer_norm, sum"])
def test_where_eager_has_a_good_kernel_only_large_tensors_are_rewritten_on_a_card(kind: str) -> None:
    assert "profitable from 4,194,304 on cuda" in small(kind, spec(2**22 - 1, "cuda"))
    assert not small(kind, spec(2**22, "cuda"))


@pytest.mark.parametrize("kind", THRESHOLDS)
def test_each_device_has_its_threshold(kind: str) -> None:
    for device, least in (("cpu", THRESHOLDS[kind].cpu), ("cuda", THRESHOLDS[kind].other)):
        assert small(kind, spec(least - 1, device)) and not small(kind, spec(least, device))
