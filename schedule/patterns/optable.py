"""Vocabulary of torch operations as data, one row per operation.

:func:`.ops.register_op` adds more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

import fused
from schedule.capture import unchanged
from schedule.patterns.normalized_nodes import Attr
from schedule.patterns.ops import ModuleArguments, parse_signature, register_form, register_module, register_op


def _words(text: str) -> list[str]:
    return text.split()


ELEMENTWISE = _words("""
abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos atan sinh cosh tanh
sigmoid erf erfc erfinv floor ceil round trunc frac sign reciprocal relu relu6 silu mish hardswish hardsigmoid
softsign tanhshrink logsigmoid isnan isinf isfinite logical_not bitwise_not selu digamma lgamma
""")

BINARY = _words("""
maximum:c minimum:c eq:c ne:c lt le gt ge logical_and:c logical_or:c logical_xor:c bitwise_and:c bitwise_or:c
bitwise_xor:c remainder fmod floor_divide atan2 matmul bmm mm mv dot outer logaddexp:c fmax:c fmin:c
""")

REDUCTIONS = _words("""
sum mean prod amax amin all any logsumexp norm
""")

VIEWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "view": ("input, *size", ()),
    "reshape": ("input, *shape", ()),
    "permute": ("input, *dims", ("dims",)),
    "expand": ("input, *size, implicit=False", ()),
    "transpose": ("input, dim0, dim1", ("dim0", "dim1")),
    "contiguous": ("input, memory_format=None", ()),
    "flatten": ("input, start_dim=0, end_dim=-1", ("start_dim", "end_dim")),
    "unflatten": ("input, dim, sizes", ("dim",)),
    "squeeze": ("input, dim=None", ("dim",)),
    "unsqueeze": ("input, dim", ()),
    "select": ("input, dim, index", ("dim",)),
    "narrow": ("input, dim, start, length", ("dim",)),
    "split": ("tensor, split_size_or_sections, dim=0", ("dim",)),
    "chunk": ("input, chunks, dim=0", ("dim",)),
    "unbind": ("input, dim=0", ("dim",)),
    "t": ("input", ()),
    "movedim": ("input, source, destination", ()),
    "expand_as": ("input, other", ()),
    "view_as": ("input, other", ()),
    "type_as": ("input, other", ()),
    "detach": ("input", ()),
    "to_local": ("input, *, grad_placements=None", ()),
    "diagonal": ("input, offset=0, dim1=0, dim2=1", ()),
    "broadcast_to": ("input, *size", ()),
    "getitem": ("input, index", ()),
    "identity": ("input", ()),
    "cast": ("input, dtype, non_blocking=False, copy=False, memory_format=None", ()),
    "to": ("input, device=None, dtype=None, non_blocking=False, copy=False, memory_format=None", ()),
}

OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rsqrt": ("input", ()),
    "pow": ("input, exponent", ()),
    "sub": ("input, other, *, alpha=1", ()),
    "div": ("input, other, *, rounding_mode=None", ()),
    "gelu": ("input, *, approximate='none'", ()),
    "softmax": ("input, dim=None, dtype=None", ("dim",)),
    "log_softmax": ("input, dim=None, dtype=None", ("dim",)),
    "leaky_relu": ("input, negative_slope=0.01", ()),
    "elu": ("input, alpha=1.0", ()),
    "celu": ("input, alpha=1.0", ()),
    "softplus": ("input, beta=1, threshold=20", ()),
    "hardtanh": ("input, min_val=-1.0, max_val=1.0", ()),
    "glu": ("input, dim=-1", ("dim",)),
    "clamp": ("input, min=None, max=None", ()),
    "where": ("condition, input, other", ()),
    "masked_fill": ("input, mask, value", ()),
    "tril": ("input, diagonal=0", ()),
    "triu": ("input, diagonal=0", ()),
    "cumsum": ("input, dim, dtype=None", ("dim",)),
    "cat": ("tensors, dim=0", ()),
    "stack": ("tensors, dim=0", ()),
    "repeat": ("input, *repeats", ()),
    "repeat_interleave": ("input, repeats, dim=None, output_size=None", ("dim",)),
    "gather": ("input, dim, index, sparse_grad=False", ("dim",)),
    "index_select": ("input, dim, index", ("dim",)),
    "argmax": ("input, dim=None, keepdim=False", ("dim",)),
    "argmin": ("input, dim=None, keepdim=False", ("dim",)),
    "max": ("input, dim=None, keepdim=False", ("dim",)),
    "min": ("input, dim=None, keepdim=False", ("dim",)),
    "topk": ("input, k, dim=-1, largest=True, sorted=True", ("dim",)),
    "var": ("input, dim=None, unbiased=True, keepdim=False", ("dim",)),
    "std": ("input, dim=None, unbiased=True, keepdim=False", ("dim",)),
    "roll": ("input, shifts, dims=None", ()),
    "flip": ("input, dims", ()),
    "lerp": ("input, end, weight", ()),
    "addcmul": ("input, tensor1, tensor2, value=1", ()),
    "addmm": ("input, mat1, mat2, beta=1, alpha=1", ()),
    "baddbmm": ("input, batch1, batch2, beta=1, alpha=1", ()),
    "einsum": ("equation, *operands", ()),
    "linear": ("input, weight, bias=None", ()),
    "embedding": (
        "input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False",
        (),
    ),
    "layer_norm": ("input, normalized_shape, weight=None, bias=None, eps=1e-05", ()),
    "rms_norm": ("input, normalized_shape, weight=None, eps=None", ()),
    "group_norm": ("input, num_groups, weight=None, bias=None, eps=1e-05", ()),
    "batch_norm": (
        "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-05, "
        "num_batches_tracked=None",
        (),
    ),
    "normalize": ("input, p=2.0, dim=1, eps=1e-12", ("dim",)),
    "pad": ("input, pad, mode='constant', value=None", ()),
    "one_hot": ("tensor, num_classes=-1", ()),
    "cross_entropy": (
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
        "label_smoothing=0.0",
        (),
    ),
    "scaled_dot_product_attention": (
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False",
        (),
    ),
    "clone": ("input, memory_format=None", ()),
    "full": ("size, fill_value, *, dtype=None, device=None, requires_grad=False", ()),
    "tensor": ("data, *, dtype=None, device=None, requires_grad=False", ()),
    "zeros_like": ("input", ()),
    "ones_like": ("input", ()),
    "masked_select": ("input, mask", ()),
}

RANDOM: dict[str, str] = {
    "dropout": "input, p=0.5, training=True",
    "alpha_dropout": "input, p=0.5, training=False",
    "feature_alpha_dropout": "input, p=0.5, training=False",
    "dropout1d": "input, p=0.5, training=True",
    "dropout2d": "input, p=0.5, training=True",
    "dropout3d": "input, p=0.5, training=True",
    "rrelu": "input, lower=0.125, upper=0.3333333333333333, training=False",
    "gumbel_softmax": "logits, tau=1, hard=False, eps=1e-10, dim=-1",
    "bernoulli": "input, p=None",
    "multinomial": "input, num_samples, replacement=False",
    "rand_like": "input",
    "randn_like": "input",
}

CONVOLUTIONS: dict[str, str] = dict.fromkeys(
    ("conv1d", "conv2d", "conv3d"), "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
)

_AVERAGED = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True"
_MAXIMUM = "input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False"
POOLS: dict[str, str] = {
    "avg_pool1d": _AVERAGED,
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), f"{_AVERAGED}, divisor_override=None"),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), _MAXIMUM),
    **{f"adaptive_avg_pool{dims}d": "input, output_size" for dims in (1, 2, 3)},
    **{f"adaptive_max_pool{dims}d": "input, output_size, return_indices=False" for dims in (1, 2, 3)},
}

_PER_DIM = ("kernel_size", "stride", "padding", "dilation", "output_size")

METADATA: dict[str, str] = {
    "shape": "input",
    "size": "input, dim",
    "ndim": "input",
    "numel": "input",
    "getattr": "input, name",
    "is_floating_point": "input",
}

CASTS = {
    "float": torch.float32,
    "half": torch.float16,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "bool": torch.bool,
}

PURE_NUMBERS = (
    math.sqrt, math.log, math.ceil, math.floor, math.exp, math.pow,
    int, float, bool, len, max, min, abs, round, range, tuple, list, slice, isinstance, operator.index,
    operator.is_, operator.is_not, operator.not_, operator.truth, operator.contains,
)  # fmt: skip


def _attributes(*names: str, **renamed: str) -> ModuleArguments:
    """Return a function reading arguments from module attributes of the same name, or renamed ones."""
    table = {n: n for n in names} | renamed

    def read(module: nn.Module) -> Mapping[str, Any]:
        return {argument: getattr(module, attribute) for argument, attribute in table.items()}

    return read


def _parameters(*tensors: str, **plain: str) -> ModuleArguments:
    """Return a function as in :func:`_attributes`, also reading these parameters as :class:`Attr`.

    A parameter the module does not have is None.
    """
    rest = _attributes(**plain)

    def read(module: nn.Module) -> Mapping[str, Any]:
        found = {t: getattr(module, t, None) for t in tensors}
        return {t: None if v is None else Attr(t, v) for t, v in found.items()} | dict(rest(module) or {})

    return read


_of_convolution = _parameters(
    "weight", "bias", stride="stride", padding="padding", dilation="dilation", groups="groups"
)


def _convolution(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the arguments of a convolution, or None if it pads with anything but zeros."""
    if module.padding_mode != "zeros":
        return None
    return _of_convolution(module)


