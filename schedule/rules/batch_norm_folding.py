"""Batch norms folded into the convolution or linear layer before them, in graphs for evaluation.

::

    before:  n = self.norm(self.conv(x));  y = F.relu(n + residual)
    after:   y = fused.conv_batch_norm(x, self.conv.weight, …, activation='relu', residual=residual)

No parameter changes: the folded weights are computed when one has changed, and training, ``state_dict`` and undo are as
before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused
from fused.torch_internals.torch_modules import ConvolutionBase
from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, scalar
from schedule.patterns.language import call_function
from schedule.patterns.side_effects import effects, is_known_layer, memory_of
from schedule.rules.activations import clipped_at_6
from schedule.rules.batch_norm import ROWS, SHAPES, about_residual, about_rows, inputs_of, normed, options, same
from schedule.rules.casts import Value, floating
from schedule.rules.result_strides import told_apart
from schedule.rules.rule import Form, Modules, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "folding"
Way = Callable[[Value], Value]
Layer = Callable[[Value, Value, Value], Value]

# -- patterns -----------------------------------------------------------------------------------------------


def convolved(dims: int) -> Layer:
    """Return the pattern of a convolution of 1 to 3 dimensions, its settings bound by their names."""
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def layer(x: Value, weight: Value, bias: Value) -> Value:
        settings = [scalar(name) for name in ("stride", "padding", "dilation", "groups")]
        return call_function(function)(x, weight, bias, *settings)

    return layer


def _linear(x: Value, weight: Value, bias: Value) -> Value:
    return F.linear(x, weight, bias)


def _pattern(layer: Layer, activation: Way | None, has_residual: bool) -> Callable[..., Value]:
    after: Way = activation or (lambda z: z)

    def pattern(
        x: Value,
        layer_weight: Value,
        running_mean: Value,
        running_var: Value,
        layer_bias: Value = None,
        weight: Value = None,
        bias: Value = None,
    ) -> Value:
        z = layer(floating("x", 2), floating("layer_weight", 2), layer_bias)
        z = normed(z, (running_mean, running_var, weight, bias), None)
        return after(z + floating("residual", 2) if has_residual else z)

    pattern.__name__ = f"batch norm of a layer{' and residual' if has_residual else ''}"
    return pattern


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(graph_match: GraphMatch) -> str:
    scalars, out = graph_match.scalars, spec_of(graph_match.outputs[0])
    weight = spec_of(graph_match.inputs["layer_weight"])
    if scalars.get("training") is not False:
        return "in training the statistics are those of the batch"
    if out is None or weight is None:
        return "the result was not seen in the recorded run"
    if weight.ndim == 2 and out.ndim != 2:
        return "the linear layer and the batch norm have different features"
    if not isinstance(scalars.get("eps"), (int, float)):
        return "eps is not a number"
    return about_rows(graph_match, out) or about_residual(graph_match, out)


def _is_last_reader(graph_match: GraphMatch, modules: Modules) -> bool:
    """Check whether all other readers of the residual's memory are done before the convolution of the match starts.

    They are if its image is computed from them, so no rewrite can change the order. Unknown code may keep it for later.
    """
    residual, x = graph_match.inputs.get("residual"), graph_match.inputs["x"]
    if not isinstance(residual, fx.Node) or not isinstance(x, fx.Node):
        return False
    known: dict[fx.Node, frozenset[fx.Node]] = {}
    memory = memory_of(residual, modules, known)
    sharing = [node for node in graph_match.graph.nodes if not memory.isdisjoint(memory_of(node, modules, known))]
    if x in sharing or any(node.op in ("placeholder", "get_attr") for node in sharing):
        return False
    done = {residual, x, *graph_match.nodes}
    waiting = [residual, x]
    while waiting:
        new = [node for node in waiting.pop().all_input_nodes if node not in done]
        done.update(new)
        waiting += new
    readers = {reader for node in sharing for reader in node.users}
    return readers <= done and not any(_may_keep(node, modules) for node in (*sharing, *readers))


def _may_keep(node: fx.Node, modules: Modules) -> bool:
    """Check whether a node is code, or a module with hooks inside, that may keep its operands or result."""
    is_known = node.op != "call_module" or is_known_layer(modules.get(str(node.target)))
    return not is_known or effects(node, modules).opaque


_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, fused.conv_batch_norm)


def _is_first(graph_match: GraphMatch, modules: Modules) -> bool:
    """Check whether a match has the first convolution of the graph."""
    layers = (
        node
        for node in graph_match.graph.nodes
        if node.target in _CONVOLUTIONS or isinstance(modules.get(str(node.target)), ConvolutionBase)
    )
    return next(layers, None) in graph_match.nodes


@torch.random.fork_rng()
@torch.no_grad()
def _layout_matters(result: fx.Node, spec: TensorSpec, modules: Modules) -> str:
    """Return the reason if readers can tell a result with the channels last from a contiguous one, else ""."""
    eager = torch.zeros(spec.shape, dtype=spec.dtype)
    ours = eager.to(memory_format=torch.channels_last, copy=True)
    return told_apart(result, eager, ours, modules=modules)


def _refine(graph_match: GraphMatch, modules: Modules) -> GraphMatch:
    """Find out for which images the result may have the channels last, and whether the residual may be overwritten.

    What has the channels last makes all that is computed from it have them last, so the first convolution decides for
    the graph: no reader may tell the results apart, up to what the graph returns.
    """
    out, x = spec_of(graph_match.outputs[0]), spec_of(graph_match.inputs["x"])
    if out is None or x is None or out.ndim != 4 or out.device.type != "cpu" or out.dtype != torch.float32:
        return graph_match
    found: dict[str, Any] = {}
    if _is_first(graph_match, modules) and not _layout_matters(graph_match.outputs[0], out, modules):
        found["channels_last"] = x.shape
    if _is_last_reader(graph_match, modules):
        found["in_place"] = True
    calls = tuple(graph_match.graph.find_nodes(op="call_module")) if found else ()
    known = tuple(node for node in calls if is_known_layer(modules.get(str(node.target))))
    return replace(graph_match, scalars={**graph_match.scalars, **found}, calls=known)


def _profitability(graph_match: GraphMatch) -> str:
    return small("batch_norm, folded", spec_of(graph_match.outputs[0]))


# -- the rules ----------------------------------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, weight and bias of the layer, then statistics, weight and bias of the norm, and the residual."""
    samples, inputs, *rest = shape
    outputs = 6
    weight = torch.randn(outputs, inputs, *(1 for _ in rest), dtype=dtype) / 2
    _, *rows, residual = inputs_of((samples, outputs, *rest), dtype)
    return torch.randn(shape, dtype=dtype), weight, torch.randn(outputs, dtype=dtype), *rows, residual


