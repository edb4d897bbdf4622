"""Sizes and tensors written into texts: messages of checks and logs, which nobody reads unless something is wrong.

A graph is not bound to a size because an f-string names it. The text gets an invisible mark; where a marked text is
found to matter, because the graph holds it or because the forward fails with it, the module is traced once more, and
then a size in a text is a size that Python has asked for.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import fx

from schedule.capture.recording.structure import leaves
from schedule.util.errors import TraceError

_MARK = "\u2060"  # a word joiner: no key, no name and no number contains one


class Scalar(Protocol):
    """A number that Python may ask for, which binds the graph to it."""

    value: int | float | bool

    def known(self) -> Any:
        """The number itself, for Python to use."""


class Texts:
    """How one trace writes sizes as text.

    Attributes:
        exact: whether a size in a text binds the graph to it.
        written: whether a size was written without binding the graph.
    """

    def __init__(self, exact: bool) -> None:
        self.exact, self.written = exact, False

    def of(self, scalar: Scalar) -> str:
        """``scalar`` as text."""
        if self.exact:
            return str(scalar.known())
        self.written = True
        return f"{scalar.value}{_MARK}"

    def of_tensor(self, number: Any, specification: str = "") -> str:
        """A tensor as text: the number in it, if it holds one only, else nothing that a graph could use."""
        if number is not None:
            return format(number, specification)
        self.written = True
        return f"tensor(…){_MARK}"

    def check(self, graph: fx.Graph) -> None:
        """See that no text with a mark is part of the graph.

        Raises:
            TraceError: one is.
        """
        if not self.written:
            return
        for node in graph.nodes:
            for _, leaf in leaves((node.args, dict(node.kwargs))):
                if isinstance(leaf, str) and _MARK in leaf:
                    raise TraceError(f"a text that names a size is part of the graph: {leaf.replace(_MARK, '')!r}")
