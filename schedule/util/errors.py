"""Error classes of the package, and how their messages are displayed.

Inner code raises a short error: what failed and why. The outer handler (:func:`located`) adds the requested
operation and the location. Every message therefore states what was requested, where, why it failed, and what to do. An
error about a node of a graph shows the FX code around it, with the node underlined, and the line of the user's code if
it is known. ``str(error)`` is plain text for logs; rich prints the same text in color.
"""

from __future__ import annotations

import difflib
import linecache
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from rich.text import Text
    from torch import fx

CONTEXT = 2
"""How many nodes an excerpt shows before and after the one it is about."""

_SOURCE = re.compile(r"(?:.*(?: at |: ))?(?P<file>[^:]+\.py):(?P<line>\d+)")


@dataclass(frozen=True)
class Excerpt:
    """Code of a graph around one node, captured when the error was created.

    Attributes:
        lines: one line per node, in graph order.
        at: index of the node among these lines.
        located: the node with its line of the user's code, such as ``mul at model.py:12 in forward``.
    """

    lines: tuple[str, ...]
    at: int
    located: str

    @staticmethod
    def of(node: fx.Node) -> Excerpt:
        """Return the excerpt around ``node``."""
        from schedule.util.graph_text import graph_lines  # imports torch, which the command line has no need of yet

        nodes = [node]
        for _ in range(CONTEXT):
            nodes = [*_neighbor(nodes[0].prev), *nodes, *_neighbor(nodes[-1].next)]
        source = node.meta.get("source")
        located = f"{node.name} at {source}" if source else node.name
        return Excerpt(tuple(graph_lines(nodes)), nodes.index(node), located)


def _neighbor(node: fx.Node) -> list[fx.Node]:
    return [] if node.op == "root" else [node]


class ScheduleError(Exception):
    """Base class of all errors of this package.

    Args:
        why: why the request failed.
        fix: what the user can do instead.
        where: source line, shapes or other location of the error, in addition to the module.
        asked: the requested operation, such as ``fuse(bias_gelu)``.
        module: path of the module that caused the error.
        node: the graph node that caused it.

    Attributes:
        excerpt: the graph around ``node``; None if there is none.
    """

    def __init__(
        self,
        why: str,
        *,
        fix: str = "",
        where: str = "",
        asked: str = "",
        module: str = "",
        node: fx.Node | None = None,
    ) -> None:
        self.why, self.fix, self.asked, self.module = why, fix, asked, module
        self.excerpt = None if node is None else Excerpt.of(node)
        self.where = where or (self.excerpt.located if self.excerpt else "")
        super().__init__(why)

    def __str__(self) -> str:
        return "\n".join(text for text, _ in self._lines())

    def __rich__(self) -> Text:
        """Return the text of ``str(error)`` in color."""
        return Text("\n").join(Text.styled(text, style) if style else _labeled(text) for text, style in self._lines())

    def to_dict(self) -> dict[str, Any]:
        """Return the error as plain data, for programs."""
        told = {name: getattr(self, name) for name in ("asked", "why", "module", "where", "fix")}
        return {"kind": type(self).__name__, **told, "graph": list(self.excerpt.lines) if self.excerpt else []}

    def _lines(self) -> Iterator[tuple[str, str]]:
        """Yield (text, style) of each line.

        A line with an empty style may begin with a label.
        """
        first, *more = (f"cannot {self.asked}: {self.why}" if self.asked else self.why).split("\n")
        yield first, "bold red"
        yield from ((line, "red") for line in more)
        above = [] if self.where.startswith(self.module) else [self.module]
        where = [line for line in (*above, *self.where.split("\n")) if line]
        for number, line in enumerate(where):
            yield ("    " if number else "  where: ") + line, ""
            yield from ((text, "cyan") for text in _source_line(line))
        if self.excerpt:
            yield from self._graph(self.excerpt)
        if self.fix:
            yield "  fix: " + self.fix.replace("\n", "\n    "), ""

    def _graph(self, excerpt: Excerpt) -> Iterator[tuple[str, str]]:
        yield "  graph:", ""
        for number, line in enumerate(excerpt.lines):
            here = number == excerpt.at
            yield f"        {line}", "bold" if here else "dim"
            if here:
                yield "        " + "^" * len(line.partition("  #")[0]), "bold red"


def _source_line(where: str) -> Iterator[str]:
    """Yield the source line at an error location, with its line number, if the file can be read."""
    found = _SOURCE.match(where)
    code = linecache.getline(found["file"], int(found["line"])).strip() if found else ""
    if found and code:
        yield f"        {found['line']} | {code}"


def _labeled(text: str) -> Text:
    label, colon, rest = text.partition(": ")
    if not text.startswith("  ") or text.startswith("    "):
        return Text(text)
    return Text.assemble((label + colon, "bold green" if label == "  fix" else "bold"), rest)


class NotApplicable(ScheduleError):
    """The primitive does not apply here.

    Nothing was changed, and the schedule can still be used.
    """


class PathError(ScheduleError, KeyError):
    """No module has this path.

    The message names the nearest paths.
    """

    __str__ = ScheduleError.__str__


class TraceError(ScheduleError):
    """The forward cannot be turned into a graph."""


class MatchError(ScheduleError):
    """A match is missing, stale, foreign, or unsafe to rewrite."""


class ShardError(ScheduleError):
    """A sharding or synchronization request is impossible."""


class RecipeError(ScheduleError):
    """A recorded schedule cannot be read or replayed."""


class VerificationError(ScheduleError):
    """The scheduled model and the original compute different results."""


@contextmanager
def located(asked: str, module: str) -> Iterator[None]:
    """Add the requested operation and the module to each passing :class:`ScheduleError` without them."""
    try:
        yield
    except ScheduleError as error:
        error.asked = error.asked or asked
        error.module = error.module or module
        raise


def no_attribute(owner: object, name: str, primitives: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that neither ``owner`` has nor a registered primitive is called.

    Raises:
        AttributeError: the class of ``owner`` has it as a property; this is the property's own error.
    """
    if hasattr(type(owner), name):
        object.__getattribute__(owner, name)
    known = [each for each in (*dir(type(owner)), *primitives) if not each.startswith("_")]
    near = did_you_mean(name, dict.fromkeys(known))
    return AttributeError(f"{type(owner).__name__} has no attribute or primitive {name!r}{near and '; '}{near}")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a "did you mean …?" question with the nearest known names, or "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
