"""Times of a call operation by operation: each operation counts once, at its least."""

from __future__ import annotations

import pytest
import torch

from benchmarks import operations
from benchmarks.operations import Operation, interleaved_by_operation, profiled_kernels, self_seconds

MM, NEXT_MM = (Operation("aten::mm", "[[4, 4], [4, 4]]", number) for number in range(2))


def test_each_operation_is_seen_once_and_the_rest_as_one() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    found = self_seconds(lambda: (x @ x @ x).sum().backward())
    assert all(seconds >= 0 for seconds in found.values())
    assert sum(operation.name == "aten::mm" for operation in found) == 6
    assert found[Operation("whole call", "", 0)] > 0


def test_the_same_work_is_the_same_operation() -> None:
    x = torch.randn(4, 6)

    def sines(*tensors: torch.Tensor) -> list[Operation]:
        found = self_seconds(lambda: [tensor.sin() for tensor in tensors])
        return [operation for operation in found if operation.name == "aten::sin"]

    assert sines(x, x) == sines(x + 1, x * 2)
    assert [operation.number for operation in sines(x, x)] == [0, 1]
    assert all(operation.is_shared for operation in sines(x))
    others = (x, x.t(), x.double(), x[:2])
    assert len({operation.inputs for operation in sines(*others)}) == len(others)
    assert not any(operation.is_shared for operation in self_seconds(lambda: None))


def test_nested_operations_do_not_count_twice() -> None:
    x = torch.randn(512, 512)
    found = self_seconds(lambda: torch.nn.functional.linear(x, x))
    seconds = {operation.name: each for operation, each in found.items()}
    assert seconds["aten::mm"] > seconds["aten::linear"]


def test_the_least_of_each_operation_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([{MM: 2.0, NEXT_MM: 5.0}, {MM: 3.0, NEXT_MM: 1.0}])
    monkeypatch.setattr(operations, "self_seconds", lambda run: next(rounds))
    assert interleaved_by_operation([{"one": lambda: None}], rounds=2) == {"one": 3.0}


def test_operations_of_other_calls_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([{MM: 2.0, NEXT_MM: 5.0}, {MM: 3.0}])
    monkeypatch.setattr(operations, "self_seconds", lambda run: next(rounds))
    assert interleaved_by_operation([{"one": lambda: None}], rounds=2) == {"one": 2.0}


def test_what_candidates_share_counts_with_the_least_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Operation("graph_0_cpp_fused_add_0", "", 0)
    rounds = iter([{MM: 2.0, NEXT_MM: 3.0, own: 9.0}, {MM: 1.0, own: 4.0}])
    monkeypatch.setattr(operations, "self_seconds", lambda run: next(rounds))
    candidates = {"one": lambda: None, "two": lambda: None}
    assert interleaved_by_operation([candidates], rounds=1) == {"one": 13.0, "two": 5.0}


def test_copies_count_together_and_their_first_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    copies = [{"one": lambda copy=copy: called.append(copy)} for copy in "ab"]
    times = iter([{MM: 2.0, NEXT_MM: 5.0}, {MM: 3.0, NEXT_MM: 1.0}])
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
        assert any("cpp_fused" in operation.name for operation in self_seconds(lambda: compiled(torch.randn(64))))
