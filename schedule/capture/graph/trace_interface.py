"""Interface of one trace for its parts: writing nodes, tracking values, adding guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import fx, nn

from schedule.capture.graph.escaped_containers import HandedContainers
from schedule.capture.graph.output_structure import Expected
from schedule.capture.graph.string_formatting import Strings
from schedule.capture.recording.recording import Recording


class Trace(Protocol):
    """Trace of the forward of a module.

    Attributes:
        module: the traced module.
        recording: the recorded run, source of the outputs of submodule calls.
        graph: the graph written so far.
        guards: node → the value it must compute for the graph to be valid.
        inlined: path → inlined submodule.
        outputs: nodes of calls → the structure of what they returned.
        texts: string formatting of numbers.
        inside_child: whether a submodule that stays a call is running.
    """

    module: nn.Module
    recording: Recording
    graph: fx.Graph
    guards: dict[fx.Node, Any]
    inlined: dict[str, nn.Module]
    outputs: dict[fx.Node, Expected]
    strings: Strings
    containers: HandedContainers
    inside_child: bool

    def emit(self, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """Write a ``call_function`` node, or a ``call_method`` node if ``target`` is a name."""

    def emit_scalar(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> fx.Node:
        """Write a node of arithmetic on sizes."""

    def track(self, value: Any, node: fx.Node) -> Any:
        """Record ``node`` as the node of ``value``, and return the tracked value to use from here on."""

    def guard(self, node: fx.Node, value: Any) -> None:
        """Guard on ``node`` computing ``value``."""

    def ask(self, value: Any, *asked: str) -> None:
        """Note that the forward asks for the dtype, rank or device of ``value``, or whether it is a tensor."""

    def node_of(self, leaf: Any) -> Any:
        """Return the node of ``leaf``, or the constant itself."""

    def as_nodes(self, value: Any) -> Any:
        """Return arguments with tracked values replaced by their nodes."""

    def handed(self, *values: Any) -> tuple[Any, ...]:
        """Return arguments of code outside the graph in nodes: they keep their classes, and containers are shared."""

    def is_outside(self, value: Any) -> bool:
        """Check whether the forward did not make ``value``, an object."""

    @property
    def last_call(self) -> fx.Node | None:
        """The last node that runs other code, or begins or ends a region behind such a node; None for none."""

    def know_constant(self, value: Any) -> None:
        """Guard on what a function or method reads that is the same object at each call, such as its closure."""

    def refuse_writes(self, value: Any) -> None:
        """Refuse that the forward changes the containers in ``value``, found in an argument."""

    def guard_lacks(self, value: Any, name: str) -> None:
        """Guard on ``value`` having no attribute ``name``, if it is a dataclass among the arguments."""

    def guard_identity(self, value: Any) -> None:
        """Guard on ``value`` being the same object at each call, if it was read from outside."""

    def value_of(self, leaf: Any) -> Any:
        """Return the value of a leaf for evaluation: a data-free tensor, a plain number or the object itself."""

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of ``module`` in the traced module, or None if it is not part of it."""


class Sizes(Protocol):
    """Known sizes of the values in one trace."""

    tracer: Trace

    def size(self, node: fx.Node, dim: int, value: int) -> Any:
        """Return size ``dim`` of the value of ``node``, ``value`` in the recorded run."""

    def assumed(self, node: fx.Node, dim: int, value: int) -> Any:
        """Return it as arithmetic on the sizes of inputs and parameters, with assumptions as guards, or None."""

    def setting(self, call: fx.Node, module: nn.Module, name: str) -> Any:
        """Return an attribute of the module called by ``call``, and guard on it."""
