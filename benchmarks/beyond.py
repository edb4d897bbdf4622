"""Models of other libraries: original, scheduled, torch.compile: ``python -m benchmarks.beyond [--only resnet50 dit]``.

Real architectures of timm, diffusers and x-transformers, which ``make sweep-beyond`` installs into ``build/libraries``,
with random weights and no dropout. One line per model and candidate: processor time of a training step relative to the
original (the least of all rounds; then the median of the ratios in each round, with quartiles), the same operation by
operation (see :mod:`benchmarks.operations`), and the bytes that a forward pass keeps for backward; of convolutional
models also a forward pass in evaluation, with ``rules=["default", "inference"]``. Our rules see a flat graph,
which leaves out results of modules that no code reads, as torch.compile does. Results of all candidates are compared
before anything is measured. On a shared machine only the ratios are meaningful. Models may be measured one by one; the
results of the others stay in the JSON.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import schedule
from benchmarks.comparing import Figure, Figures, compare
from benchmarks.operations import interleaved_by_operation, profiled_kernels
from benchmarks.timing import interleaved
from schedule.report.costs import kept_bytes
from schedule.util.named_values import named_tensors
from tests.sweep.beyond.timm import library as timm

RESULTS = Path(__file__).parent / "results" / "beyond.json"
COPIES = 3  # of each candidate, whose operations are measured
Batch = dict[str, Tensor]
Candidate = Callable[[nn.Module, Batch], Callable[..., Any]]
"""Return what is called in place of a model, which may be the model."""


def _original(model: nn.Module, batch: Batch) -> nn.Module:
    return model


def _compiled(model: nn.Module, batch: Batch) -> Callable[..., Any]:
    call: Callable[..., Any] = torch.compile(model)
    return call


def _by(*rules: str) -> Candidate:
    def scheduled(model: nn.Module, batch: Batch) -> nn.Module:
        flat = schedule.create_schedule(model, batch).trace(flatten=True)
        schedule.optimize(flat, rules=rules)
        return model

    return scheduled


TRAINING = {
    "original": _original,
    "ours": _by("default"),
    "ours, memory": _by("default", "memory"),
    "torch.compile": _compiled,
}
EVALUATION = {"original": _original, "ours": _by("default", "inference"), "torch.compile": _compiled}


@dataclass(frozen=True)
class Model:
    """A model, its batch, and whether evaluation has rules of its own."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    has_evaluation: bool = False


def _of_timm(name: str, has_evaluation: bool = False) -> Model:
    def make() -> nn.Module:
        model: nn.Module = timm().create_model(name, num_classes=10)
        return model

    return Model(make, lambda: {"x": torch.randn(4, 3, 224, 224)}, has_evaluation)


def _dit() -> nn.Module:
    model: nn.Module = import_module("diffusers").DiTTransformer2DModel(
        num_attention_heads=6, attention_head_dim=64, num_layers=4, sample_size=32, num_embeds_ada_norm=10
    )
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of class labels
            module.dropout_prob = 0.0
    return model


def _unet() -> nn.Module:
    model: nn.Module = import_module("diffusers").UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128, 256),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=128,
        attention_head_dim=8,
    )
    return model


def _decoder() -> nn.Module:
    library = import_module("x_transformers")
    layers = library.Decoder(dim=512, depth=4, heads=8)
    model: nn.Module = library.TransformerWrapper(num_tokens=8192, max_seq_len=256, attn_layers=layers)
    return model


MODELS = {
    "resnet50": _of_timm("resnet50", has_evaluation=True),
    "vit_b_16": _of_timm("vit_base_patch16_224"),
    "dit": Model(
        _dit,
        lambda: {
            "hidden_states": torch.randn(4, 4, 32, 32),
            "timestep": torch.arange(4),
            "class_labels": torch.arange(4),
        },
    ),
    "unet": Model(
        _unet,
        lambda: {
            "sample": torch.randn(4, 4, 32, 32),
            "timestep": torch.tensor(5),
            "encoder_hidden_states": torch.randn(4, 77, 128),
        },
    ),
    "x_transformer": Model(_decoder, lambda: {"x": torch.randint(0, 8192, (4, 256))}),
}


def _loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    result = next(iter(named_tensors(model(**batch)).values()))
    return result.float().square().mean()


def _candidates(model: nn.Module, batch: Batch, candidates: Mapping[str, Candidate]) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each candidate that computes the loss, after a comparison of their results."""
    torch._dynamo.reset()
    losses = {
        name: partial(_loss, candidate(copy.deepcopy(model), batch), batch) for name, candidate in candidates.items()
    }
    expected = losses["original"]()
    for loss in losses.values():
        torch.testing.assert_close(loss(), expected, rtol=1e-3, atol=1e-3)
    return losses


def _step(loss: Callable[[], Tensor]) -> None:
    loss().backward()


def _timed(what: str, copies: Iterator[Mapping[str, Callable[[], Any]]], rounds: int) -> dict[str, dict[str, Figure]]:
    """Return candidate → the times of whole calls of the first copy, and the time of all operation by operation."""
    first = next(copies)
    whole = interleaved(first, rounds, clock=time.process_time)
    by_operation = interleaved_by_operation(chain((first,), copies), max(rounds // COPIES, 1))
    return {name: {what: whole[name], f"{what}, operations": by_operation[name]} for name in first}


@profiled_kernels()
def measured(model: Model, rounds: int) -> dict[str, Figures]:
    """Return candidate → bytes kept for backward, and the times of a training step and of an evaluation."""
    torch.manual_seed(0)
    module, batch = model.make().train(), model.batch()
    losses = (_candidates(module, batch, TRAINING) for _ in range(COPIES))
    first = next(losses)
    figures: dict[str, dict[str, Figure]] = {name: {"kept": kept_bytes(loss)} for name, loss in first.items()}
    steps = ({name: partial(_step, loss) for name, loss in each.items()} for each in chain((first,), losses))
    for name, step in _timed("step", steps, rounds).items():
        figures[name].update(step)
    if model.has_evaluation:
        with torch.no_grad():
            forwards = (_candidates(module.eval(), batch, EVALUATION) for _ in range(COPIES))
            for name, forward in _timed("evaluation", forwards, rounds).items():
                figures[name].update(forward)
    return {**figures}


if __name__ == "__main__":
    compare(__doc__, {name: partial(measured, model) for name, model in MODELS.items()}, RESULTS)
