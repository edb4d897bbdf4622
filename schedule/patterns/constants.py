"""Comparison of pattern constants with graph constants, and their description in messages."""

from __future__ import annotations

import math
from typing import Any

import torch

from schedule.capture import TensorSpec
from schedule.patterns.normalized_nodes import OpNode, operands
from schedule.patterns.pattern_nodes import CallNode, ChoiceNode, InputNode, ScalarNode


def same_constant(expected: Any, found: Any) -> bool:
    """Check whether two constants are equal: 2 equals 2.0, nan equals nan, but 1 does not equal True."""
    if expected is found:
        return True
    if isinstance(expected, bool) or isinstance(found, bool):
        return False
    if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
        return expected == found or (math.isnan(expected) and math.isnan(found))
    return type(expected) is type(found) and bool(expected == found)


def same_kind_matters(expected: Any, found: Any, node: OpNode) -> bool:
    """Check whether 2 instead of 2.0 would change the dtype of ``node``.

    It would if any of its tensor operands is neither floating-point nor complex.
    """
    if isinstance(expected, float) is isinstance(found, float):
        return False
    specs = [n.spec for n in operands(tuple(node.args.values()))]
    tensors = [s for s in specs if isinstance(s, TensorSpec)]
    return any(not (s.dtype.is_floating_point or s.dtype.is_complex) for s in tensors)


def same_dims(expected: Any, found: Any, node: OpNode) -> bool:
    """Check whether two dimension numbers, or tuples of them, are equal modulo the rank of ``node``'s input."""
    if expected == found and isinstance(expected, bool) is isinstance(found, bool):
        return True
    rank = rank_of(node)
    if rank is None:
        return False
    if isinstance(expected, tuple) and isinstance(found, tuple) and len(expected) == len(found):
        return all(same_dims(a, b, node) for a, b in zip(expected, found, strict=True))
    if type(expected) is int and type(found) is int:
        return expected % rank == found % rank
    return False


def same_swapped_dims(expected: OpNode, found: OpNode) -> bool:
    """Check whether two ``transpose`` nodes swap the same dimensions, in either order."""
    pair, other = ((n.args["dim0"], n.args["dim1"]) for n in (expected, found))
    return same_dims(pair, other, found) or same_dims(pair, other[::-1], found)


def rank_of(node: OpNode) -> int | None:
    """Return the rank of a node's first argument (at least 1), or None if it was not recorded."""
    first = next(iter(node.args.values()), None)
    spec = first.spec if isinstance(first, OpNode) else None
    return spec.ndim or 1 if isinstance(spec, TensorSpec) else None


def reads_dtype(expected: OpNode, found: Any) -> bool:
    """Check for ``x.dtype`` in the pattern and a dtype in the graph. The two are compared once x is known."""
    return isinstance(found, torch.dtype) and expected.op == "getattr" and expected.args.get("name") == "dtype"


def describe(value: Any) -> str:
    """Format a pattern node, graph node or constant for messages, such as ``gelu(approximate='tanh')``."""
    if isinstance(value, InputNode):
        return f"the input {value.name}"
    if isinstance(value, ScalarNode):
        return f"the constant {value.name}"
    if isinstance(value, ChoiceNode):
        return f"{value.name} or " + describe(value.args["alternatives"][-1])
    if isinstance(value, CallNode):
        return f"a call of module {value.what if isinstance(value.what, str) else value.what.__name__}"
    if isinstance(value, OpNode):
        if value.op in ("placeholder", "get_attr"):
            return f"{value.op} {value.name}"
        given = [f"{k}={v!r}" for k, v in value.args.items() if _worth_saying(value, k, v)]
        return f"{value.op}({', '.join(given)})"
    if isinstance(value, tuple):
        return "(" + ", ".join(describe(v) for v in value) + ")"
    return repr(value)


def _worth_saying(node: OpNode, name: str, value: Any) -> bool:
    if isinstance(value, OpNode) or next(operands(value), None) is not None:
        return False
    if node.definition is None or value != node.definition.params.get(name):
        return True
    return not (value is None or isinstance(value, bool) or value == 1)  # such defaults only make noise


def congruent(a: Any, b: Any) -> bool:
    """Check whether two values of a graph are the same value.

    They are if they are one node, reads of one parameter, equal expressions of sizes, or equal constants.
    """
    if a is b:
        return True
    if not isinstance(a, OpNode) or not isinstance(b, OpNode):
        if isinstance(a, OpNode) or isinstance(b, OpNode):
            return False
        if isinstance(a, tuple) and isinstance(b, tuple):
            return len(a) == len(b) and all(congruent(x, y) for x, y in zip(a, b, strict=True))
        return same_constant(a, b)
    if a.op != b.op:
        return False
    if a.op == "get_attr":
        return bool(a.target == b.target)
    if not (a.is_metadata and b.is_metadata) or a.args.keys() != b.args.keys():
        return False
    return all(congruent(a.args[k], b.args[k]) for k in a.args)
