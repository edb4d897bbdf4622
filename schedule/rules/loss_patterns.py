"""Shared patterns, checks and replacements of the rules for cross entropy of rows of logits."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, any_of, optional, scalar, tensor
from schedule.rules.casts import FLOATS, Dtypes, Value, cast
from schedule.rules.rule import spec_of

REDUCTIONS = ("mean", "sum", "none")
_CLASSES_SECOND = 1  # index of the alternative in the choice "rows"
_LAST_BUT_ONE = 0  # index of the alternative in the choice "slice"

# -- patterns -----------------------------------------------------------------------------------------------


def logits_input() -> Value:
    """Declare logits of any floating dtype: ``[rows, vocab]`` or more dimensions."""
    return tensor("logits", where=lambda spec: spec.ndim >= 2 and spec.dtype in FLOATS)


def row_losses(logits: Value, class_weight: Value = None) -> Value:
    """Match ``F.cross_entropy`` of logits, optionally shifted by a token, flattened to rows, and cast."""
    shifted = optional(lambda x: x.contiguous(), name="contiguous")(_shifted(cast("before")(logits)))
    rows = cast("after")(any_of(_flattened(shifted), _classes_second(shifted), shifted, name="rows"))
    return F.cross_entropy(
        rows,
        tensor("targets"),
        class_weight,
        ignore_index=scalar("ignore_index", where=lambda value: isinstance(value, int)),
        reduction=scalar("reduction", where=lambda value: value in REDUCTIONS),
        label_smoothing=scalar("label_smoothing", where=lambda value: isinstance(value, (int, float))),
    )


def _shifted(x: Value) -> Value:
    def without_last(x: Value) -> Value:
        stop = scalar("stop", where=lambda value: value == -1)
        return any_of(x[..., :stop, :], x[:, :stop, :], x[:, :stop], name="slice")

    return optional(without_last, name="shifted")(x)


def _flattened(x: Value) -> Value:
    rows, classes = scalar("rows"), scalar("classes")
    return any_of(x.view(rows, classes), x.reshape(rows, classes), x.flatten(0, scalar("rows")), name="flattened")


def _classes_second(x: Value) -> Value:
    return any_of(x.transpose(1, 2), x.permute(0, 2, 1), name="classes_second")


# -- checks -------------------------------------------------------------------------------------------------


def loss_check(graph_match: GraphMatch, x: TensorSpec | None) -> str:
    """Return the reason if the fused ops do not compute this loss of logits with the spec ``x``, else ""."""
    targets, loss = spec_of(graph_match.inputs["targets"]), spec_of(graph_match.outputs[0])
    choices = graph_match.choices
    if x is None or targets is None or loss is None:
        return "the logits or the targets were not seen in the recorded run"
    if targets.dtype.is_floating_point or targets.dtype == torch.bool:
        return "the targets are class probabilities, not class numbers"
    leading, turned = list(x.shape[:-1]), choices["rows"] == _CLASSES_SECOND
    if x.ndim != 3 and (turned or choices.get("slice", _LAST_BUT_ONE) != _LAST_BUT_ONE):
        return "the dimension that is moved or shifted is not that of the tokens"
    if graph_match.scalars.get("stop") is not None:
        leading[-1] -= 1
    if targets.shape not in ((math.prod(leading),), tuple(leading)) or (targets.ndim > 1) is not turned:
        return "the classes are not the last dimension of the logits"
    weight = spec_of(graph_match.inputs.get("class_weight"))
    if "class_weight" in graph_match.inputs and (
        weight is None or weight.requires_grad or weight.shape != x.shape[-1:] or weight.device != x.device
    ):
        return "the weights of the classes get a gradient, or are not one for each class"
    dtypes = Dtypes.of(graph_match)
    narrowed = dtypes.narrowed(x.dtype, "before", "after")
    if narrowed is not None:
        return f"{x.dtype} logits become {narrowed}, which the fused op does not imitate"
    if loss.dtype != torch.promote_types(x.dtype, torch.float32):
        return f"the loss of {x.dtype} logits is {loss.dtype}, and the fused op's is not"
    return ""


# -- replacements -------------------------------------------------------------------------------------------


def rows_of(graph: fx.Graph, x: Any, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
    """Return ``x`` ``[..., features]`` with a row for each target, shifted and flattened like the logits."""
    spec, targets = spec_of(x), spec_of(inputs["targets"])
    if scalars.get("stop") is not None:
        index: Any = (..., slice(None, -1), slice(None))
        x = graph.call_function(operator.getitem, (x, index))
    if "logits" in inputs and scalars.get("classes") is not None:
        return graph.call_method("reshape", (x, scalars["rows"], scalars["classes"]))
    if spec is not None and targets is not None and spec.ndim > targets.ndim + 1:
        x = graph.call_method("flatten", (x, 0, -2))
    return x


def class_weights() -> Value:
    """Declare the weights of the classes."""
    return tensor("class_weight", where=lambda spec: spec.ndim == 1 and spec.dtype in FLOATS)


def loss_options(inputs: dict[str, Any], scalars: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the loss different from the fused ops' defaults."""
    defaults = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
    options = {name: scalars[name] for name, default in defaults.items() if scalars[name] != default}
    return {**options, "class_weight": inputs["class_weight"]} if "class_weight" in inputs else options
