"""Of 16-bit numbers on the CPU, no op casts a whole tensor: that takes longer than the op itself."""

import pytest
import torch

import fused

BATCH, CHANNELS, SIDE = 4, 32, 64
ROWS, HIDDEN = 512, 1024


def _rows():
    return torch.randn(ROWS, HIDDEN)


def _images(layout=torch.contiguous_format):
    return torch.randn(BATCH, CHANNELS, SIDE, SIDE).contiguous(memory_format=layout)


def _batch_norm(activation, residual=False):
    def run(x, weight, bias, other=None):
        return fused.batch_norm(x, None, None, weight, bias, True, activation=activation, residual=other)

    def inputs(layout=torch.contiguous_format):
        rows = [torch.randn(CHANNELS), torch.randn(CHANNELS)]
        return [_images(layout), *rows, *([_images(layout)] if residual else [])]

    return run, inputs


CASES = {
    "gated_residual of rows": (fused.gated_residual, lambda: [_rows(), _rows(), torch.randn(HIDDEN)]),
    "gated_residual of images": (fused.gated_residual, lambda: [_images(), _images(), torch.randn(CHANNELS, 1, 1)]),
    "batch_norm silu": _batch_norm("silu"),
    "batch_norm relu, residual": _batch_norm("relu", residual=True),
    "batch_norm silu, channels last": (
        _batch_norm("silu")[0],
        lambda: _batch_norm("silu")[1](torch.channels_last),
    ),
    "group_norm": (
        lambda x, weight, bias: fused.group_norm(x, 8, weight, bias),
        lambda: [_images(), torch.randn(CHANNELS), torch.randn(CHANNELS)],
    ),
    "group_norm, channels last, no parameters": (
        lambda x: fused.group_norm(x, 8),
        lambda: [_images(torch.channels_last)],
    ),
    "layer_norm": (
        lambda x, weight, bias: fused.layer_norm(x, weight, bias, 1e-5),
        lambda: [_rows(), torch.randn(HIDDEN), torch.randn(HIDDEN)],
    ),
    "layer_norm, no parameters": (lambda x: fused.layer_norm(x, None, None, 1e-5), lambda: [_rows()]),
    "linear_cross_entropy": (
        lambda hidden, weight, bias: fused.linear_cross_entropy(hidden, weight, torch.arange(ROWS), bias),
        lambda: [_rows(), torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN)],
    ),
    **{
        name: (lambda x, name=name: fused.bias_activation(x, None, name), lambda: [_rows()])
        for name in ("relu", "relu6", "silu", "hard_swish", "sigmoid", "gelu")
    },
}


def _casts(run, inputs, dtype):
    """Return the sizes of the whole tensors that were cast, forward and backward."""
    given = [each.to(dtype).requires_grad_() for each in inputs]
    whole = max(each.numel() for each in given)

    def step():
        result = run(*given)
        torch.autograd.grad(result, given, torch.ones_like(result))

    step()  # compiles, and checks what it compiled
    with torch.profiler.profile(record_shapes=True) as profiled:
        step()
    cast = [event.input_shapes[0] for event in profiled.events() if event.name == "aten::_to_copy"]
    return [shape for shape in cast if torch.Size(shape).numel() >= whole]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_no_whole_tensor_is_cast(name, dtype):
    run, inputs = CASES[name]
    torch.manual_seed(0)
    with fused.backend("auto"):
        assert _casts(run, inputs(), dtype) == []


def test_casts_are_seen():
    run, inputs = CASES["gated_residual of rows"]
    with fused.backend("reference"):
        assert _casts(run, inputs(), torch.bfloat16) == [[ROWS, HIDDEN]] * 3
