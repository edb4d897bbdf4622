"""A linear layer by oneDNN: the same as F.linear in every layout, and F.linear itself for all else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fused
from fused.backends import onednn

Multiply = Callable[[Tensor, Tensor], Tensor]
Products = list[tuple[tuple[int, ...], tuple[int, ...]]]
ROWS, IN, OUT = 12, 8, 16
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[Products]:
    """oneDNN for products of any size; the shapes of what it multiplies."""
    made: Products = []
    product = onednn.product

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling():
            made.append((tuple(x.shape), tuple(weight.shape)))
        return product(x, weight, bias)

    monkeypatch.setenv("FUSED_ONEDNN", "1")
    monkeypatch.setattr(onednn, "product", watched)
    monkeypatch.setattr(importlib.import_module("fused.linear"), "LEAST_PRODUCTS", 1)
    with fused.backend("auto"):
        yield made


def operands(x: Tensor | None = None, weight: Tensor | None = None, biased: bool = True) -> list[Tensor]:
    x = torch.randn(3, ROWS // 3, IN) if x is None else x
    weight = torch.randn(OUT, IN) if weight is None else weight
    given = [x, weight, torch.randn(len(weight))] if biased else [x, weight]
    return [tensor.requires_grad_() for tensor in given]


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], g: Callable[[Tensor], Tensor]) -> list[Tensor]:
    result = function(*inputs)
    return [result, *torch.autograd.grad(result, inputs, g(result))]


def assert_like(found: list[Tensor], expected: list[Tensor]) -> None:
    """The result and the gradients of operands; result and weight lie as torch's do."""
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert [found[i].stride() for i in (0, 2)] == [expected[i].stride() for i in (0, 2)]


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "a row": lambda: torch.randn(IN),
    "a matrix": lambda: torch.randn(ROWS, IN),
    "four dimensions": lambda: torch.randn(2, 1, 6, IN),
    "transposed": lambda: torch.randn(IN, ROWS).t(),
    "batch second": lambda: torch.randn(4, 3, IN).transpose(0, 1),
    "features first": lambda: torch.randn(3, IN, 4).transpose(1, 2),
    "gaps between rows": lambda: torch.randn(3, 4, 2 * IN)[..., :IN],
    "gaps between numbers": lambda: torch.randn(3, 4, 2 * IN)[..., ::2],
    "one row many times": lambda: torch.randn(IN).expand(3, 4, IN),
    "one column many times": lambda: torch.randn(ROWS, 1).expand(ROWS, IN),
    "from an odd address": lambda: torch.randn(ROWS * IN + 1)[1:].view(ROWS, IN),
}
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda y: torch.randn_like(y),
    "expanded": lambda y: torch.ones(()).expand_as(y),
    "transposed": lambda y: torch.randn(y.shape[::-1]).permute(*reversed(range(y.ndim))),
}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_input(layout: str, biased: bool, products: Products) -> None:
    inputs = operands(LAYOUTS[layout](), biased=biased)
    for g in GRADIENTS.values():
        torch.manual_seed(1)
        found = gradients(fused.linear, inputs, g)
        torch.manual_seed(1)
        assert_like(found, gradients(F.linear, inputs, g))
    assert len(products) == 3 * len(GRADIENTS)


