"""Formatting of sizes and tensors in strings, such as messages of checks and logs.

A size in an f-string does not add a guard to the graph. Instead the string gets an invisible mark. If a marked string
matters, because the graph contains it or tracing fails, the module is traced once more, and then a size in a string
adds a guard like any other use by Python.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import fx

from schedule.capture.recording.structure import leaves
from schedule.util.errors import TraceError

_MARK = "\u2060"  # a word joiner: no key, no name and no number contains one


class Scalar(Protocol):
    """Symbolic number. Reading its value adds a guard."""

    value: int | float | bool

    def known(self) -> Any:
        """Return the number itself for use by Python."""


class Texts:
    """String formatting of sizes in one trace.

    Attributes:
        exact: whether formatting a size adds a guard on it.
        written: whether a size or tensor was formatted without a guard.
    """

    def __init__(self, exact: bool) -> None:
        self.exact, self.written = exact, False

    def of(self, scalar: Scalar) -> str:
        """Return ``scalar`` as a string."""
        if self.exact:
            return str(scalar.known())
        self.written = True
        return f"{scalar.value}{_MARK}"

    def of_tensor(self, number: Any, specification: str = "") -> str:
        """Format a tensor: its ``number`` if given, else a marked placeholder string."""
        if number is not None:
            return format(number, specification)
        self.written = True
        return f"tensor(…){_MARK}"

    def check(self, graph: fx.Graph) -> None:
        """Raise if a string with a mark is part of the graph.

        Raises:
            TraceError: the graph contains a marked string.
        """
        if not self.written:
            return
        for node in graph.nodes:
            for _, leaf in leaves((node.args, dict(node.kwargs))):
                if isinstance(leaf, str) and _MARK in leaf:
                    raise TraceError(f"a text that names a size is part of the graph: {leaf.replace(_MARK, '')!r}")
