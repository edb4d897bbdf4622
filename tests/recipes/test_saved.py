"""Recipes saved by an earlier version replay.

``saved.json`` was written by the version of November 22, 2026 (commit 36a16e6): each recipe with the model that it was
made on and, for each step that its replay makes, the number of changed locations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule import Recipe
from tests import zoo
from tests.needs import needs
from tests.recipes import test_transformers as small_transformers
from tests.small import ids, small

SAVED: dict[str, Any] = json.loads(Path(__file__).with_name("saved.json").read_text())
OFTEN = [name for name in SAVED if not name.endswith(("_default", "_memory")) or name.startswith("gpt2")]
MADE = {make.__name__: make for make in small_transformers.LAYERS}


def model_of(name: str, saved: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The model that a recipe was saved for, and a batch of it."""
    torch.manual_seed(0)
    if saved["model"] == "small":
        return small(), ids()
    if name.endswith("_primitives"):
        return MADE[saved["model"]](2), small_transformers.batch()
    return zoo.build(saved["model"]), zoo.batch(saved["model"])


OTHERS_IN_OLD = {"gpt2_all", "t5_all", "vit_all", "vit_default"}
"""Of models that transformers 5.0 writes in another way: GPT-2 and T5 mask attention themselves, ViT adds elsewhere."""


def _marks(name: str) -> list[pytest.MarkDecorator]:
    alike = needs(name not in OTHERS_IN_OLD, f"model of {name} written as in 5.23, on which the recipe was made")
    return [alike] if name in OFTEN else [alike, pytest.mark.slow]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in SAVED])
def test_it_replays(name: str) -> None:
    saved = SAVED[name]
    model, batch = model_of(name, saved)
    sch = schedule.replay(model, Recipe.from_json(json.dumps(saved["recipe"])), batch=batch, trust="tests")
    assert [[step.primitive, sum(step.touched.values())] for step in sch.history] == saved["steps"]
