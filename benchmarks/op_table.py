"""Table for `benchmarks/ops.py` with each fused op and its alternatives for the same computation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import fused
from benchmarks import eager_expressions as eager

Tensor = torch.Tensor
Function = Callable[..., Any]
Shape = tuple[int, ...]

Sizes = dict[str, Shape]


def _sizes(tiny: Shape, small: Shape, medium: Shape, large: Shape, card: Shape) -> Sizes:
    """Name the sizes: for a dry run, bound by launches, of a CPU's caches, beyond them, beyond a card's."""
    return {"tiny": tiny, "small": small, "medium": medium, "large": large, "card": card}


ROWS_AND_COLUMNS = _sizes((6, 32), (512, 768), (4096, 3072), (8192, 11008), (16384, 8192))
SCORES = _sizes((1, 2, 8, 16), (2, 12, 128, 128), (4, 12, 512, 512), (1, 32, 2048, 2048), (2, 32, 2048, 2048))
HEADS = _sizes((1, 4, 8, 16), (2, 12, 128, 64), (4, 32, 512, 128), (1, 32, 4096, 128), (8, 32, 4096, 128))
IMAGES = _sizes((1, 32, 4, 4), (2, 128, 32, 32), (2, 320, 64, 64), (1, 128, 256, 256), (32, 320, 128, 128))
LAYERS = _sizes((8, 16, 32), (512, 768, 768), (1024, 768, 3072), (4096, 2048, 8192), (16384, 4096, 4096))
LOGITS = _sizes((6, 100), (128, 50257), (512, 50257), (1024, 128256), (2048, 128256))
PROJECTION = _sizes((6, 16, 100), (128, 256, 50257), (512, 768, 50257), (1024, 2048, 128256), (2048, 2048, 128256))


def nbytes(*tensors: Tensor) -> int:
    """Return the total bytes of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Row:
    """One op with its alternatives.

    Attributes:
        name: name in the table.
        eager: the expression as written in HuggingFace models.
        ours: the fused op.
        inputs: makes the tensors for a shape; floating-point ones get a gradient unless their position is in `frozen`.
        saved: returns the minimum of bytes to save for the backward pass, for given inputs.
        sizes: size name → shape.
        frozen: positions of the inputs without a gradient.
        native: torch's op for the same job, as name and function.
        liger: name of Liger-Kernel's module, and a function to adapt it to these inputs; for CUDA.
        memory_bound: whether the op can be as fast as a copy.
        random: whether it draws random numbers, so results are not comparable.
    """

    name: str
    eager: Function
    ours: Function
    inputs: Callable[[Shape], Sequence[Tensor]]
    saved: Callable[..., int]
    sizes: Sizes = field(default_factory=lambda: ROWS_AND_COLUMNS)
    frozen: tuple[int, ...] = ()
    native: tuple[str, Function] | None = None
    liger: tuple[str, Callable[[Any], Function]] | None = None
    memory_bound: bool = True
    random: bool = False

    def peers(self, device: str) -> dict[str, Function]:
        """Return the existing ops for the same job available on ``device``."""
        found = {} if self.native is None else {self.native[0]: self.native[1]}
        if self.liger is not None and device == "cuda" and importlib.util.find_spec("liger_kernel"):
            module, adapt = self.liger
            found["Liger"] = adapt(importlib.import_module(module))
        return found


def _norm_inputs(shape: Shape) -> list[Tensor]:
    return [torch.randn(shape), torch.randn(shape[-1])]


def _scaled_images(shape: Shape) -> list[Tensor]:
    of_sample = (*shape[:2], 1, 1)
    return [torch.randn(each) for each in (shape, shape[1:2], shape[1:2], of_sample, of_sample)]


def _normed_images(shape: Shape) -> list[Tensor]:
    """Return images with the channels last, as convolutions run fastest, weight, bias and residual."""
    x, residual = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for _ in range(2))
    return [x, torch.randn(shape[1]), torch.randn(shape[1]), residual]


