"""What a node does besides computing its value."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import fx

from schedule.tracing.regions import REGION_FUNCTIONS

_PURE_QUERIES = (len, operator.getitem, operator.contains, operator.truth)
_PURE_PREFIXES = ("get_", "is_", "has_")
_PLAIN_OPERATORS = {"inv", "invert", "index", "is_", "is_not", "indexOf"}
_RANDOM_NAMES = {"rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "poisson"}
_RANDOM_LIKE = {"rand_like", "randn_like", "randint_like", "bernoulli_", "normal_", "uniform_", "rrelu"}
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}


def mutates(node: fx.Node) -> bool:
    """Whether the node changes a tensor in place."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    if node.op != "call_function":
        return False
    if node.target in (operator.setitem, setattr):
        return True
    name, module = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", "")
    if module == "_operator":
        return name.startswith("i") and hasattr(operator, f"__{name}__") and name not in _PLAIN_OPERATORS
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or bool(node.kwargs.get("inplace") or node.kwargs.get("out") is not None)


def uses_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers (a dropout that is switched off does not)."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target in _DROPOUTS:
        probability = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
        training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
        return training is not False and probability not in (0, 0.0)
    if name == "scaled_dot_product_attention":
        return node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0) not in (0, 0.0)
    return node.op != "call_module" and (name in _RANDOM_NAMES or name in _RANDOM_LIKE)


def changes_object(node: fx.Node) -> bool:
    """Whether the node calls a method of a stateful object, such as ``cache.update``."""
    return bool(node.meta.get("opaque")) and not is_pure_query(node.target)


def is_pure_query(target: object) -> bool:
    """Whether a method of a stateful object only asks it something, as its name says (``get_seq_length``)."""
    return (isinstance(target, str) and target.startswith(_PURE_PREFIXES)) or target in _PURE_QUERIES


def has_effect(node: fx.Node) -> bool:
    """Whether running the node twice, or not at all, can be noticed. Random draws do not count."""
    if node.target in REGION_FUNCTIONS or node.op == "output":
        return False
    if node.op == "call_module":
        return any(argument.meta.get("object") for argument in node.all_input_nodes)
    return mutates(node) or changes_object(node)


_MAKES_NEW = {"add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "neg", "abs", "where", "cat", "stack"}
_MAKES_NEW |= {"eq", "ne", "lt", "le", "gt", "ge", "clone", "matmul", "linear", "softmax", "arange", "tensor"}
_MAKES_NEW |= {"zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"}
_MAKES_NEW |= {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}


def is_local(node: fx.Node) -> bool:
    """Whether all that the effect of ``node`` changes was made in this graph, so that nobody sees it half done."""
    changed = node.all_input_nodes[:1]
    if node.op == "call_module":
        changed = [argument for argument in node.all_input_nodes if argument.meta.get("object")]
    return all(_made_here(value) for value in changed)


def _made_here(value: fx.Node) -> bool:
    """Whether no part of ``value`` existed before: neither an input nor the module's own state is in it."""
    if value.op in ("placeholder", "get_attr", "call_module"):
        return False
    name = value.target if isinstance(value.target, str) else getattr(value.target, "__name__", "")
    if name in _MAKES_NEW and not mutates(value):
        return True
    return all(map(_made_here, value.all_input_nodes))


def is_removable(node: fx.Node) -> bool:
    """Whether an unused node can go: it computes a value and nothing else."""
    if node.op in ("placeholder", "output", "call_module") or node.target in REGION_FUNCTIONS:
        return False
    if getattr(node.target, "__name__", "") == "check":
        return False
    return not has_effect(node) and not uses_random(node)


def remove_dead(graph: fx.Graph, nodes: Iterable[fx.Node] | None = None) -> None:
    """Remove unused nodes without effects, last first; of the whole graph, or of ``nodes``."""
    candidates: list[Any] = list(graph.nodes if nodes is None else nodes)
    for node in reversed(candidates):
        if not node.users and is_removable(node):
            graph.erase_node(node)
