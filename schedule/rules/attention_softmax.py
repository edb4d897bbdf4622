"""Scale, mask, softmax, cast and dropout of attention scores in one pass.

::

    before:  s = torch.matmul(q, k) * 0.125 + mask
             p = F.dropout(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), 0.1, training=True)
    after:   p = fused.scaled_masked_softmax(torch.matmul(q, k), mask, 0.125, dropout_p=0.1)

A mask is a tensor added to the scores, of any shape that broadcasts and with its gradient, so position biases count
too; there may be two. Or the masked scores are replaced by a number (``masked_fill``, ``where``), which also decides
the result of a row that is masked altogether: NaN, or even attention to all keys. Where they are replaced before a mask
is added, or by more than one number, that stays in eager torch and the rest of the chain is fused.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

import fused
from fused.softmax import reciprocal
from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, any_of, optional, scalar, tensor
from schedule.patterns.match_regions import RETURNED
from schedule.patterns.ops import find_form
from schedule.rules.attention_inputs import fill_number, filled, filling, where_filled
from schedule.rules.casts import FLOATS, Dtypes, Value, cast, cast_node
from schedule.rules.constant_sizes import is_last_one
from schedule.rules.rule import DEFAULT, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.softmax_forms import FORMS, tensors_of
from schedule.rules.thresholds import small

FAMILY = "attention_softmax"

_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_PASSED = {"add", "sub", "mul", "div", "tanh", "where", "masked_fill"}
_PASSED |= {"view", "reshape", "unflatten", "transpose", "cast", "to", "type_as"}


# -- patterns -----------------------------------------------------------------------------------------------


def _scores() -> Value:
    return tensor("x", where=lambda spec: spec.ndim >= 2 and spec.dtype in FLOATS)


def _scaled(s: Value) -> Value:
    return optional(lambda s: any_of(s * scalar("scale"), s / scalar("divisor")), name="scaled")(s)


def _softmax(s: Value) -> Value:
    return F.softmax(s, dim=-1, dtype=scalar("softmax_dtype"))


def _dropped(p: Value) -> Value:
    def dropout(p: Value) -> Value:
        return F.dropout(p, p=scalar("p"), training=scalar("training"))

    return optional(dropout, name="dropout")(p)


def _mask(name: str) -> Value:
    return tensor(name, where=lambda spec: spec.dtype in FLOATS)


def plain_softmax(x: Value) -> Value:
    s = filled("filled")(_scaled(cast("before")(_scores())))
    return _dropped(cast("after")(_softmax(cast("between")(s))))


def masked_softmax(x: Value, mask: Value) -> Value:
    s = _scaled(cast("before")(_scores())) + _mask("mask")
    return _dropped(cast("after")(_softmax(cast("between")(s))))


def twice_masked_softmax(x: Value, bias: Value, mask: Value) -> Value:
    s = _scaled(cast("before")(_scores())) + _mask("bias") + _mask("mask")
    return _dropped(cast("after")(_softmax(cast("between")(s))))


def with_sink(s: Value) -> Value:
    """Match the softmax of scores with a column of sinks appended before it and cut off after it."""
    s = torch.cat((s, tensor("sink")), dim=-1)
    p = _softmax(s - torch.max(s, dim=-1, keepdim=True)[0])
    return _dropped(cast("after")(p[..., :-1]))


def sink_softmax(x: Value, sink: Value) -> Value:
    return with_sink(_scaled(_scores()))


def masked_sink_softmax(x: Value, mask: Value, sink: Value) -> Value:
    return with_sink(_scaled(_scores()) + _mask("mask"))


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(graph_match: GraphMatch) -> str:
    x, out = spec_of(graph_match.inputs["x"]), spec_of(graph_match.outputs[0])
    if x is None or out is None or x.shape != out.shape:
        return "what is softmaxed has not the shape of the scores"
    for name in ("mask", "bias"):
        value = graph_match.inputs.get(name)
        if value is not None and not _broadcasts(spec_of(value), x):
            return f"the {name} does not broadcast to the scores"
    masked = where_filled(graph_match.inputs, "filled")
    if masked is not None and not _broadcasts(spec_of(masked), x):
        return "what says which scores are filled does not broadcast to them"
    number = fill_number(graph_match.scalars, "filled", _dtype_filled(Dtypes.of(graph_match), x))
    if masked is not None and (number is None or math.isnan(number)):
        return "the masked scores are filled with something else than a number of their dtype"
    narrow = [dtype for dtype in _stages(graph_match) if dtype.itemsize < x.dtype.itemsize]
    if x.dtype == torch.float64 and narrow:
        return f"float64 scores are softmaxed in {narrow[0]}, which the fused op does not imitate"
    sink = graph_match.inputs.get("sink")
    column = sink is None or (
        _broadcasts(spec_of(sink), TensorSpec((*x.shape[:-1], 1), x.dtype, x.device)) and is_last_one(sink)
    )
    if not column:
        return "the values appended to the scores are not a column of sinks"
    if graph_match.scalars.get("divisor") == 0:
        return "the scores are divided by 0"
    if _swapped(graph_match):
        return "the mask is a product of matrices, and the scores are not"
    p, training = graph_match.scalars.get("p"), graph_match.scalars.get("training")
    if not isinstance(p, (int, float, type(None))) or not isinstance(training, (bool, type(None))):
        return "the dropout probability is computed while running"
    return ""


def _broadcasts(spec: TensorSpec | None, x: TensorSpec) -> bool:
    if spec is None or spec.ndim > x.ndim or spec.device != x.device:
        return False
    return all(a in (1, b) for a, b in zip(reversed(spec.shape), reversed(x.shape), strict=False))


def _dtype_filled(dtypes: Dtypes, x: TensorSpec) -> torch.dtype:
    return dtypes.after(x.dtype, "before")


def _stages(graph_match: GraphMatch) -> list[torch.dtype]:
    """Return the dtypes of the casts of the scores before and in the softmax."""
    casts = map(Dtypes.of(graph_match).cast, ("before", "between", "softmax_dtype"))
    return [dtype for dtype in casts if dtype is not None]


def _swapped(graph_match: GraphMatch) -> bool:
    """Check whether the mask looks like the scores and the scores do not.

    Addition commutes, so a search may bind either of them as the scores.
    """
    others = [graph_match.inputs.get(name) for name in ("mask", "bias")]
    return not _is_product(graph_match.inputs["x"]) and any(_is_product(o) for o in others if o is not None)


def _is_product(value: Any) -> bool:
    """Check whether ``value`` is computed from a matrix product by elementwise operations, views and casts."""
    for _ in range(12):
        if not isinstance(value, fx.Node) or value.op not in ("call_function", "call_method"):
            return False
        form = find_form(value.op, value.target)
        name = form.definition.name if form is not None else str(value.target)
        if name in _PRODUCTS:
            return True
        if name not in _PASSED:
            return False
        value = next((v for v in (*value.args, *value.kwargs.values()) if isinstance(v, fx.Node)), None)
    return False


def _no_gain(graph_match: GraphMatch) -> str:
    x, out = spec_of(graph_match.inputs["x"]), spec_of(graph_match.outputs[0])
    scalars, inputs = graph_match.scalars, graph_match.inputs
    added = any(inputs.get(name) is not None for name in ("mask", "bias", "sink"))
    added = added or where_filled(inputs, "filled") is not None
    scaled = scalars.get("scale") is not None or scalars.get("divisor") is not None
    widened = x is not None and out is not None and out.dtype != x.dtype
    if added or scaled or widened or _drops(scalars):
        return ""
    returned = any(user.op == "output" for user in inputs["x"].users)
    return "softmax alone: there is nothing to fuse" + (f"; its scores are {RETURNED}" if returned else "")


def _drops(scalars: dict[str, Any]) -> bool:
    return bool(scalars.get("training")) and scalars.get("p") not in (None, 0, 0.0)


def _profitability(graph_match: GraphMatch) -> str:
    is_filled = where_filled(graph_match.inputs, "filled") is not None and not _drops(graph_match.scalars)
    return small("softmax, filled" if is_filled else "softmax", spec_of(graph_match.inputs["x"]))


# -- the replacement ----------------------------------------------------------------------------------------


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    x, mask = inputs["x"], inputs.get("mask")
    if inputs.get("bias") is not None:
        mask = graph.call_function(operator.add, (inputs["bias"], mask))
    mask = _widened(graph, mask, inputs, scalars)
    options: dict[str, Any] = {}
    if inputs.get("sink") is not None:
        options["sink"] = inputs["sink"]
    dtypes = Dtypes(inputs, scalars)
    fill = filling(graph, inputs, scalars, "filled", _dtype_filled(dtypes, dtypes.seen("x")))
    if fill is not None:
        mask, options["fill"] = fill
    if _drops(scalars):
        options["dropout_p"] = scalars["p"]
    dtype = _out_dtype(inputs, scalars)
    if dtype is not None:
        options["out_dtype"] = dtype
    return graph.call_function(fused.scaled_masked_softmax, (x, mask, _scale(graph, scalars)), options)


def _widened(graph: fx.Graph, mask: Any, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
    """Cast the mask if the scores are cast to a wider dtype before it is added.

    Their sum is rounded to the wider dtype.
    """
    dtypes = Dtypes(inputs, scalars)
    before, added = dtypes.cast("before"), [dtypes.spec(name) for name in ("bias", "mask")]
    given = [spec.dtype for spec in added if spec is not None]
    if before is None or not given or any(torch.promote_types(dtype, before) == dtype for dtype in given):
        return mask
    return cast_node(graph, mask, before)


def _scale(graph: fx.Graph, scalars: dict[str, Any]) -> Any:
    scale, divisor = scalars.get("scale"), scalars.get("divisor")
    if isinstance(divisor, fx.Node):
        return graph.call_function(reciprocal, (divisor,))
    if divisor is not None:
        return 1.0 / divisor
    return 1.0 if scale is None else scale


def _out_dtype(inputs: dict[str, Any], scalars: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of the result if it differs from the dtype of the scores, else None."""
    dtypes = Dtypes(inputs, scalars)
    x = dtypes.spec("x")
    if x is None:
        return None
    dtype = dtypes.joined(dtypes.after(x.dtype, "before"), "bias", "mask", "sink")
    for step in ("between", "softmax_dtype", "after"):
        dtype = dtypes.after(dtype, step)
    return dtype if dtype != x.dtype else None


# -- the rule -----------------------------------------------------------------------------------------------


ATTENTION_SOFTMAX = register_rule(
    Rule(
        name="attention_softmax",
        family=FAMILY,
        patterns=(
            masked_sink_softmax,
            sink_softmax,
            twice_masked_softmax,
            masked_softmax,
            plain_softmax,
        ),
        build=_build,
        proof=Proof(
            forms=FORMS,
            inputs=tensors_of,
            shapes=((2, 3, 4, 5), (1, 3, 4, 4), (3, 3, 1, 6)),
            refused=(
                lambda q, k: torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1),
                lambda q, k, mask: torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.5 + mask, -2),
                lambda q, k, mask: F.log_softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.5 + mask, -1),
            ),
        ),
        summary="fused.scaled_masked_softmax(scores, mask, scale, dropout_p=p)",
        extra_check=_extra_check,
        no_gain=_no_gain,
        profitability=_profitability,
        sets=DEFAULT,
    )
)