def _pool(name: str) -> ModuleArguments:
    return _attributes(*(argument for argument in parse_signature(POOLS[name])[0] if argument != "input"))


_POOL_CLASSES = {
    "AvgPool": "avg_pool",
    "MaxPool": "max_pool",
    "AdaptiveAvgPool": "adaptive_avg_pool",
    "AdaptiveMaxPool": "adaptive_max_pool",
}
_DROP = _attributes("p", "training", "inplace")
_INPLACE = _attributes("inplace")
MODULE_ROWS: list[tuple[type[nn.Module], str, ModuleArguments]] = [
    (nn.Identity, "identity", _attributes()),
    (nn.ReLU, "relu", _INPLACE),
    (nn.ReLU6, "hardtanh", _attributes("min_val", "max_val", "inplace")),
    (nn.SiLU, "silu", _INPLACE),
    (nn.Mish, "mish", _INPLACE),
    (nn.Hardswish, "hardswish", _INPLACE),
    (nn.Hardsigmoid, "hardsigmoid", _INPLACE),
    (nn.SELU, "selu", _INPLACE),
    (nn.ELU, "elu", _attributes("alpha", "inplace")),
    (nn.LeakyReLU, "leaky_relu", _attributes("negative_slope", "inplace")),
    (nn.Softplus, "softplus", _attributes("beta", "threshold")),
    (nn.Hardtanh, "hardtanh", _attributes("min_val", "max_val", "inplace")),
    (nn.GELU, "gelu", _attributes("approximate")),
    (nn.GLU, "glu", _attributes("dim")),
    (nn.Tanh, "tanh", _attributes()),
    (nn.Sigmoid, "sigmoid", _attributes()),
    (nn.LogSigmoid, "logsigmoid", _attributes()),
    (nn.Softmax, "softmax", _attributes("dim")),
    (nn.LogSoftmax, "log_softmax", _attributes("dim")),
    (nn.Dropout, "dropout", _DROP),
    (nn.Dropout1d, "dropout1d", _DROP),
    (nn.Dropout2d, "dropout2d", _DROP),
    (nn.Flatten, "flatten", _attributes("start_dim", "end_dim")),
    *(
        (getattr(nn, f"{cls}{dims}d"), f"{name}{dims}d", _pool(f"{name}{dims}d"))
        for cls, name in _POOL_CLASSES.items()
        for dims in (1, 2, 3)
    ),
    (nn.Linear, "linear", _parameters("weight", "bias")),
    (nn.Conv1d, "conv1d", _convolution),
    (nn.Conv2d, "conv2d", _convolution),
    (nn.Conv3d, "conv3d", _convolution),
    (
        nn.LayerNorm,
        "layer_norm",
        _parameters("weight", "bias", normalized_shape="normalized_shape", eps="eps"),
    ),
    (nn.RMSNorm, "rms_norm", _parameters("weight", normalized_shape="normalized_shape", eps="eps")),
    (nn.GroupNorm, "group_norm", _parameters("weight", "bias", num_groups="num_groups", eps="eps")),
    (
        nn.Embedding,
        "embedding",
        _parameters(
            "weight",
            padding_idx="padding_idx",
            max_norm="max_norm",
            norm_type="norm_type",
            scale_grad_by_freq="scale_grad_by_freq",
            sparse="sparse",
        ),
    ),
]


