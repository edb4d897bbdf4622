"""Side effects of a node, judged by torch's naming conventions.

:mod:`schedule.patterns.side_effects` refines this by the vocabulary of operations and by modules.

Numbers that a forward draws outside of torch, as for LayerDrop by ``random.uniform`` or ``numpy.random.uniform``.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import fx

from fused.torch_internals.schemas import aten_parameters, given_argument, parameters
from schedule.capture.effects.question_methods import PREFIXES
from schedule.capture.effects.regions import REGION_FUNCTIONS
from schedule.capture.graph.messages import MESSAGES
from schedule.capture.guards.plain_values import is_atom

# -- Numbers that a forward draws outside of torch ----------------------------------------------------------


def drawn_number(module: str, name: str, *args: Any) -> Any:
    """Return a number drawn by a function of the module ``random`` or ``numpy.random`` (graph target)."""
    return getattr(sys.modules[module], name)(*args)


def drawn_by(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments of :func:`drawn_number` for a call that draws a number, None for any other call."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if owner is None and args:  # the function of a method
        owner, *rest = args
        args = tuple(rest)
    for module, most in _NUMBERS.items():
        known = getattr(getattr(sys.modules.get(module), "random", None), "__self__", None)
        if owner is known is not None and len(args) <= most.get(name, -1) and all(map(is_atom, args)):
            return module, name, *args
    return None


_NUMBERS = {
    "random": {
        "random": 0,
        "getrandbits": 1,
        "randint": 2,
        "randrange": 3,
        "uniform": 2,
        "gauss": 2,
        "normalvariate": 2,
    },
    "numpy.random": {"random": 0, "rand": 0, "randn": 0, "randint": 2, "uniform": 2, "normal": 2},
}
"""Functions that draw one number, and how many arguments they take at most to do so."""


# -- Side effects of a node ---------------------------------------------------------------------------------


def is_dict(value: Any) -> bool:
    """Check whether ``value`` is a plain dict (graph target)."""
    return type(value) is dict


def is_list(value: Any) -> bool:
    """Check whether ``value`` is a plain list (graph target)."""
    return type(value) is list


def is_tuple(value: Any) -> bool:
    """Check whether ``value`` is a plain tuple (graph target)."""
    return type(value) is tuple


def is_integer(value: Any) -> bool:
    """Check whether ``value`` is an integer, and no truth value (graph target)."""
    return type(value) is int


def is_float(value: Any) -> bool:
    """Check whether ``value`` is a floating-point number (graph target)."""
    return type(value) is float


def is_truth_value(value: Any) -> bool:
    """Check whether ``value`` is True or False (graph target)."""
    return type(value) is bool


IS_PLAIN: dict[type, Callable[[Any], bool]] = {dict: is_dict, list: is_list, tuple: is_tuple}
"""Classes of containers → questions whether a value is of exactly this class."""
IS_PLAIN |= {int: is_integer, float: is_float, bool: is_truth_value}
"""Classes of numbers, likewise."""
_PURE_QUERIES = (len, operator.getitem, operator.contains, operator.truth, operator.is_, hasattr, tuple)
_PURE_QUERIES += tuple(IS_PLAIN.values())
_AUGMENTED = {
    name.strip("_") for name in dir(operator) if name.startswith("__i") and hasattr(operator, "__" + name[3:])
}
_RANDOM_PREFIXES = (
    *("rand", "normal", "bernoulli", "multinomial", "poisson", "uniform", "exponential", "geometric"),
    *("cauchy", "log_normal", "rrelu", "gumbel", "fractional_max_pool"),
)


def changed(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes changed in place by this one, judged by torch's naming and the arguments."""
    if node.op not in ("call_function", "call_method"):
        return ()
    found = first_argument(node) if _changes_first(node) else ()
    return tuple(dict.fromkeys((*found, *_nodes_in((node.kwargs.get("out"), *_declared(node))))))


