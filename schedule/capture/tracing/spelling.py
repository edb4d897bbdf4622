"""Source code of a graph, including what FX's code generator writes incorrectly."""

from __future__ import annotations

import keyword
import operator
from typing import Any

from torch import fx

from schedule.util.errors import TraceError

_UNQUOTED = {'"', "\\"}


def source_of(graph: fx.Graph) -> Any:
    """Return ``graph.python_code("self")``, correct for any module name and any power.

    FX writes ``self.body.class`` for a keyword and ``getattr(self, "…")`` for any other name that is not an identifier,
    without escaping quotes, backslashes and newlines. For such names the code is made from a copy with escaped names.
    For the power of a negative number, it writes ``-1 ** x``, which is ``-(1 ** x)``; in the copy it is ``pow(-1, x)``.
    """
    if any(_spelled(node) != node.target for node in graph.nodes):
        written = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            copies[node] = written.node_copy(node, copies.__getitem__)
            copies[node].target = _spelled(node)
        graph = written
    return graph.python_code("self")


def _spelled(node: fx.Node) -> Any:
    """Return the target to write, with special parts of a path escaped for FX's quotes."""
    if node.target is operator.pow and repr(node.args[0]).startswith("-"):
        return pow
    if node.op not in ("call_module", "get_attr"):
        return node.target
    parts = str(node.target).split(".")
    return ".".join(part if _is_plain(part) else "".join(f"\\U{ord(char):08x}" for char in part) for part in parts)


def _is_plain(part: str) -> bool:
    return part.isascii() and part.isprintable() and not keyword.iskeyword(part) and not _UNQUOTED & {*part}


def check_spelling(graph: fx.Graph) -> None:
    """Raise if a call cannot be written in Python source.

    Raises:
        TraceError: a call has a keyword such as ``**{"class": x}``, or is of a lambda in place of a function of
            torch.
    """
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "<lambda>":
            raise TraceError(
                "a function of torch was replaced by a lambda, which has no name to call it by",
                where=str(node.meta.get("source", "")),
                fix="replace it by a function with a name",
            )
        for name in node.kwargs:
            if keyword.iskeyword(name) or not name.isidentifier():
                raise TraceError(
                    f"a call is given a keyword argument {name!r}, which no Python code can spell",
                    where=str(node.meta.get("source", "")),
                    fix="rename the argument, or schedule the submodules one by one",
                )
