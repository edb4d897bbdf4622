"""What a training step costs, counted."""

from __future__ import annotations

import copy

import pytest
import torch

import schedule
from schedule.report.costs import measure
from tests.zoo import batch, build


@pytest.mark.filterwarnings("ignore::schedule.runtime.FallbackWarning")
def test_a_call_of_a_new_kind_counts_as_it_will_run() -> None:
    model, padded = build("bert"), batch("bert")
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    full = copy.deepcopy(padded)  # transformers makes no mask of it: another kind of call
    padded["attention_mask"][0, :2] = 0
    original = measure(model, full)
    schedule.optimize(model, padded, cost_guard=False)
    first = measure(model, full)
    assert first.saved_bytes < original.saved_bytes
    model(**full)
    assert first == measure(model, full)
