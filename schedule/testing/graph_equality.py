"""Equality of graphs with each other and with golden files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from schedule.api.schedule import create_schedule
from schedule.capture import expand, is_check
from schedule.patterns.canonical import Line, canonical_lines
from schedule.patterns.equality import graphs_equal
from schedule.testing.difference import side_by_side
from schedule.util.arguments import keywords_checked
from schedule.util.errors import NotApplicable
from schedule.util.files import write


@dataclass(frozen=True)
class Traced:
    """A graph with the modules that it calls.

    Attributes:
        graph: the graph.
        modules: the modules that it calls, by path.
    """

    graph: fx.Graph
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the graph as in golden files: one line for each operation, whatever its name and order."""
        return "\n".join(line.text for line in self.lines())

    def lines(self) -> list[Line]:
        """Return the operations as text, with the lines of code that they come from."""
        return canonical_lines(self.graph, self.modules)


Graph = Traced | fx.Graph | fx.GraphModule | ExportedProgram
"""What the assertions take for a graph."""


@keywords_checked(example_inputs="batch")
def graph_of(model: nn.Module, batch: Any, path: str = "", *, training: bool = True) -> Traced:
    """Trace the forward of a module, and return its graph.

    Modules without submodules, such as a ``Linear`` or an activation, are inlined; others are calls in the graph. The
    model is left unchanged.

    Args:
        model: the model.
        batch: what the model is called with: a mapping, a tuple or a tensor.
        path: path of the module in the model, such as ``"model.layers.0.mlp"``; "" for the model itself.
        training: whether the graph is that of training mode.

    Raises:
        PathError: there is no such module.
        TraceError: its forward cannot be traced; the message has the line and the reason.
        NotApplicable: it is not called, or not traced in this mode.
    """
    sch = create_schedule(model, batch)
    module = sch.select(path)[0] if path else sch
    made = next((each for each in module.specializations if each.training is training), None)
    if made is None:
        mode = "training" if training else "eval"
        raise NotApplicable(f"{path or 'the model'} has no graph in {mode} mode", fix=f"training={not training}")
    graph = expand(made, module.module, module.tree.graphs.recording).graph
    return Traced(_without_checks(graph), dict(module.module.named_modules()))


def assert_graphs_equal(one: Graph, other: Graph) -> None:
    """Assert that two graphs have the same operations, with the same configuration and the same operands.

    Names and order of nodes do not count, nor does the order of operands that commute. The order of the graph's
    arguments counts, and so do the paths of parameters and modules, and constants, dtypes among them. Graphs are
    compared by isomorphism of their normalized forms: ``x.relu()`` equals ``F.relu(x)``.

    Raises:
        AssertionError: they differ; the message shows both, side by side, with the first difference marked.
        TypeError: one of them is not a graph.
    """
    __tracebackhide__ = True
    left, right = _traced(one), _traced(other)
    if not graphs_equal(left.graph, right.graph, left.modules, right.modules):
        raise AssertionError(f"the graphs differ:\n{side_by_side(left.lines(), right.lines())}")


def assert_graph_matches(graph: Graph, golden_file: str | PathLike[str], *, update: bool = False) -> None:
    """Assert that a graph is the one in a file, in the sense of :func:`assert_graphs_equal`.

    Args:
        graph: the graph.
        golden_file: path of the file, which is text, one line for each operation.
        update: whether to write the file instead.

    Raises:
        AssertionError: there is no such file, or the graph is another one; the message shows both, side by side.
        TypeError: ``graph`` is not a graph.
    """
    __tracebackhide__ = True
    path, lines = Path(golden_file), _traced(graph).lines()
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, "\n".join([*(line.text for line in lines), ""]))
        return
    if not path.exists():
        raise AssertionError(f"there is no golden file {path}\n  fix: write it with `pytest --update-golden`")
    golden = [Line(text) for text in path.read_text(encoding="utf-8").splitlines()]
    if [line.text for line in golden] != [line.text for line in lines]:
        shown = side_by_side(golden, lines)
        raise AssertionError(
            f"the graph is not the one in {path} (left):\n{shown}\n"
            "  fix: if the change is intended, write the file again with `pytest --update-golden`"
        )


def _traced(graph: Graph) -> Traced:
    if isinstance(graph, Traced):
        return graph
    if isinstance(graph, fx.Graph):
        return Traced(_without_checks(graph))
    if isinstance(graph, ExportedProgram):
        graph = graph.module()
    if isinstance(graph, fx.GraphModule):
        return Traced(_without_checks(graph.graph), dict(graph.named_modules()))
    raise TypeError(
        f"a {type(graph).__name__} is not a graph; pass an fx.Graph, an fx.GraphModule, an ExportedProgram, or the "
        "result of schedule.testing.graph_of"
    )


_PURE = ("_operator", "builtins", is_check.__module__)
"""Modules of the functions that compute what checks are about."""


def _without_checks(graph: fx.Graph) -> fx.Graph:
    """Return a copy without the nodes that check, at run time, that a call is like the recorded one."""
    copy, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, copied))
    checked: set[fx.Node] = set()
    for node in reversed(list(copy.nodes)):
        asked = node in checked and node.op == "call_function" and getattr(node.target, "__module__", "") in _PURE
        if not node.users and (asked or is_check(node.target) or node.target == "_guards_fn"):  # of ExportedProgram
            checked.update(node.all_input_nodes)
            copy.erase_node(node)
    return copy
