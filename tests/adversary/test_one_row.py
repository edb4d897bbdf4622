"""Models recorded with a batch of one row, called with more: as the original, without an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule.capture.recording.structure import leaves, map_structure
from tests.sweep.models import build

NAMES = [
    "albert", "bart", "beit", "bert", "bert-generation", "big_bird", "blip", "blip-2", "bridgetower", "bros",
    "camembert", "clip", "convbert", "data2vec-text", "deberta", "deberta-v2", "deit", "distilbert", "electra",
    "ernie", "flava", "funnel", "gpt2", "gpt_neox", "layoutlm", "llama", "longformer", "luke", "lxmert", "markuplm",
    "megatron-bert", "mobilebert", "mpnet", "mra", "nystromformer", "opt", "perceiver", "rembert", "roberta",
    "roc_bert", "roformer", "splinter", "squeezebert", "t5", "tapas", "vilt", "visual_bert", "vit", "xlm-roberta",
    "xmod",
]  # fmt: skip


def _rows(value: Any, count: int) -> Any:
    """``value`` with its first row alone, or repeated."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] != 2:
            return leaf
        return torch.cat([leaf] * 2)[:count] if count > 2 else leaf[:count]

    return map_structure(value, of)


def _call(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [leaf for _, leaf in leaves(model(**inputs)) if isinstance(leaf, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_model_recorded_with_one_row_takes_more(name: str) -> None:
    built = build(name)
    twin, model = built.model.eval(), copy.deepcopy(built.model).eval()
    inputs = dict(built.batch)
    assert any(leaf.shape[:1] == (2,) for _, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor))
    schedule.optimize(model, _rows(inputs, 1), rules="all", cost_guard=False)
    for count in (2, 4, 1):
        expected = _call(twin, _rows(inputs, count))
        for ours, theirs in zip(_call(model, _rows(inputs, count)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