def _rotary_inputs(shape: Shape) -> list[Tensor]:
    batch, heads, length, dim = shape
    angles = torch.rand(batch, length, dim // 2) * 6.3
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return [torch.randn(shape), torch.randn(batch, max(heads // 4, 1), length, dim), cos, sin]


def _causal_mask(shape: Shape) -> Tensor:
    queries, keys = shape[-2:]
    return torch.full((1, 1, queries, keys), torch.finfo(torch.bfloat16).min).triu(keys - queries + 1)


def _per_row(tensor: Tensor) -> int:
    return 4 * (tensor.numel() // max(tensor.shape[-1], 1))


def _probabilities(scores: Tensor, *_: Tensor) -> int:
    return scores.numel() * (scores.element_size() + (scores.element_size() == 2))


TABLE = [
    Row(
        "new_gelu",
        eager.new_gelu,
        lambda x: fused.new_gelu(x),
        lambda shape: [torch.randn(shape)],
        nbytes,
        native=("F.gelu", lambda x: F.gelu(x, approximate="tanh")),
    ),
    Row(
        "bias_gelu",
        lambda x, bias: F.gelu(x + bias),
        lambda x, bias: fused.bias_gelu(x, bias, "none"),
        _norm_inputs,
        nbytes,
    ),
    Row(
        "bias_gelu tanh",
        lambda x, bias: eager.new_gelu(x + bias),
        lambda x, bias: fused.bias_gelu(x, bias),
        _norm_inputs,
        nbytes,
    ),
    Row(
        "quick_gelu",
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: fused.bias_activation(x, None, "quick_gelu"),
        lambda shape: [torch.randn(shape)],
        nbytes,
    ),
    Row(
        "bias_squared_relu",
        lambda x, bias: F.relu(x + bias).square(),
        lambda x, bias: fused.bias_activation(x, bias, "relu2"),
        _norm_inputs,
        nbytes,
    ),
    Row(
        "star_relu",
        lambda x, scale, bias: scale * F.relu(x) ** 2 + bias,
        lambda x, scale, bias: fused.star_relu(x, scale, bias),
        lambda shape: [torch.randn(shape), torch.randn(1), torch.randn(1)],
        lambda x, scale, bias: nbytes(x, scale),
    ),
    Row(
        "swiglu of two tensors",
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up: fused.gated_activation(gate, up, "silu"),
        lambda shape: [torch.randn(shape), torch.randn(shape)],
        nbytes,
        liger=("liger_kernel.ops.swiglu", lambda module: module.LigerSiLUMulFunction.apply),
    ),
    Row(
        "geglu tanh",
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        lambda gate, up: fused.gated_activation(gate, up, "gelu_tanh"),
        lambda shape: [torch.randn(shape), torch.randn(shape)],
        nbytes,
        liger=("liger_kernel.ops.geglu", lambda module: module.LigerGELUMulFunction.apply),
    ),
    Row(
        "swiglu packed",
        lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
        lambda y: fused.swiglu(y),
        lambda shape: [torch.randn(*shape[:-1], 2 * shape[-1])],
        nbytes,
    ),
    Row(
        "bias_swiglu packed",
        lambda y, bias: F.silu((y + bias).chunk(2, -1)[0]) * (y + bias).chunk(2, -1)[1],
        lambda y, bias: fused.bias_swiglu(y, bias),
        lambda shape: [torch.randn(*shape[:-1], 2 * shape[-1]), torch.randn(2 * shape[-1])],
        nbytes,
    ),
    Row(
        "bias_dropout_add",
        lambda x, bias, residual: residual + F.dropout(x + bias, 0.1),
        lambda x, bias, residual: fused.bias_dropout_add(x, bias, residual, 0.1, True),
        lambda shape: [torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)],
        lambda x, bias, residual: x.numel(),
        random=True,
    ),
    Row(
        "masked softmax",
        eager.masked_softmax,
        lambda scores, mask: fused.scaled_masked_softmax(scores, mask, 0.125),
        lambda shape: [torch.randn(shape), _causal_mask(shape)],
        _probabilities,
        sizes=SCORES,
        frozen=(1,),
    ),
    Row(
        "filled softmax",
        eager.filled_softmax,
        lambda scores, hidden: fused.scaled_masked_softmax(scores, hidden, 0.125, fill=-torch.inf),
        lambda shape: [torch.randn(shape), _causal_mask(shape) < 0],
        lambda scores, hidden: _probabilities(scores) + hidden.numel(),
        sizes=SCORES,
    ),
    Row(
        "causal softmax",
        eager.causal_softmax,
        lambda scores: fused.scaled_masked_softmax(scores, None, 0.125, causal=True),
        lambda shape: [torch.randn(shape)],
        _probabilities,
        sizes=SCORES,
    ),
    Row(
        "rms_norm",
        eager.rms_norm,
        lambda x, weight: fused.rms_norm(x, weight, 1e-6),
        _norm_inputs,
        lambda x, weight: nbytes(x, weight) + _per_row(x),
        native=("F.rms_norm", lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6)),
        liger=(
            "liger_kernel.ops.rms_norm",
            lambda module: lambda x, w: module.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        ),
    ),
    Row(
        "add_rms_norm",
        eager.add_rms_norm,
        lambda x, residual, weight: fused.add_rms_norm(x, residual, weight, 1e-6),
        lambda shape: [torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])],
        lambda x, residual, weight: nbytes(x, weight) + _per_row(x),
    ),
    Row(
        "layer_norm",
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        lambda x, weight, bias: fused.layer_norm(x, weight, bias, 1e-5),
        lambda shape: [torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])],
        lambda x, weight, bias: nbytes(x, weight) + 2 * _per_row(x),
        liger=(
            "liger_kernel.ops.layer_norm",
            lambda module: lambda x, w, b: module.LigerLayerNormFunction.apply(x, w, b, 1e-5),
        ),
    ),
    Row(
        "add_layer_norm",
        eager.add_layer_norm,
        lambda x, residual, weight, bias: fused.add_layer_norm(x, residual, weight, bias, 1e-5),
        lambda shape: [torch.randn(shape), torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])],
        lambda x, residual, weight, bias: nbytes(x, weight) + 2 * _per_row(x),
    ),
    Row(
        "adaptive_layer_norm",
        lambda x, scale, shift: F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift,
        lambda x, scale, shift: fused.adaptive_layer_norm(x, scale, shift, eps=1e-6),
        lambda shape: [torch.randn(2, *shape), torch.randn(2, 1, shape[-1]), torch.randn(2, 1, shape[-1])],
        lambda x, scale, shift: nbytes(x, scale, shift) + 2 * _per_row(x),
    ),
    Row(
        "gated_residual",
        lambda residual, value, gate: residual + gate * value,
        lambda residual, value, gate: fused.gated_residual(residual, value, gate),
        lambda shape: [torch.randn(2, *shape), torch.randn(2, *shape), torch.randn(2, 1, shape[-1])],
        lambda residual, value, gate: nbytes(value, gate),
    ),
    Row(
        "group_norm silu",
        lambda x, weight, bias: F.silu(F.group_norm(x, 32, weight, bias)),
        lambda x, weight, bias: fused.group_norm(x, 32, weight, bias, activation="silu"),
        lambda shape: [torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])],
        lambda x, weight, bias: nbytes(x, weight, bias) + 2 * 4 * 32 * x.shape[0],
        sizes=IMAGES,
    ),
    Row(
        "group_norm silu, scale, shift",
        lambda x, weight, bias, scale, shift: F.silu(F.group_norm(x, 32, weight, bias) * (1 + scale) + shift),
        lambda x, weight, bias, scale, shift: fused.group_norm(
            x, 32, weight, bias, activation="silu", scale=scale, shift=shift
        ),
        _scaled_images,
        lambda x, weight, bias, scale, shift: nbytes(x, weight, bias, scale, shift) + 2 * 4 * 32 * x.shape[0],
        sizes=IMAGES,
    ),
    Row(
        "batch_norm relu, residual",
        lambda x, weight, bias, residual: F.relu(F.batch_norm(x, None, None, weight, bias, True) + residual),
        lambda x, w, b, residual: fused.batch_norm(x, None, None, w, b, True, activation="relu", residual=residual),
        _normed_images,
        lambda x, weight, bias, residual: 2 * nbytes(x) + nbytes(weight) + 2 * 4 * x.shape[1],
        sizes=IMAGES,
    ),
    Row(
        "batch_norm silu",
        lambda x, weight, bias: F.silu(F.batch_norm(x, None, None, weight, bias, True)),
        lambda x, weight, bias: fused.batch_norm(x, None, None, weight, bias, True, activation="silu"),
        lambda shape: _normed_images(shape)[:3],
        lambda x, weight, bias: nbytes(x, weight, bias) + 2 * 4 * x.shape[1],
        sizes=IMAGES,
    ),
    Row(
        "rotary_embedding",
        eager.rotary,
        lambda q, k, cos, sin: fused.rotary_embedding(q, k, cos, sin),
        _rotary_inputs,
        lambda q, k, cos, sin: nbytes(cos, sin),
        sizes=HEADS,
        frozen=(2, 3),
        liger=("liger_kernel.ops.rope", lambda module: module.LigerRopeFunction.apply),
    ),
    Row(
        "cross_entropy",
        eager.shifted_loss,
        lambda logits, labels: fused.cross_entropy(logits, labels),
        lambda shape: [torch.randn(shape), torch.randint(shape[1], shape[:1])],
        lambda logits, labels: nbytes(logits, labels) + 4 * labels.numel(),
        sizes=LOGITS,
        liger=(
            "liger_kernel.transformers.functional",
            lambda module: lambda logits, labels: module.liger_cross_entropy(logits, labels),
        ),
    ),
    Row(
        "cross_entropy softcap",
        eager.capped_loss,
        lambda logits, labels: fused.cross_entropy(logits, labels, softcap=30.0),
        lambda shape: [torch.randn(shape), torch.randint(shape[1], shape[:1])],
        lambda logits, labels: nbytes(logits, labels) + 4 * labels.numel(),
        sizes=LOGITS,
        liger=(
            "liger_kernel.transformers.functional",
            lambda module: lambda logits, labels: module.liger_cross_entropy(logits, labels, softcap=30.0),
        ),
    ),
    Row(
        "distillation_loss jsd",
        eager.jensen_shannon,
        lambda student, teacher: fused.distillation_loss(student, teacher),
        lambda shape: [torch.randn(shape), torch.randn(shape)],
        lambda student, teacher: nbytes(student, teacher),
        sizes=LOGITS,
        frozen=(1,),
    ),
    Row(
        "linear_cross_entropy",
        lambda hidden, weight, labels: eager.shifted_loss(hidden @ weight.T, labels),
        lambda hidden, weight, labels: fused.linear_cross_entropy(hidden, weight, labels),
        lambda shape: [
            torch.randn(shape[:2]),
            torch.randn(shape[2], shape[1]) * 0.02,
            torch.randint(shape[2], shape[:1]),
        ],
        lambda hidden, weight, labels: nbytes(hidden, weight),
        sizes=PROJECTION,
        native=None
        if not hasattr(F, "linear_cross_entropy")
        else ("F.linear_cross_entropy", lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels)),
        liger=(
            "liger_kernel.transformers.functional",
            lambda module: (
                lambda hidden, weight, labels: module.liger_fused_linear_cross_entropy(hidden, weight, labels)
            ),
        ),
        memory_bound=False,
    ),
    Row(
        "linear",
        lambda x, weight, bias: F.linear(x, weight, bias),
        fused.linear,
        lambda shape: [torch.randn(shape[:2]), torch.randn(shape[2], shape[1]), torch.randn(shape[2])],
        lambda x, weight, bias: nbytes(x, weight),
        sizes=LAYERS,
        memory_bound=False,
    ),
]