def test_a_weight_stored_the_other_way_gets_its_gradient_so(products: Products) -> None:
    """As transformers' Conv1D: autograd would copy a gradient that lies otherwise."""
    matrix = torch.randn(IN, OUT, requires_grad=True)
    inputs = [torch.randn(3, 4, IN, requires_grad=True), matrix, torch.randn(OUT, requires_grad=True)]

    def ours(x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        return fused.linear(x, matrix.t(), bias)

    assert_like(gradients(ours, inputs, torch.ones_like), gradients(lambda x, w, b: x @ w + b, inputs, torch.ones_like))
    assert products == [((3, 4, IN), (OUT, IN)), ((ROWS, OUT), (IN, OUT)), ((IN, ROWS), (OUT, ROWS))]


@pytest.mark.parametrize(("rows", "out"), [(64, 64), (5, 3)])
def test_the_smaller_copy_is_made_for_the_gradient_of_the_weight(rows: int, out: int, products: Products) -> None:
    inputs = [torch.randn(rows, IN), torch.randn(out, IN, requires_grad=True), torch.randn(out)]
    result = fused.linear(*inputs)
    (found,) = torch.autograd.grad(result, inputs[1], torch.ones_like(result))
    torch.testing.assert_close(found, inputs[0].sum(0).expand(out, IN), rtol=1e-5, atol=1e-5)
    assert found.is_contiguous()
    assert products[1:] == [((IN, rows), (out, rows)) if rows == 64 else ((out, rows), (IN, rows))]


def test_large_operands_that_lie_in_columns_are_multiplied_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """oneDNN would copy all of them; the last rows are fewer."""
    monkeypatch.setattr(onednn, "_LARGE", 1)
    monkeypatch.setattr(onednn, "_ROWS_AT_A_TIME", 5)
    for x in (torch.randn(IN, ROWS).t(), torch.randn(2, IN, ROWS).transpose(1, 2)):
        weight, bias = torch.randn(OUT, IN), torch.randn(OUT)
        torch.testing.assert_close(fused.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
        assert fused.linear(x, weight).is_contiguous()
        fused.linear(x, weight.requires_grad_()).add_(1).sum().backward()  # it is no view of something else


def test_weights_with_gaps_are_left_to_torch(products: Products) -> None:
    """oneDNN has a slow loop for them."""
    wide = torch.randn(2 * OUT, 2 * IN)
    for weight in (wide[:OUT, :IN], wide[::2, :IN], wide[:OUT, ::2], wide[:1, :IN].expand(OUT, IN)):
        inputs = operands(weight=weight.detach())
        products.clear()
        assert_like(gradients(fused.linear, inputs, torch.ones_like), gradients(F.linear, inputs, torch.ones_like))
        assert all(shapes != ((3, 4, IN), (OUT, IN)) for shapes in products)


def test_only_what_is_wanted_is_multiplied(products: Products) -> None:
    x, weight = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    fused.linear(x, weight.requires_grad_()).sum().backward()
    assert len(products) == 2
    with torch.no_grad():
        fused.linear(x, weight)
    with torch.inference_mode():
        assert fused.linear(x, weight).is_inference()
    assert len(products) == 4


def test_second_derivatives() -> None:
    inputs = operands()

    def penalty(function: Callable[..., Tensor]) -> list[Tensor]:
        (gradient,) = torch.autograd.grad(function(*inputs).tanh().sum(), inputs[0], create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), inputs))

    for mine, theirs in zip(penalty(fused.linear), penalty(F.linear), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_many_gradients_at_once() -> None:
    inputs = operands()

    def jacobian(function: Callable[..., Tensor]) -> list[Tensor]:
        result = function(*inputs)
        g = torch.arange(2 * result.numel(), dtype=torch.float32).view(2, *result.shape)
        return list(torch.autograd.grad(result, inputs, g, is_grads_batched=True))

    for mine, theirs in zip(jacobian(fused.linear), jacobian(F.linear), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_it_saves_what_eager_saves_and_no_more() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        inputs = operands()
        fused.linear(*inputs)
    assert [tensor.data_ptr() for tensor in saved] == [inputs[0].data_ptr(), inputs[1].data_ptr()]


def test_a_weight_changed_after_the_forward_is_refused() -> None:
    x, weight = torch.randn(ROWS, IN, requires_grad=True), torch.randn(OUT, IN)
    y = fused.linear(x, weight)
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class _Counter(TorchDispatchMode):
    observes_only = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


def _autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return fused.linear(x, w)


def _dispatch_mode(x: Tensor, w: Tensor) -> Tensor:
    with _Counter():
        return fused.linear(x, w)


def _reference(x: Tensor, w: Tensor) -> Tensor:
    with fused.backend("reference"):
        return fused.linear(x, w)


def _forward_mode(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.jvp(lambda x: fused.linear(x, w), (x,), (x,))[1]


def _both(change: Callable[[Tensor], Tensor]) -> tuple[Multiply, Multiply]:
    """Ours and torch's, of changed operands."""
    return lambda x, w: fused.linear(change(x), change(w)), lambda x, w: F.linear(change(x), change(w))


LEFT_TO_TORCH: dict[str, tuple[Multiply, Multiply]] = {
    "autocast": (_autocast, lambda x, w: F.linear(x.bfloat16(), w.bfloat16())),
    "bfloat16": _both(torch.Tensor.bfloat16),
    "float64": _both(torch.Tensor.double),
    "the meta device": _both(lambda tensor: tensor.to("meta")),
    "a subclass": (lambda x, w: fused.linear(x.as_subclass(_Subclass), w), F.linear),
    "a dispatch mode": (_dispatch_mode, F.linear),
    "the reference asked for": (_reference, F.linear),
    "vmap": (lambda x, w: torch.vmap(lambda row: fused.linear(row, w))(x), F.linear),
    "forward mode": (_forward_mode, F.linear),
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_is_left_to_torch(name: str, products: Products) -> None:
    x, weight = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    ours, theirs = LEFT_TO_TORCH[name]
    found, expected = ours(x, weight), theirs(x, weight)
    assert found.dtype == expected.dtype and found.device == expected.device
    if not found.is_meta:
        torch.testing.assert_close(found.as_subclass(Tensor), expected)
    assert not products


def test_small_products_are_left_to_torch(products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fused.linear"), "LEAST_PRODUCTS", ROWS * IN * OUT + 1)
    x, weight = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    assert torch.equal(fused.linear(x, weight), F.linear(x, weight)) and not products
    fused.linear(torch.randn(ROWS + 1, IN), weight)
    assert len(products) == 1


@pytest.mark.parametrize("wrong", [(torch.randn(3, 7), torch.randn(4, 8)), (torch.randn(3, 8), torch.randn(4, 8, 1))])
def test_operands_that_do_not_fit_raise_as_in_torch(wrong: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(RuntimeError) as theirs:
        F.linear(*wrong)
    with pytest.raises(RuntimeError) as ours:
        fused.linear(*wrong)
    assert str(ours.value) == str(theirs.value)


def test_compiled_it_is_one_graph_with_the_same_products() -> None:
    inputs = operands()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph

    def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused.linear(fused.linear(x, weight, bias).tanh(), weight.t())

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight, bias).tanh(), weight.t())

    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    assert_like(gradients(compiled, inputs, torch.ones_like), gradients(eager, inputs, torch.ones_like))
    called = {str(node.target) for graph in graphs for part in graph.modules() for node in part.graph.nodes}  # type: ignore
    assert "fused.onednn_product.default" in called


def test_exported_it_is_a_plain_linear() -> None:
    class Layer(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return fused.linear(x, self.weight, self.bias)

    program = torch.export.export(Layer(IN, OUT), (torch.randn(ROWS, IN),))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert called == {"aten.linear.default"}


def test_the_op_of_a_compiled_graph_keeps_its_promises() -> None:
    inputs = tuple(tensor.detach() for tensor in operands())
    torch.library.opcheck(torch.ops.fused.onednn_product, inputs, test_utils=("test_schema", "test_faketensor"))


def test_what_no_gradient_needs_is_not_saved_and_may_change(products: Products) -> None:
    x, weight, bias = operands()
    x.requires_grad_(False)
    result = fused.linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)  # the gradient of the input would need it
    (found,) = torch.autograd.grad(result, weight, torch.ones_like(result))
    torch.testing.assert_close(found, x.sum((0, 1)).expand(OUT, IN), rtol=1e-5, atol=1e-5)
    weight.requires_grad_(False)
    result = fused.linear(x.requires_grad_(), weight, bias)
    with torch.no_grad():
        x.add_(1)
    (found,) = torch.autograd.grad(result, x, torch.ones_like(result))
    torch.testing.assert_close(found, weight.sum(0).expand_as(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_weights_run_in_torch(products: Products, layout: torch.layout) -> None:
    x, weight, bias = torch.randn(ROWS, IN), torch.randn(OUT, IN).relu().to_sparse(layout=layout), torch.randn(OUT)
    for given in ((x, weight), (x, weight, bias)):
        outcomes = []
        for function in (F.linear, fused.linear):
            try:
                outcomes.append(function(*given))
            except RuntimeError as error:  # torch has no sum of a dense tensor and such a product
                outcomes.append(str(error))
        if isinstance(outcomes[0], Tensor):
            torch.testing.assert_close(*outcomes)
        else:
            assert outcomes[0] == outcomes[1]
    assert not products
