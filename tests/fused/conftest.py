"""Shared by the tests of the fused ops: the backend, and how far a result may be off."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import fused
from fused.backends import availability
from tests.fused.cases import Case, all_cases

Tensor = torch.Tensor
Function = Callable[..., Tensor]

if importlib.util.find_spec("triton") is None:
    collect_ignore = ["triton"]
else:
    import tests.fused.interpreter  # noqa: F401 - rounds as a GPU does, in every test


COMPILED_AGAIN = {
    "test_strides_do_not_matter",
    "test_within_the_tolerances_on_every_backend",
    "test_inputs_are_never_changed",
}
"""Each compiles an op once more: in the quick suite, one case of each op."""

COMPARISONS = {"test_within_the_tolerances_on_every_backend"}
PERMUTED = {"test_gradients_of_permuted_inputs"}
TRACED = {"test_compiles_without_graph_break_at_any_size"}
HALVES = {"test_half_precision_is_no_worse_than_eager"}
"""In 16 bits the compiled formulas are those of 32, which the quick suite compares."""


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """What the compiler takes long over and another test nearly covers is for the long sweep."""
    first = {case.name.partition(" ")[0]: case.name for case in reversed(all_cases())}
    for item in items:
        chosen = getattr(item, "callspec", None)
        if item.originalname in TRACED and chosen is not None and getattr(chosen.params["case"], "long", False):
            item.add_marker(pytest.mark.slow)
        if item.originalname in PERMUTED and chosen is not None and chosen.id.startswith("inductor"):
            item.add_marker(
                pytest.mark.slow
            )  # permuted before the code is chosen: the reference backend shows the same
        if chosen is None or chosen.params.get("on_backend") not in ("inductor", "triton"):
            continue
        if chosen.params["on_backend"] == "triton":  # through the interpreter
            if chosen.params.get("dtype") == torch.float16 or math.isinf(chosen.params.get("value", 0.0)):
                item.add_marker(pytest.mark.slow)
            continue
        case = chosen.params.get("case")
        is_first = isinstance(case, Case) and case.name in first.values()
        long = getattr(case, "long", False) and not (is_first and item.originalname in COMPARISONS)
        again = item.originalname in COMPILED_AGAIN and isinstance(case, Case) and not is_first
        single = 1 in (chosen.params.get("rows"), chosen.params.get("columns"))
        infinite = math.isinf(chosen.params.get("value", 0.0))
        half = item.originalname in HALVES or chosen.params.get("dtype") == torch.float16
        if long or again or single or infinite or half:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def dynamo_is_up() -> None:
    """Dynamo wraps torch.manual_seed and nn.Module.__init__ for good: let no test be blamed for it."""
    torch.compile(torch.neg, backend="eager")(torch.ones(1))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def plain_backend() -> Iterator[None]:
    """Tests run on the reference backend unless they ask for another."""
    with fused.backend("reference"):
        yield


@pytest.fixture(scope="session")
def warm_inductor() -> None:
    """Pay once for the first compilation of the session."""
    if (problem := availability.why_unavailable("inductor", "cpu")) is not None:
        pytest.skip(problem)
    with fused.backend("inductor"):
        x = torch.randn(4, 8, requires_grad=True)
        fused.bias_gelu(x, torch.randn(8)).sum().backward()


@pytest.fixture
def values_and_gradients() -> Callable[..., tuple[Tensor, ...]]:
    """``run(f, g, *inputs)``: the result of f and the gradients of its floating-point inputs for g."""

    def run(function: Function, g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, g.to(out.dtype)))

    return run


@pytest.fixture
def assert_no_worse() -> Callable[..., None]:
    """Errors against float64: no larger than 1.1 × eager's, in the root mean square and at most.

    A result in float32 may in any case be off by what float32 allows.
    """

    def check(ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
        for position, (mine, theirs, truth) in enumerate(zip(ours, eager, exact, strict=True)):
            for norm in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
                error, allowed = norm(mine.double() - truth), norm(theirs.double() - truth)
                rounding = 1e-6 + 1.3e-6 * norm(truth) if mine.dtype == torch.float32 else 0.0
                assert error <= 1.1 * allowed + rounding, (
                    f"result {position}: {error:.3e} against eager's {allowed:.3e}"
                )

    return check


@pytest.fixture
def saved_bytes() -> Callable[[Callable[[], Tensor]], int]:
    """``count(f)``: the bytes of the distinct tensors that f saves for its backward pass."""

    def count(function: Callable[[], Tensor]) -> int:
        seen: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            seen[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = function()
        total = sum(tensor.numel() * tensor.element_size() for tensor in seen.values())
        assert out.requires_grad
        return total

    return count
