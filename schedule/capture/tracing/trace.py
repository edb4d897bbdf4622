"""What the parts of one trace ask of it: to write nodes, to follow values, to guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import fx, nn

from schedule.capture.recording.recording import Recording
from schedule.capture.tracing.string_formatting import Strings


class Trace(Protocol):
    """One trace of the forward of a module.

    Attributes:
        module: the traced module.
        recording: where the values of submodule calls come from.
        graph: the graph, as far as it is written.
        guards: node → the value that it has to compute for the graph to hold.
        entered: path → submodule whose inside is part of the graph.
        outputs: nodes of calls, with the tracked values that they gave.
        texts: how numbers are written as text.
        inside_child: whether a submodule that stays a call is running.
    """

    module: nn.Module
    recording: Recording
    graph: fx.Graph
    guards: dict[fx.Node, Any]
    inlined: dict[str, nn.Module]
    outputs: dict[fx.Node, Any]
    texts: Strings
    inside_child: bool

    def emit(self, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """A ``call_function`` node, or a ``call_method`` node where ``target`` is a name."""

    def emit_scalar(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> fx.Node:
        """A node of arithmetic on sizes."""

    def track(self, value: Any, node: fx.Node) -> Any:
        """Remember that ``node`` computes ``value``; returns the value to go on with."""

    def guard(self, node: fx.Node, value: Any) -> None:
        """From here on the graph only holds where ``node`` computes ``value``."""

    def node_of(self, leaf: Any) -> Any:
        """What stands for ``leaf`` in the graph: a node, or the constant itself."""

    def as_nodes(self, value: Any) -> Any:
        """Arguments as the graph writes them."""

    def value_of(self, leaf: Any) -> Any:
        """What a leaf is worth when the call is really made on data-free tensors."""

    def path_of(self, module: nn.Module) -> str | None:
        """Where ``module`` is in the traced one; None if it is not part of it."""
