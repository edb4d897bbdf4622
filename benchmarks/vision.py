"""Convolutional models: original, scheduled, torch.compile: ``python -m benchmarks.vision [--only resnet50]``.

Real architectures at full width with random weights, images of 224 × 224, in both memory formats. Printed are the time
of a training step, with ``rules="default"``, and of a forward in evaluation, with ``rules=["default", "inference"]``,
relative to the original (medians of interleaved rounds with quartiles), and the bytes kept for backward. On a shared
machine only the ratios are meaningful. Results of all candidates are compared before anything is measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import schedule
from benchmarks.comparing import Figures, compare
from benchmarks.timing import Timing, interleaved
from schedule.report.costs import measure

RESULTS = Path(__file__).parent / "results" / "vision.json"
SAMPLES = 4
MODELS: dict[str, Callable[[], Any]] = {
    "resnet50": hf.ResNetConfig,
    "efficientnet_b0": lambda: hf.EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, dropout_rate=0),
    "mobilenet_v2": lambda: hf.MobileNetV2Config(classifier_dropout_prob=0),
}
FORMATS = {"": torch.contiguous_format, "_channels_last": torch.channels_last}
CANDIDATES = ("original", "ours", "torch.compile")
Batch = dict[str, Tensor]


def _built(name: str, layout: torch.memory_format) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = hf.AutoModelForImageClassification.from_config(MODELS[name]()).to(memory_format=layout)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as after some training
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    images = torch.randn(SAMPLES, 3, 224, 224).to(memory_format=layout)
    return model, {"pixel_values": images, "labels": torch.arange(SAMPLES) % 2}


def _stepping(model: Callable[..., Any]) -> Callable[[Batch], Callable[[], None]]:
    def of(batch: Batch) -> Callable[[], None]:
        return lambda: model(**batch).loss.backward()

    return of


def _evaluating(model: Callable[..., Any], batch: Batch) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(**batch).logits
            return logits

    return forward


def _candidates(original: nn.Module, batch: Batch, rules: list[str]) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """Return the modules and what is called, by candidate."""
    torch._dynamo.reset()
    modules = {name: copy.deepcopy(original) for name in CANDIDATES}
    schedule.optimize(modules["ours"], batch, rules=rules)
    calls: dict[str, Any] = {**modules, "torch.compile": torch.compile(modules["torch.compile"])}
    return modules, calls


def _measured(name: str, layout: torch.memory_format, rounds: int) -> dict[str, Figures]:
    original, batch = _built(name, layout)
    _, calls = _candidates(original.eval(), batch, ["default", "inference"])
    forwards = {candidate: _evaluating(call, batch) for candidate, call in calls.items()}
    expected = forwards["original"]()
    for forward in forwards.values():
        torch.testing.assert_close(forward(), expected, rtol=1e-3, atol=1e-3)
    evaluation = interleaved(forwards, rounds)
    modules, calls = _candidates(original.train(), batch, ["default"])
    steps = {candidate: _stepping(call)(batch) for candidate, call in calls.items()}
    training = interleaved(steps, rounds)
    figures: dict[str, dict[str, Timing | int]] = {
        candidate: {"evaluation": evaluation[candidate], "step": training[candidate]} for candidate in CANDIDATES
    }
    for candidate in ("original", "ours"):
        figures[candidate]["saved"] = measure(modules[candidate], batch).saved_bytes
    return {**figures}


MEASURES = {
    f"{name}{suffix}": partial(_measured, name, layout) for name in MODELS for suffix, layout in FORMATS.items()
}

if __name__ == "__main__":
    compare(__doc__, MEASURES, RESULTS)
