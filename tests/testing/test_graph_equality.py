"""Assertions about graphs: what is equal passes, and each difference is shown where it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import schedule.testing as testing
from schedule.patterns import graphs_equal
from schedule.patterns.canonical import canonical_lines
from schedule.util.errors import PathError
from tests.patterns.test_equality import EQUAL, UNEQUAL
from tests.zoo import batch, build

X = torch.randn(2, 8)


class Gated(nn.Module):
    """A gated product, computed as ``how`` says."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.q(x)) * torch.sigmoid(m.k(x)) - 1


def otherwise_written(m: Any, x: Tensor) -> Tensor:
    gate = m.k(x).sigmoid()
    return gate * F.gelu(m.q(x)) - 1


def operands_swapped(m: Any, x: Tensor) -> Tensor:
    return 1 - F.gelu(m.q(x)) * torch.sigmoid(m.k(x))


def constant(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.q(x)) * torch.sigmoid(m.k(x)) - 2


def option(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.q(x), approximate="tanh") * torch.sigmoid(m.k(x)) - 1


def dtype(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.q(x)) * torch.sigmoid(m.k(x)).half() - 1


def missing(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.q(x)) * m.k(x) - 1


def path(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.q(x)) * torch.sigmoid(m.q(x)) - 1


MUTATIONS = {
    operands_swapped: "sub(input=1, other=%)",
    constant: "sub(input=%, other=2)",
    option: "gelu(input=%, approximate='tanh')",
    dtype: "cast(input=%, dtype=torch.float16)",
    missing: "—",
    path: "linear(input=x0, weight=self.k.weight)",
}
"""What stands in the first line that is marked."""


def graph(how: Callable[[Any, Tensor], Tensor]) -> testing.Traced:
    return testing.graph_of(Gated(how), X)


def _error(call: Callable[[], None]) -> str:
    with pytest.raises(AssertionError) as failed:
        call()
    return str(failed.value)


def test_what_computes_the_same_is_equal() -> None:
    testing.assert_graphs_equal(graph(plain), graph(otherwise_written))
    assert str(graph(plain)) == str(graph(otherwise_written))


@pytest.mark.parametrize("how", MUTATIONS, ids=lambda how: how.__name__)
def test_a_difference_is_marked(how: Callable[[Any, Tensor], Tensor], tmp_path: Path) -> None:
    golden = tmp_path / "graph.txt"
    testing.assert_graph_matches(graph(plain), golden, update=True)
    for text in (
        _error(lambda: testing.assert_graphs_equal(graph(plain), graph(how))),
        _error(lambda: testing.assert_graph_matches(graph(how), golden)),
    ):
        marked = next(line for line in text.splitlines() if line.startswith(">>>"))
        assert MUTATIONS[how] in re.sub(r"%\d+", "%", marked)
        assert f"in {how.__name__}" in text or how in (missing, path)  # no line of theirs differs first


def test_operations_that_are_alike_are_told_apart_by_their_order() -> None:
    def first(m: Any, x: Tensor) -> Tensor:
        one, other = F.dropout(x), F.dropout(x)
        return torch.sub(one, 2 * one) * other

    def second(m: Any, x: Tensor) -> Tensor:
        one, other = F.dropout(x), F.dropout(x)
        return torch.sub(one, 2 * other) * other

    text = _error(lambda: testing.assert_graphs_equal(graph(first), graph(second)))
    assert any(line.startswith(">>>") for line in text.splitlines()), text


def test_a_line_behind_a_difference_is_not_one() -> None:
    text = _error(lambda: testing.assert_graphs_equal(graph(plain), graph(option)))
    assert text.count(">>> ") == 1 and "  ! " not in text


def test_a_long_line_is_wrapped_and_not_cut() -> None:
    one = fx.symbolic_trace(lambda x: torch.ops.aten.slice_scatter(x, x, 0, 1111111, 2222222, 3333333333))
    other = fx.symbolic_trace(lambda x: torch.ops.aten.slice_scatter(x, x, 0, 1111111, 2222222, 4444444444))
    text = _error(lambda: testing.assert_graphs_equal(one, other))
    assert "3333333333" in text and "4444444444" in text and max(map(len, text.splitlines())) < 140


@pytest.mark.parametrize("pair", EQUAL)
def test_equal_graphs_have_equal_lines(pair: Any, traced: Any) -> None:
    assert canonical_lines(traced(pair[0])) == canonical_lines(traced(pair[1]))


@pytest.mark.parametrize("pair", UNEQUAL)
def test_other_graphs_have_other_lines(pair: Any, traced: Any) -> None:
    assert canonical_lines(traced(pair[0])) != canonical_lines(traced(pair[1]))


@pytest.fixture(name="traced")
def _traced() -> Callable[[Any], fx.Graph]:
    return lambda function: fx.symbolic_trace(function).graph


def test_the_lines_are_the_same_in_every_process() -> None:
    code = "from tests.testing.test_graph_equality import graph, plain; print(graph(plain))"
    root = Path(__file__).parents[2]
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert ran.stdout.strip() == str(graph(plain))


def test_graph_modules_and_exported_programs_are_graphs() -> None:
    testing.assert_graphs_equal(fx.symbolic_trace(Gated(plain)), graph(otherwise_written))
    program = torch.export.export(Gated(plain), (X,))
    testing.assert_graphs_equal(program, torch.export.export(Gated(plain), (torch.randn(2, 8),)))
    text = _error(lambda: testing.assert_graphs_equal(program, torch.export.export(Gated(constant), (X,))))
    assert "aten.sub.Tensor" in text
    with pytest.raises(TypeError, match=r"a Gated is not a graph; pass an fx\.Graph"):
        testing.assert_graphs_equal(Gated(plain), program)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_modules_of_real_models_are_traced_by_path(name: str) -> None:
    model = build(name)
    paths = [path for path, _ in model.named_modules() if path.endswith((".0.mlp", ".1.mlp", ".0.attention.self"))]
    graphs = [testing.graph_of(model, batch(name), path) for path in paths]
    assert paths and "return" in str(graphs[0]) and "check_output" not in str(graphs[0])
    for graph, path in zip(graphs, paths, strict=True):
        testing.assert_graphs_equal(graph, testing.graph_of(build(name), batch(name), path))
    assert type(model) is type(build(name))
    with pytest.raises(PathError):
        testing.graph_of(model, batch(name), "no.such.module")


def test_graphs_of_the_two_modes_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    training, evaluating = (testing.graph_of(model, X, training=flag) for flag in (True, False))
    assert graphs_equal(training.graph, training.graph) and training.graph is not evaluating.graph


def test_equivalent_models_pass_and_others_name_the_tensor() -> None:
    model, twin, other = Gated(plain), Gated(otherwise_written), Gated(constant)
    for each in (twin, other):
        each.load_state_dict(model.state_dict())
    testing.assert_equivalent(model, twin, X)
    assert "the models differ" in _error(lambda: testing.assert_equivalent(model, other, X))
