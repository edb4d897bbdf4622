"""What a training step costs, counted."""

from __future__ import annotations

import copy

import pytest
import torch

import schedule
from schedule.report.costs import kept_bytes, measure, peak_bytes
from tests.zoo import batch, build


def test_the_peaks_of_all_cards_count(monkeypatch: pytest.MonkeyPatch) -> None:
    held, peaks, reset = [100, 20, 0], [100, 25, 7], set()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.add)
    monkeypatch.setattr(torch.cuda, "memory_allocated", held.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    assert peak_bytes(lambda: None, "cuda") == 12 and reset == {0, 1, 2}


@pytest.mark.cuda
@pytest.mark.usefixtures("real_card")
def test_the_peak_on_a_card() -> None:
    torch.cuda.init()
    other = torch.device("cuda", torch.cuda.device_count() - 1)

    def run() -> None:
        for device in ("cuda:0", other):
            torch.empty(2**24, dtype=torch.uint8, device=device)

    assert peak_bytes(run, "cuda") == 2**24 * min(torch.cuda.device_count(), 2)


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


def test_what_a_result_keeps() -> None:
    x, weight = torch.randn(64, 32), torch.randn(32, 32, requires_grad=True)
    of_result = x.nbytes + 4  # tanh saves its result; the sum is one number
    assert kept_bytes(lambda: (x @ weight).tanh().sum()) == of_result
    assert peak_bytes(lambda: (x @ weight).tanh().sum(), "cpu") == 2 * x.nbytes
    assert kept_bytes(lambda: None) == 0
