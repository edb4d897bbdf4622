"""Detection of ``nn.Linear`` subclasses equivalent to ``F.linear``, by tracing their forward.

Falcon has its own Linear class, which computes ``input @ weight.T`` and then adds the bias; other subclasses only
initialize the parameters differently. The forward is traced on a placeholder instance with only a weight and a bias,
so the result holds for every instance. A forward that reads or computes more is not a plain projection.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.modes import count_function_modes, popped_function_mode
from schedule.capture import has_own_forward
from schedule.patterns.normalize import normalize
from schedule.patterns.normalized_nodes import OpNode

_UNTRACEABLE = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@lru_cache(maxsize=256)
def computes_linear(cls: type[Any], biased: bool) -> bool:
    """Return whether the forward of ``cls`` is ``F.linear(x, weight, bias)`` in training and evaluation.

    Args:
        cls: any module class.
        biased: check for instances with a bias.
    """
    if cls is nn.Linear and has_own_forward(cls):
        return True
    if not issubclass(cls, nn.Linear) or cls.__call__ is not nn.Module.__call__:
        return False
    with ExitStack() as stack:  # it may be asked in the middle of a trace, of which this one is not a part
        while count_function_modes():
            stack.enter_context(popped_function_mode())
        return all(_is_linear(_on_meta(cls, biased, training), biased) for training in (True, False))


def _on_meta(cls: type[nn.Linear], biased: bool, training: bool) -> nn.Module:
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.in_features, made.out_features, made.training = 3, 2, training
    made.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    made.register_parameter("bias", nn.Parameter(torch.empty(2, device="meta")) if biased else None)
    return made


def _is_linear(module: nn.Module, biased: bool) -> bool:
    try:
        nodes = normalize(fx.Tracer().trace(module)).nodes
    except _UNTRACEABLE:  # whatever code that is not made for proxies runs into
        return False
    inputs = [node for node in nodes if node.op == "placeholder"]
    (output,) = (node for node in nodes if node.op == "output")
    value = output.args["value"]
    if biased:
        terms = [value.args["input"], value.args["other"]] if _is(value, "add") and value.args["alpha"] == 1 else []
        rest = [term for term in terms if not _reads(term, "bias")]
        value = rest[0] if len(terms) == 2 and len(rest) == 1 else None
    return len(inputs) == 1 and _is_product(value, inputs[0])


def _is_product(value: Any, x: OpNode) -> bool:
    """Return whether ``value`` is the product of ``x`` and the transposed weight."""
    if _is(value, "linear"):
        return value.args["input"] is x and _reads(value.args["weight"], "weight")
    if not _is(value, "matmul") or value.args["input"] is not x:
        return False
    other = value.args["other"]
    swapped = _is(other, "transpose") and {int(other.args[one]) % 2 for one in ("dim0", "dim1")} == {0, 1}
    return (swapped or _is(other, "t")) and _reads(other.args["input"], "weight")


def _is(value: Any, op: str) -> bool:
    return isinstance(value, OpNode) and value.op == op


def _reads(value: Any, name: str) -> bool:
    return _is(value, "get_attr") and value.target == name