def _register_rows() -> None:
    for name in ELEMENTWISE:
        register_op(name, "input")
    for row in BINARY:
        name, _, options = row.partition(":")
        register_op(name, "input, other", commutative=("input", "other") if "c" in options else ())
    for name in REDUCTIONS:
        register_op(name, "input, dim=None, keepdim=False, dtype=None", dims=("dim",))
    register_op("norm", "input, p='fro', dim=None, keepdim=False, dtype=None", dims=("dim",))
    register_op("add", "input, other, *, alpha=1", commutative=("input", "other"))
    register_op("mul", "input, other", commutative=("input", "other"), methods=("multiply",))
    for name, (signature, dims) in OTHERS.items():
        register_op(name, signature, dims=dims)
    for name, (signature, dims) in VIEWS.items():
        register_op(name, signature, dims=dims, view=True)
    for name, signature in RANDOM.items():
        register_op(name, signature, rng=True, view="dropout" in name)
    for name, signature in {**CONVOLUTIONS, **POOLS}.items():
        register_op(name, signature, per_dim=dict.fromkeys(_PER_DIM, int(name[-2])))
    for name, signature in METADATA.items():
        register_op(name, signature, metadata=True)


_PASSING_ON: tuple[Any, ...] = (operator.pos, torch.positive, "positive", "__pos__", unchanged)