def _forms(after: Callable[[Tensor], Tensor]) -> tuple[Form, ...]:
    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolutions = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
        return convolutions[x.ndim](x, weight, bias) if x.ndim in convolutions else F.linear(x, weight, bias)

    return (
        lambda x, lw, lb, m, v, w, b, r: after(F.batch_norm(layer(x, lw, lb), m.detach(), v.detach(), w, b, eps=1e-3)),
        lambda x, lw, lb, m, v, w, b, r: after(F.batch_norm(layer(x, lw, None), m.detach(), v.detach()) + r),
    )


def _rule(name: str, activation: str | None, way: Way | None, form: Callable[[Tensor], Tensor]) -> Rule:
    """Register the rule to fold a batch norm into the layer before it, with one activation or none."""

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        layer = (inputs["x"], inputs["layer_weight"], inputs.get("layer_bias"))
        args = (*layer, *(inputs.get(row) for row in ROWS), scalars["eps"])
        settings = tuple(scalars[key] for key in ("stride", "padding", "dilation", "groups") if key in scalars)
        function = fused.conv_batch_norm if settings else fused.linear_batch_norm
        keywords = options(inputs, activation)
        if scalars.get("channels_last"):
            keywords["channels_last"] = scalars["channels_last"]
        if scalars.get("in_place"):
            keywords["out"] = inputs["residual"]
        return graph.call_function(function, (*args, *settings), keywords)

    layers = (convolved(1), convolved(2), convolved(3), _linear)
    return register_rule(
        Rule(
            name=name,
            family=FAMILY,
            patterns=tuple(_pattern(layer, way, has_residual) for has_residual in (True, False) for layer in layers),
            build=build,
            proof=Proof(
                forms=_forms(form),
                inputs=_inputs,
                shapes=SHAPES,
                refused=(
                    lambda x, lw, lb, m, v, w, b, r: form(F.batch_norm(F.conv2d(x, lw), None, None, w, b, True)),
                    lambda x, lw, lb, m, v, w, b, r: form(
                        F.batch_norm(F.conv_transpose2d(r, lw), m[:4].detach(), v[:4].detach())
                    ),
                ),
            ),
            summary="fused.conv_batch_norm(x, weight, bias, mean, var, …)",
            extra_check=_extra_check,
            profitability=_profitability,
            refine=_refine,
            rank=1,  # before the batch norm with its activation alone
            sets=("inference",),
        )
    )


CONV_BATCH_NORM_RELU = _rule("conv_batch_norm_relu", "relu", F.relu, F.relu)
CONV_BATCH_NORM_RELU6 = _rule("conv_batch_norm_relu6", "relu6", clipped_at_6, nn.ReLU6())
CONV_BATCH_NORM_HARD_SWISH = _rule("conv_batch_norm_hard_swish", "hard_swish", F.hardswish, F.hardswish)
CONV_BATCH_NORM_SILU = _rule("conv_batch_norm_silu", "silu", F.silu, F.silu)
CONV_BATCH_NORM_GELU = _rule("conv_batch_norm_gelu", "gelu", F.gelu, F.gelu)
CONV_BATCH_NORM = _rule("conv_batch_norm", None, None, same)
