"""Tensors that are no views, and their memory given back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

import fused

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * 4096


@pytest.mark.parametrize("keep_graph", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("from_graph", [True, False])
@pytest.mark.parametrize("is_view", [True, False])
def test_memory_strides_and_gradients_asked_for(is_view, from_graph, requires_grad, keep_graph):
    leaf = torch.randn(6, 4, requires_grad=from_graph)
    inp = leaf * 2
    inp = inp.t()[1:] if is_view else inp
    out = fused.make_viewless_tensor(inp, requires_grad, keep_graph)
    assert out._base is None
    assert (out.data_ptr(), out.shape, out.stride()) == (inp.data_ptr(), inp.shape, inp.stride())
    assert out.requires_grad == requires_grad
    assert out.is_leaf == (not requires_grad or (not from_graph or (is_view and not keep_graph)))
    if not out.is_leaf:
        out.sum().backward()
        expected = torch.full((6, 4), 2.0)
        if is_view:
            expected[:, 0] = 0
        assert torch.equal(leaf.grad, expected)


def test_not_a_view_is_returned_as_it_is():
    x = torch.randn(3)
    assert fused.make_viewless_tensor(x, False, True) is x
    assert fused.make_viewless_tensor(x, True, True) is x and x.requires_grad
    y = x * 2
    assert fused.make_viewless_tensor(y, True, True) is y and not y.is_leaf


def test_has_a_version_counter_of_its_own():
    base = torch.randn(4, 3)
    view = base[1:]
    out = fused.make_viewless_tensor(view, False, True)
    before = out._version
    base.add_(1)
    assert out._version == before and torch.equal(out, base[1:])
    out.add_(1)
    assert view._version == 1


def test_the_function_passes_gradients_of_any_order():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: fused.MakeViewlessTensor.apply(x.t(), True), x)
    assert torch.autograd.gradgradcheck(lambda x: fused.MakeViewlessTensor.apply(x.t(), True) ** 2, x)
    assert not fused.MakeViewlessTensor.apply(x.t(), False).requires_grad
    leaf = fused.MakeViewlessTensor.apply(x.detach().t(), True)
    assert leaf.requires_grad and leaf.is_leaf and leaf._base is None


def test_tracing_sees_the_input():
    compiled = torch.compile(
        lambda x: fused.make_viewless_tensor(x.t(), True, True) * 2, backend="aot_eager", fullgraph=True
    )
    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(compiled(x), x.t() * 2)
    torch.testing.assert_close(
        torch.func.grad(lambda x: fused.make_viewless_tensor(x.t(), True, True).sum())(x), torch.ones(3, 4)
    )


@pytest.mark.parametrize("make", [fused.MakeViewlessTensor.apply, lambda x, r: fused.make_viewless_tensor(x, r, True)])
def test_what_has_no_gradient(make):
    with pytest.raises(ValueError, match=r"torch.int64 have no gradient.*\[2, 3\]"):
        make(torch.ones(2, 3).long(), True)
    assert make(torch.ones(2, 3).long()[1:], False)._base is None
    with pytest.raises(TypeError, match="must be a tensor, got list"):
        make([1.0], True)


def test_views_are_found_in_any_depth_and_the_message_is_kept():
    x = torch.randn(2, 3)
    fine = [x, (x, [x, None, 1])]
    assert fused.assert_viewless_tensor(fine) is fine
    assert fused.assert_viewless_tensor("anything") == "anything"
    for bad in (x[1:], [x, x[1:]], (x, [x, (x[1:],)])):
        with pytest.raises(ValueError, match=r"\[1, 3\] is a view of one of \[2, 3\].* of stage 3$"):
            fused.assert_viewless_tensor(bad, extra_msg="of stage 3")


def test_data_is_set_only_where_that_frees():
    x, new = torch.randn(2, 3), torch.randn(5)
    fused.safely_set_viewless_tensor_data(x, new)
    assert x.data_ptr() == new.data_ptr()
    with pytest.raises(ValueError, match=r"is a view.*shape \[5\]"):
        fused.safely_set_viewless_tensor_data(torch.randn(2, 3)[1:], new)


def test_a_deallocated_output_frees_its_storage_and_keeps_its_graph():
    x, g = torch.randn(64, 32, requires_grad=True), torch.randn(4, 512)
    out = fused.make_viewless_tensor((x * 3).view(4, 512), requires_grad=True, keep_graph=True)
    storage = weakref.ref(out.untyped_storage())
    fused.deallocate_output(out)
    gc.collect()
    assert storage() is None
    assert out.untyped_storage().nbytes() == out.element_size() and out.numel() == 1
    fused.backward_from_deallocated(out, g)
    torch.testing.assert_close(x.grad, 3 * g.view(64, 32))


@pytest.mark.skipif(not STATM.exists(), reason="no /proc")
def test_the_memory_of_the_process_falls():
    size = 2**28
    x = torch.ones(1, requires_grad=True)

    def stage() -> torch.Tensor:
        return fused.make_viewless_tensor((x + torch.ones(size // 4)).view(-1, 2), True, True)

    out = stage()
    held = resident_bytes()
    fused.deallocate_output(out)
    assert held - resident_bytes() > 0.9 * size
    view = (x + torch.ones(size // 4)).view(-1, 2)
    held = resident_bytes()
    view.data = torch.empty(1)  # what would be without a viewless tensor
    assert held - resident_bytes() < 0.1 * size


@pytest.mark.cuda
@pytest.mark.usefixtures("real_card")
def test_the_allocators_figure_falls():
    x = torch.ones(1, requires_grad=True, device="cuda")
    out = fused.make_viewless_tensor((x + torch.ones(2**24, device="cuda")).view(-1, 2), True, True)
    held = torch.cuda.memory_allocated()
    fused.deallocate_output(out)
    assert held - torch.cuda.memory_allocated() > 0.9 * 2**26


def test_backward_of_a_scalar_needs_no_gradient():
    x = torch.randn(3, requires_grad=True)
    out = x.sum()
    fused.deallocate_output(out)
    fused.backward_from_deallocated(out)
    assert torch.equal(x.grad, torch.ones(3))


def test_what_cannot_be_freed_or_gone_back_through():
    fused.deallocate_output(None)
    with pytest.raises(ValueError, match="is a view"):
        fused.deallocate_output(torch.randn(3, 4)[1:])
    with pytest.raises(TypeError, match="a plain tensor has memory to free, not list"):
        fused.deallocate_output([torch.randn(3)])
    with pytest.raises(ValueError, match="has no graph"):
        fused.backward_from_deallocated(torch.randn(3), torch.randn(3))
    out = torch.randn(3, 4, requires_grad=True) * 2
    fused.deallocate_output(out)
    with pytest.raises(RuntimeError, match=r"[Mm]ismatch in shape"):
        fused.backward_from_deallocated(out, torch.randn(4, 3))
