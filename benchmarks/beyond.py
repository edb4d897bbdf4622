"""Models of other libraries: original, scheduled, torch.compile: ``python -m benchmarks.beyond [--only resnet50 dit]``.

Real architectures of timm, diffusers and x-transformers, which ``make sweep-beyond`` installs into ``build/libraries``,
with random weights and no dropout. One line per model and candidate: time of a training step relative to the original
(medians of interleaved rounds with quartiles), and the bytes that a forward pass keeps for backward. Results of all
candidates are compared before anything is measured. On a shared machine only the ratios are meaningful.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import schedule
from benchmarks.timing import Timing, interleaved, write_json
from schedule.report.costs import kept_bytes
from schedule.util.named_values import named_tensors
from tests.sweep.beyond.timm import library as timm

RESULTS = Path(__file__).parent / "results" / "beyond.json"
RULES = {"original": None, "ours": "default", "ours, memory": ["default", "memory"], "torch.compile": None}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model, and its batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def _of_timm(name: str) -> Model:
    return Model(lambda: timm().create_model(name, num_classes=10), lambda: {"x": torch.randn(4, 3, 224, 224)})


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
    "resnet50": _of_timm("resnet50"),
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


def _candidates(model: nn.Module, batch: Batch) -> Mapping[str, Callable[[], Tensor]]:
    """Return a function for each candidate that computes the loss."""
    torch._dynamo.reset()
    made: dict[str, Callable[..., Any]] = {}
    for name, rules in RULES.items():
        made[name] = own = copy.deepcopy(model)
        if rules is not None:
            schedule.optimize(own, batch, rules=rules)
        if name == "torch.compile":
            made[name] = torch.compile(own)
    return {name: (lambda run=run: _loss(run, batch)) for name, run in made.items()}


def _measured(model: Model, rounds: int) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    losses = _candidates(model.make().train(), model.batch())
    expected = losses["original"]()
    for loss in losses.values():
        torch.testing.assert_close(loss(), expected, rtol=1e-3, atol=1e-3)
    kept = {name: kept_bytes(loss) for name, loss in losses.items()}
    steps = interleaved({name: (lambda loss=loss: loss().backward()) for name, loss in losses.items()}, rounds)
    return {name: {"step": asdict(steps[name]), "kept": kept[name]} for name in losses}


def main() -> None:
    """Compare, measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    table, results = Table("model", "candidate", "step ×", "kept for backward, MiB"), {}
    for name in options.only:
        rows = results[name] = _measured(MODELS[name], options.rounds)
        original = Timing(**rows["original"]["step"]).median
        for candidate, figures in rows.items():
            step = Timing(**figures["step"])
            ratio = f"{step.median / original:.2f} ({step.low / original:.2f}–{step.high / original:.2f})"
            table.add_row(name, candidate, ratio, f"{figures['kept'] / 2**20:.0f}")
        write_json(options.out, results)
    Console().print(table)


if __name__ == "__main__":
    main()
