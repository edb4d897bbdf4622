"""Times of a call operation by operation: each operation counts once, at its least."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import operations
from benchmarks.operations import interleaved_by_operation, profiled_kernels, self_seconds


def test_each_operation_is_seen_once_and_the_rest_as_one() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    found = self_seconds(lambda: (x @ x @ x).sum().backward())
    assert all(seconds >= 0 for seconds in found.values())
    assert [number for name, number in found if name == "aten::mm"] == [*range(6)]
    assert found["whole call", 0] > 0


def test_nested_operations_do_not_count_twice() -> None:
    x = torch.randn(512, 512)
    found = self_seconds(lambda: torch.nn.functional.linear(x, x))
    assert found["aten::mm", 0] > found["aten::linear", 0]


def test_the_least_of_each_operation_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: Iterator[dict[tuple[str, int], float]] = iter(
        [{("mm", 0): 2.0, ("mm", 1): 5.0}, {("mm", 0): 3.0, ("mm", 1): 1.0}]
    )
    monkeypatch.setattr(operations, "self_seconds", lambda run: next(rounds))
    assert interleaved_by_operation([{"one": lambda: None}], rounds=2) == {"one": 3.0}


def test_copies_count_together_and_their_first_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    copies = [{"one": lambda copy=copy: called.append(copy)} for copy in "ab"]
    times = iter([{("mm", 0): 2.0, ("mm", 1): 5.0}, {("mm", 0): 3.0, ("mm", 1): 1.0}])
    monkeypatch.setattr(operations, "self_seconds", lambda run: run() or next(times))
    assert interleaved_by_operation(iter(copies), rounds=1) == {"one": 3.0}
    assert called == ["a", "a", "b", "b"]


def test_candidates_take_turns_to_be_first(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    candidates = {name: (lambda name=name: called.append(name)) for name in "ab"}
    monkeypatch.setattr(operations, "self_seconds", lambda run: run() or {})
    interleaved_by_operation([candidates], rounds=2)
    assert called == ["a", "b", *"ab", *"ba"]


def test_compiled_kernels_are_seen() -> None:
    with profiled_kernels():
        compiled = torch.compile(lambda x: x.sin().cos())
        compiled(torch.randn(64))
        assert any("cpp_fused" in name for name, _ in self_seconds(lambda: compiled(torch.randn(64))))
