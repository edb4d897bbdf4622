"""The source of a graph, also where modules have names that FX's generator does not quote right."""

from __future__ import annotations

import keyword
from typing import Any

from torch import fx

from schedule.util.errors import TraceError

_UNQUOTED = {'"', "\\"}


def source_of(graph: fx.Graph) -> Any:
    """``graph.python_code("self")``.

    FX writes ``self.body.class`` for a keyword, and ``getattr(self, "…")`` around anything else that is no identifier,
    quotes, backslashes and newlines as they are. There the code comes from a copy with such names spelled in escapes.
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
    """The target, so that FX's quotes around parts of a path give them."""
    if node.op not in ("call_module", "get_attr"):
        return node.target
    parts = str(node.target).split(".")
    return ".".join(part if _is_plain(part) else "".join(f"\\U{ord(char):08x}" for char in part) for part in parts)


def _is_plain(part: str) -> bool:
    return part.isascii() and part.isprintable() and not keyword.iskeyword(part) and not _UNQUOTED & {*part}


def check_keywords(graph: fx.Graph) -> None:
    """See that calls can be written down.

    Raises:
        TraceError: one has a keyword argument such as ``**{"class": x}``.
    """
    for node in graph.nodes:
        for name in node.kwargs:
            if keyword.iskeyword(name) or not name.isidentifier():
                raise TraceError(
                    f"a call is given a keyword argument {name!r}, which no Python code can spell",
                    where=str(node.meta.get("source", "")),
                    fix="rename the argument, or schedule the submodules one by one",
                )