def _register_forms() -> None:
    for name, swapped in {
        "add": "radd",
        "mul": "rmul",
        "sub": "rsub",
        "pow": "rpow",
        "matmul": "rmatmul",
    }.items():
        register_form(name, swapped, swap=True)
        register_form(name, f"__{swapped}__", swap=True)
    register_form("sub", torch.rsub, swap=True)
    for method in ("truediv", "__truediv__", "divide", "true_divide"):
        register_form("div", method)
    for method in ("rtruediv", "__rtruediv__", "__rdiv__", "rdiv"):
        register_form("div", method, swap=True)
    register_form("div", operator.truediv)
    register_form("div", operator.itruediv, mutates=True)
    register_form("div", "__itruediv__", mutates=True)
    register_form("div", "itruediv", mutates=True)
    for function in (torch.true_divide, torch.divide):
        register_form("div", function)
    register_form("mul", torch.multiply)
    register_form("sub", torch.subtract)
    register_form("remainder", operator.mod)
    for target in (operator.floordiv, "floordiv", "__floordiv__"):
        register_form("floor_divide", target)
    for target, name in (
        (operator.and_, "bitwise_and"),
        (operator.or_, "bitwise_or"),
        (operator.xor, "bitwise_xor"),
    ):
        register_form(name, target)
    for text, name in (("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor")):
        register_form(name, f"__{text}__")
    register_form("bitwise_not", operator.invert)
    register_form("bitwise_not", "__invert__")
    for same in _PASSING_ON:
        register_form("identity", same)
    register_form("matmul", operator.imatmul, mutates=True)
    register_form("silu", "swish")
    register_form("log_softmax", torch.log_softmax)
    register_form("transpose", "swapaxes", "input, dim0, dim1")
    register_form("transpose", torch.swapaxes, "input, dim0, dim1")
    register_form("transpose", "swapdims", "input, dim0, dim1")
    register_form("transpose", torch.swapdims, "input, dim0, dim1")
    register_form("cat", torch.concat)
    register_form("masked_fill", "masked_fill_", mutates=True)
    register_form("dropout", torch.dropout, "input, p, training")
    register_form("dropout", torch.dropout_, "input, p, training", mutates=True)
    register_form("ndim", "dim")
    register_form("ndim", "ndimension")
    register_form("getattr", getattr)
    register_form("clamp", "clip")
    register_form("where", "where", "input, condition, other")
    for method, dtype in CASTS.items():
        register_form("cast", method, "input, memory_format=None", fixed={"dtype": dtype})
    for kind, name, arguments in MODULE_ROWS:
        register_module(name, kind, arguments)
    register_form("rms_norm", functional.rms_norm)
    register_form("batch_norm", functional.batch_norm)
    register_form("batch_norm", fused.batch_norm)


_register_rows()
_register_forms()
