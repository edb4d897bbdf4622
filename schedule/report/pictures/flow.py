"""Reduction of an FX graph to the nodes and edges to draw: tensors and the operations on them.

Sizes, checks and tuple items are left out of the picture, and parameters are named in the box that reads them; the
text of the graph next to the picture has every node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from schedule.capture import REGION_FUNCTIONS, TensorSpec, is_check, original_class
from schedule.report.pictures.paths import ranged
from schedule.util.graph_text import graph_lines
from schedule.util.wording import counted, size_text

Kind = Literal["input", "output", "call", "op", "folded"]

LONGEST = 30
_RUN = 3
_HIDDEN = {getattr, *REGION_FUNCTIONS}


@dataclass(frozen=True)
class Node:
    """One box.

    Attributes:
        name: of the node in the graph.
        kind: input, output, module call, operation, or several folded ones.
        title: the operation, or the called module.
        lines: further lines in the box: class or parameters, shape.
        tip: lines of the tooltip, with all known details.
        path: of the called module, relative to the module of the graph; the first of several.
    """

    name: str
    kind: Kind
    title: str
    lines: tuple[str, ...]
    tip: tuple[str, ...]
    path: str = ""


@dataclass(frozen=True)
class Flow:
    """Drawn nodes and edges of a graph.

    Attributes:
        nodes: in graph order.
        edges: (from, to), indices in ``nodes``.
        text: every node of the graph, one line each.
        names: of the nodes, one for each line of ``text``.
        shape: key shared by similar graphs, such as those of layers that differ only in layer numbers.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    text: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[Any, ...]


def flow_of(graph: fx.Graph, modules: Mapping[str, nn.Module], looks: Callable[[str], Any] = lambda path: None) -> Flow:
    """Return the drawn nodes and edges of ``graph``, with runs of similar layers as one box.

    In a run, each layer takes the output of the previous one.

    Args:
        graph: of one module.
        modules: path → module, for its calls.
        looks: path → a value that must be equal for similar modules.
    """
    every = list(graph.nodes)
    runs: list[list[fx.Node]] = []
    for node in filter(_is_shown, every):
        if runs and _goes_on(runs[-1], node, modules, looks):
            runs[-1].append(node)
        else:
            runs.append([node])
    runs = [part for run in runs for part in ([run] if len(run) >= _RUN else [[node] for node in run])]
    position = {node: number for number, run in enumerate(runs) for node in run}
    pairs = (
        (position[source], position[node])
        for node in position
        for read in node.all_input_nodes
        for source in _makers(read, position)
    )
    edges = dict.fromkeys((source, target) for source, target in pairs if source != target)
    nodes = tuple(_box(run[0], modules) if len(run) == 1 else _run_box(run, modules) for run in runs)
    text, names = tuple(graph_lines(every)), tuple(node.name for node in every)
    return Flow(nodes, tuple(edges), text, names, tuple(map(_shape, every)))


def _shape(node: fx.Node) -> tuple[str, ...]:
    """Return the key of a node for comparing layers, without the integers in its arguments."""
    arguments = re.sub(r"\b\d+\b(?!\.)", "#", str(node.args))
    return node.name, node.op, _name_of(node), arguments, str(node.kwargs), str(node.meta.get("spec"))


def _goes_on(
    run: Sequence[fx.Node], node: fx.Node, modules: Mapping[str, nn.Module], looks: Callable[[str], Any]
) -> bool:
    """Check whether ``node`` calls the next similar layer after ``run``, on the output of the last one."""
    last = run[-1]
    if node.op != "call_module" or last.op != "call_module" or len(ranged([str(last.target), str(node.target)])) > 1:
        return False
    before, path = str(last.target), str(node.target)
    if original_class(modules[before]) is not original_class(modules[path]) or looks(before) != looks(path):
        return False
    given = {source for source in node.all_input_nodes if last not in (source, *_items(source))}
    fed = len(given) < len(node.all_input_nodes) and given <= set(last.all_input_nodes)
    return fed and str(last.meta.get("spec")) == str(node.meta.get("spec"))