def first_argument(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the node or nodes of the first argument of a call, which may be a list."""
    return _nodes_in(node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self")))


def _nodes_in(value: Any) -> tuple[fx.Node, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(found for item in value for found in _nodes_in(item))
    return (value,) if isinstance(value, fx.Node) else ()


_WRITTEN_WITH = (
    *(("running_mean", "training"), ("running_var", "training")),
    *(("running_mean", "use_input_stats"), ("running_var", "use_input_stats"), ("num_batches_tracked", "training")),
    ("weight", "max_norm"),
)
"""Arguments that torch functions change in place, each with the argument that makes them do so."""


def _declared(node: fx.Node) -> Iterator[Any]:
    """Yield the arguments changed in place by an operator's schema or by the signature of a torch function."""
    for parameter in parameters(node.target):
        if parameter.is_written:
            yield given_argument(parameter, node.args, node.kwargs)
    yield from _state(node)


def updated_state(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the state that a function keeps up to date beside its result: the running statistics of a batch norm."""
    return _nodes_in(tuple(_state(node))) if node.op == "call_function" else ()


def _state(node: fx.Node) -> Iterator[Any]:
    known = _parameters(node.target) if node.op == "call_function" else {}
    for name, flag in _WRITTEN_WITH:
        if name in known and flag in known and _argument(node, flag, None) not in (False, None):
            yield _argument(node, name, None)


def _changes_first(node: fx.Node) -> bool:
    if node.kwargs or any(argument is True for argument in node.args):  # perhaps inplace=True
        return bool(_argument(node, "inplace", False)) or _is_in_place(node.op, node.target)
    return _is_in_place(node.op, node.target)


@functools.lru_cache(maxsize=4096)
def _is_in_place(op: str, target: Any) -> bool:
    """Check whether a target changes its first argument by default."""
    name = _name(target)
    if target in (operator.setitem, setattr) or name == "__setitem__" or name.strip("_") in _AUGMENTED:
        return True
    if getattr(target, "__module__", "") == "_operator":  # or_, and_, not_ and is_ are named after Python keywords
        return False
    default = _parameters(target).get("inplace", (0, False))[1] if op == "call_function" else False
    return (name.endswith("_") and not name.endswith("__")) or bool(default)


def mutates(node: fx.Node) -> bool:
    """Check whether the node changes a value in place."""
    return bool(changed(node))


def uses_random(node: fx.Node) -> bool:
    """Check whether the node draws random numbers, by its trace or its name (a disabled dropout does not)."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.meta.get("draws") or node.target is drawn_number:
        return True
    name = _name(node.target)
    if "dropout" in name:
        return drops(_argument(node, "p", 0.5), _argument(node, "training", True))
    if name == "scaled_dot_product_attention":
        return drops(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0), True)
    return is_random_name(name) or node.kwargs.get("generator") is not None


def is_random_name(name: str) -> bool:
    """Check whether a function of torch of this name draws random numbers."""
    return "dropout" in name or (name.startswith(_RANDOM_PREFIXES) and name != "normalize")


def drops(probability: object, training: object) -> bool:
    """Check whether a dropout of this probability (a constant or a node) may draw random numbers."""
    return training is not False and not (type(probability) in (int, float, bool) and probability == 0)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _argument(node: fx.Node, name: str, default: object) -> object:
    """Return an argument by name: given by keyword or by position, or the function's default."""
    if name in node.kwargs:
        return node.kwargs[name]
    known = _parameters(node.target).get(name) if node.op == "call_function" else None
    if known is None:
        return default
    position, own_default = known
    return node.args[position] if position < len(node.args) else own_default


@functools.lru_cache(maxsize=1024)
def _parameters(target: Any) -> dict[str, tuple[int, Any]]:
    """Return the position and default of each parameter of a function; without a signature (C) of its operator."""
    try:
        signature = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {each.name: (each.position, each.default) for each in aten_parameters(_name(target))}
    return {parameter.name: (position, parameter.default) for position, parameter in enumerate(signature)}


def changes_object(node: fx.Node) -> bool:
    """Check whether the node may change a stateful object by a method call such as ``cache.update``.

    One named like a query does so if it was seen to, in the trace.
    """
    return bool(node.meta.get("opaque")) and (not is_pure_query(node.target) or bool(node.meta.get("changes")))


def is_pure_query(target: object) -> bool:
    """Check by name whether a method of a stateful object only reads from it (``get_seq_length``)."""
    return (isinstance(target, str) and target.startswith(PREFIXES)) or target in _PURE_QUERIES


def has_effect(node: fx.Node) -> bool:
    """Check whether it is noticeable to run the node twice or not at all. Random draws do not count."""
    if node.target in REGION_FUNCTIONS or node.op == "output":
        return False
    if node.op == "call_module":
        return any(argument.meta.get("object") for argument in node.all_input_nodes)
    return node.target in MESSAGES or mutates(node) or changes_object(node)


def runs_other_code(node: fx.Node) -> bool:
    """Check whether the node runs code outside the graph, which may read any state: a submodule, a method, a hook."""
    if node.op in ("placeholder", "output") or node.meta.get(QUIET):
        return False
    custom = node.meta.get("draws")  # autograd functions and custom operators are marked so
    return bool(node.op == "call_module" or node.meta.get("opaque") or node.meta.get("object") or custom)


def assigned_attribute(node: fx.Node) -> tuple[str, str] | None:
    """Return the table of attributes that the node sets an item of, such as ``"layer.__dict__"``, and the name."""
    if node.target is not operator.setitem or not isinstance(node.args[0], fx.Node) or node.args[0].op != "get_attr":
        return None
    table = str(node.args[0].target)
    return (table, str(node.args[1])) if table.rpartition(".")[2] in ("__dict__", "_buffers") else None


_MAKES_NEW = {"add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "neg", "abs", "where", "cat", "stack"}
_MAKES_NEW |= {"eq", "ne", "lt", "le", "gt", "ge", "clone", "matmul", "linear", "softmax", "arange", "tensor"}
_MAKES_NEW |= {"zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"}
_MAKES_NEW |= {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}


def is_local(node: fx.Node) -> bool:
    """Check whether the effects of ``node`` are limited to values made in this graph."""
    if node.meta.get("local"):
        return True
    if node.target in MESSAGES:
        return False
    if node.op == "call_module":
        return all(_made_here(argument) for argument in node.all_input_nodes if argument.meta.get("object"))
    return all(map(_made_here, node.all_input_nodes[:1] if changes_object(node) else changed(node)))


def _made_here(value: fx.Node) -> bool:
    """Check whether ``value`` was made in this graph and shares nothing with inputs or state of the module."""
    if value.op in ("placeholder", "get_attr", "call_module"):
        return False
    if isinstance(value.target, type) and value.meta.get("object"):  # a cache; it reads settings but never returns one
        return all(_made_here(part) for part in value.all_input_nodes if not _is_setting(part))
    name = _name(value.target)
    if name in _MAKES_NEW and not mutates(value):
        return True
    return all(map(_made_here, value.all_input_nodes))


def _is_setting(value: fx.Node) -> bool:
    """Check whether ``value`` is an object, not a tensor, found in attributes of modules."""
    if value.target in (getattr, operator.getitem) and isinstance(value.args[0], fx.Node):
        return _is_setting(value.args[0])
    return value.op == "get_attr" and "spec" not in value.meta


KIND = "kind"
"""Key of the metadata of results of other code to check: ``(dtype, rank, device type)``, each None if it may be any, or
``()`` if the result has to be None."""


Function = TypeVar("Function", bound=Callable[..., Any])


def graph_check(function: Function) -> Function:
    """Mark a function of graph nodes that raises where a call differs from the recorded one, and changes nothing."""
    _CHECKS.add(function)
    return function


_CHECKS: set[Callable[..., Any]] = set()


def is_check(target: Any) -> bool:
    """Check whether a call of ``target`` only raises where a call of the graph differs from the recorded one."""
    return not isinstance(target, str) and target in _CHECKS


RULE = "rule"
"""Key of the metadata of nodes made by a rewrite: the name of the rule or pattern, else of the primitive."""

ASSUMED = "assumed"
"""Key of the metadata of questions about objects that the graph depends on, whether the forward asks or not. If one is
asked after a lasting effect, another answer is an error."""

QUIET = "quiet"
"""Key of the metadata of reads of objects that run no code of the user."""

LENGTH = "length"
"""Key of the metadata of calls of methods that return a tuple: its length, to check."""


def is_removable(node: fx.Node) -> bool:
    """Check whether an unused node can be removed: it only computes a value, and no data makes it raise."""
    if node.op in ("placeholder", "output", "call_module") or node.target in REGION_FUNCTIONS:
        return False
    if KIND in node.meta:  # its result is checked
        return False
    return not is_check(node.target) and not has_effect(node) and not uses_random(node) and not node.meta.get("raises")


def remove_dead(graph: fx.Graph, nodes: Iterable[fx.Node] | None = None) -> None:
    """Remove unused nodes without effects, last first, from the whole graph or from ``nodes``."""
    candidates: list[Any] = list(graph.nodes if nodes is None else nodes)
    for node in reversed(candidates):
        if not node.users and is_removable(node):
            graph.erase_node(node)
