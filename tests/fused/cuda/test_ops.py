"""Every op of the table on a card: captured in a graph, under autocast, on other streams and cards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fused.cases import Case, Tensor, all_cases

pytestmark = pytest.mark.cuda

CASES = [case for case in all_cases() if case.triton]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
Run = Callable[..., tuple[Tensor, ...]]
OnCard = Callable[..., list[Tensor]]


def assert_alike(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tolerance: float) -> None:
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * (float(other.abs().max()) + 1))


@every_case
def test_a_captured_graph_computes_what_was_captured(
    case: Case, real_card: torch.device, on_card: OnCard, results_and_gradients: Run
) -> None:
    inputs, others = on_card(case, torch.bfloat16), on_card(case, torch.bfloat16, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results_and_gradients(case.op, inputs)  # compiles, which a capture does not allow
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results_and_gradients(case.op, inputs)
    with torch.no_grad():
        for mine, other in zip(inputs, others, strict=True):
            mine.copy_(other)
    graph.replay()
    if not case.random:
        assert_alike(captured, results_and_gradients(case.op, others), 0.0)
        return
    first = [tensor.clone() for tensor in captured]
    graph.replay()
    seeds = [results_and_gradients(case.op, others)[0] for _ in range(2)]
    drawn = not torch.equal(*seeds)
    assert drawn != all(torch.equal(a, b) for a, b in zip(first, captured, strict=True))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_as_in_eager(
    case: Case, dtype: torch.dtype, card: torch.device, on_card: OnCard, results_and_gradients: Run
) -> None:
    inputs = on_card(case, dtype)
    found = []
    for function in (case.op, case.eager):
        with torch.autocast(card.type, torch.bfloat16):
            torch.manual_seed(3)
            found.append(results_and_gradients(function, inputs))
    assert_alike(*found, tolerance=5e-2)


@every_case
def test_kernels_run_on_the_current_stream(
    case: Case, real_card: torch.device, on_card: OnCard, results_and_gradients: Run
) -> None:
    inputs, others = on_card(case, torch.float32), on_card(case, torch.float32, seed=1)
    if case.random:
        pytest.skip("draws random numbers")
    expected = results_and_gradients(case.op, others)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # a kernel on another stream reads the inputs before they are written
        with torch.no_grad():
            for mine, other in zip(inputs, others, strict=True):
                mine.copy_(other)
        found = results_and_gradients(case.op, inputs)
    stream.synchronize()
    assert_alike(found, expected, 0.0)


@every_case
def test_kernels_run_on_the_card_of_their_inputs(
    case: Case, real_card: torch.device, on_card: OnCard, results_and_gradients: Run
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    inputs = on_card(case, torch.float32)
    moved = [one.detach().to("cuda:1").requires_grad_(one.requires_grad) for one in inputs]
    found = results_and_gradients(case.op, moved)
    assert all(tensor.device == torch.device("cuda:1") for tensor in found)
    if not case.random:
        assert_alike(tuple(one.to("cuda:0") for one in found), results_and_gradients(case.op, inputs), 0.0)
