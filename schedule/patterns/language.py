"""The pattern language: plain functions, small modules, and a few combinators.

    def bias_gelu(x, bias):
        return F.gelu(x + bias, approximate="tanh")

    def attention_weights(scores, mask):
        scores = optional(lambda s: s + mask, name="mask")(scores * scalar("scale"))
        p = F.softmax(scores, dim=-1)
        return optional(lambda p: F.dropout(p, p=scalar("p"), training=scalar("training")), name="dropout")(p)

    compile_pattern(bias_gelu)

A function's parameters are the pattern's inputs. A parameter used only where torch takes no tensor, such as the size
of a pool's window, binds the number or the list there. A parameter with a default may also bind a constant, and
takes the default if the match does not reach it. The tensors of an ``nn.Module`` used as a pattern are
inputs too, named by their paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn

from schedule.capture import TensorSpec
from schedule.patterns.pattern_nodes import InputNode, ScalarNode, Which
from schedule.util.errors import MatchError


def mark_input(name: str) -> None: ...
def mark_scalar(name: str) -> None: ...
def mark_choice(name: str, is_optional: bool, alternatives: Any) -> None: ...
def mark_module(key: int, *args: Any, **kwargs: Any) -> None: ...


class Tracer(fx.Tracer):
    """Tracer of patterns, with a record of the predicates graph nodes cannot store."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, InputNode] = {}
        self.scalars: dict[str, ScalarNode] = {}
        self.markers: dict[str, fx.Proxy] = {}
        self.modules_called: list[Which] = []
        self.foreign: dict[str, nn.Module] = {}
        self.choices: set[str] = set()

    def mark(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> fx.Proxy:
        return self.create_proxy("call_function", function, args, kwargs)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        if kind == "placeholder":
            self.markers["input " + str(target)] = proxy
        return proxy

    def path_of_module(self, mod: nn.Module) -> str:
        try:
            return super().path_of_module(mod)
        except NameError:  # a module from outside the pattern, such as optional(nn.Dropout(0.1))
            path = f"_module_{len(self.foreign)}"
            self.foreign[path] = mod
            return path

    def input(self, name: str) -> InputNode:
        return self.inputs.setdefault(name, InputNode(name))

    def choice_name(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.choices:
            name, count = f"{wanted}_{count}", count + 1
        self.choices.add(name)
        return name


_ACTIVE: ContextVar[Tracer | None] = ContextVar("pattern being traced", default=None)


@contextmanager
def recording(tracer: Tracer) -> Iterator[None]:
    token = _ACTIVE.set(tracer)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def _active(what: str) -> Tracer:
    tracer = _ACTIVE.get()
    if tracer is None:
        raise MatchError(
            f"{what} means something inside a pattern only",
            fix="call it in the function given to compile_pattern or find",
        )
    return tracer


def scalar(name: str, where: Callable[[Any], bool] | None = None) -> Any:
    """Declare a named constant to bind any Python number, flag, None, dtype or size in the graph.

    Args:
        name: key in ``GraphMatch.scalars``; the same name twice must bind the same constant.
        where: predicate on the constant. A value computed from sizes is bound as its node, which is then passed to
            ``where``; a predicate on numbers (``lambda s: s > 0``) rejects nodes.
    """
    tracer = _active("scalar()")
    node = tracer.scalars.setdefault(name, ScalarNode(name, where))
    node.where = node.where or where
    key = "scalar " + name
    if key not in tracer.markers:
        tracer.markers[key] = tracer.mark(mark_scalar, name)
    return tracer.markers[key]


def tensor(
    name: str,
    dtype: torch.dtype | tuple[torch.dtype, ...] = (),
    ndim: int | None = None,
    where: Callable[[TensorSpec], bool] | None = None,
) -> Any:
    """Declare an input with predicates: one of the function's parameters by its name, or an additional one.

    Args:
        dtype: allowed dtypes.
        ndim: number of dimensions.
        where: predicate on the value's :class:`TensorSpec`. A value never seen in a run satisfies no
            predicate.
    """
    tracer = _active("tensor()")
    node = tracer.input(name)
    node.dtype = dtype if isinstance(dtype, tuple) else (dtype,)
    node.ndim, node.where = ndim, where
    key = "input " + name
    if key not in tracer.markers:
        tracer.markers[key] = tracer.mark(mark_input, name)
    return tracer.markers[key]


def any_of(*alternatives: Any, name: str = "any_of") -> Any:
    """Match one of several values, or of several functions: ``any_of(f, g)(x)``.

    Earlier alternatives are preferred.

    Args:
        name: key in ``GraphMatch.choices``, whose value is the index of the alternative found.
    """
    if alternatives and all(callable(a) and not isinstance(a, fx.Proxy) for a in alternatives):

        def call(*args: Any, **kwargs: Any) -> Any:
            return any_of(*(a(*args, **kwargs) for a in alternatives), name=name)

        return call
    tracer = _active("any_of()")
    return tracer.mark(mark_choice, tracer.choice_name(name), False, tuple(alternatives))


def optional(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Match ``f(x)`` if the graph has it, else ``x``: ``optional(f)(x)``.

    Args:
        name: key in ``GraphMatch.choices`` (True if present); the function's name by default.
    """
    label = name or getattr(function, "__name__", type(function).__name__)

    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _active("optional()")
        present = function(value, *args, **kwargs)
        return tracer.mark(mark_choice, tracer.choice_name(label), True, (present, value))

    return call


def call_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Match a call of a function that cannot be called with a pattern's values, such as ``torch.full``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _active("call_function(...)(...)").mark(function, *args, **kwargs)

    return call


class call_module:
    """A call of a module: ``call_module("c_fc")(x)`` or ``call_module(nn.Linear)(x)``.

    Args:
        what: a regular expression for the module's path, or for the path's last parts; a type; or a predicate on
            the module. Passed alone to ``find``, it matches calls with any arguments.
    """

    def __init__(self, what: Which) -> None:
        self.what = what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = _active("call_module(...)(...)")
        tracer.modules_called.append(self.what)
        return tracer.mark(mark_module, len(tracer.modules_called) - 1, *args, **kwargs)
