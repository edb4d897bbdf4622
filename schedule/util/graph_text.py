"""Nodes of a graph as lines of text."""

from __future__ import annotations

from torch import fx


def graph_lines(nodes: list[fx.Node]) -> list[str]:
    """Return one line per node: name, call, and dtype with shape."""
    lines = []
    for node in nodes:
        spec = node.meta.get("spec")
        dtype, shape = getattr(spec, "dtype", None), getattr(spec, "shape", None)  # of a tensor
        shape = "" if shape is None else f"  # {str(dtype).removeprefix('torch.')}{list(shape)}"
        lines.append(f"{_assignment(node)}{shape}")
    return lines


def _assignment(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: an input"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.op == "output":
        return f"return {node.args[0]}"
    parts = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    if node.op == "call_method":
        return f"{node.name} = {parts[0]}.{node.target}({', '.join(parts[1:])})"
    name = f"self.{node.target}" if node.op == "call_module" else getattr(node.target, "__name__", str(node.target))
    return f"{node.name} = {name}({', '.join(parts)})"