def _items(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes if _is_item(node) else []


def _run_box(run: Sequence[fx.Node], modules: Mapping[str, nn.Module]) -> Node:
    first, last = _box(run[0], modules), _tip(run[-1])
    (title,) = ranged(str(node.target) for node in run)
    lines = (f"{first.lines[0]} ×{len(run)}", *first.lines[1:])
    return Node(
        first.name, "call", _cut(title), lines, (*first.tip, f"… and so on, {len(run)} alike, to", *last), first.path
    )


def _is_shown(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return any(_is_shown(user) for user in node.users)
    if node.op in ("output", "call_module"):
        return True
    number = isinstance(node.meta.get("spec"), (bool, int, float))
    return not (node.op == "get_attr" or number or node.target in _HIDDEN or is_check(node.target) or _is_item(node))


def _is_item(node: fx.Node) -> bool:
    """Check whether ``node`` only takes one item of an operation's several results."""
    if getattr(node.target, "__name__", "") != "getitem" or not isinstance(node.args[1], (int, str)):
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and not isinstance(source.meta.get("spec"), TensorSpec)


def _makers(node: fx.Node, position: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the drawn nodes producing the value of ``node``."""
    if node in position:
        return [node]
    return [made for source in node.all_input_nodes for made in _makers(source, position)] if _is_item(node) else []


def _box(node: fx.Node, modules: Mapping[str, nn.Module]) -> Node:
    shape = shape_text(node.meta.get("spec"))
    if node.op == "placeholder":
        return Node(node.name, "input", node.name, _some(shape), _tip(node))
    if node.op == "output":
        return Node(node.name, "output", "output", (), _tip(node))
    if node.op == "call_module":
        path = str(node.target)
        kind = original_class(modules[path]).__name__ if path in modules else ""
        return Node(node.name, "call", _cut(path), _some(_cut(kind), shape), _tip(node), path)
    read = ", ".join(str(source.target) for source in node.all_input_nodes if source.op == "get_attr")
    title = _cut(" ".join([_name_of(node), *_constants(node)]))
    return Node(node.name, "op", title, _some(_cut(read), shape), _tip(node))


def _some(*lines: str) -> tuple[str, ...]:
    return tuple(line for line in lines if line)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _name_of(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target)).strip("_")


def _constants(node: fx.Node) -> list[str]:
    """Return the constant arguments of an operation, if there are at most three simple ones."""
    given = [arg for arg in node.args if not isinstance(arg, fx.Node)]
    if not all(isinstance(arg, (int, float, str, torch.dtype)) for arg in given) or len(given) > 3:
        return []
    return [str(arg).removeprefix("torch.") if not isinstance(arg, float) else f"{arg:.4g}" for arg in given]


def _tip(node: fx.Node) -> tuple[str, ...]:
    (line,) = graph_lines([node])
    spec, lines = node.meta.get("spec"), [line.partition("  # ")[0]]
    if isinstance(spec, TensorSpec):
        lines.append(f"{_dtype(spec)} {list(spec.shape)}, {size_text(spec.nbytes)}, {spec.device}")
    elif isinstance(spec, (tuple, list)):
        parts = [(i, each) for i, each in enumerate(spec) if isinstance(each, TensorSpec)]
        lines += [f"[{i}] {shape_text(each)}, {size_text(each.nbytes)}" for i, each in parts]
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            lines.append(f"{source.target}: {shape_text(source.meta.get('spec')) or 'a constant'}")
    if node.meta.get("module") and node.op != "call_module":
        lines.append(f"in {node.meta['module']}")
    if node.meta.get("source"):
        lines.append(f"at {_short_source(node.meta['source'])}")
    return tuple(lines)


def shape_text(spec: Any) -> str:
    """Format a spec as dtype and sizes, such as ``f32 2×16×64``.

    Return the number of tensors for several, and "" for anything else.
    """
    if isinstance(spec, TensorSpec):
        return f"{_short_dtype(spec)} {'×'.join(map(str, spec.shape)) or 'scalar'}"
    count = sum(isinstance(each, TensorSpec) for each in spec) if isinstance(spec, (tuple, list)) else 0
    return counted(count, "tensor") if count else ""


def _dtype(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def _short_dtype(spec: TensorSpec) -> str:
    name = _dtype(spec)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def _short_source(source: str) -> str:
    """Return a source location without the folder of installed packages."""
    return source.rpartition("site-packages/")[2]
