"""Instructions and loops of a cubin, by the tools in Triton's wheel."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Code:
    """The code of one kernel.

    Attributes:
        instructions: names with modifiers, such as ``LDG.E.128``.
        edges: pairs of positions that may follow each other.
        registers: per thread.
    """

    instructions: list[str]
    edges: list[tuple[int, int]]
    registers: int

    def loops(self) -> list[list[str]]:
        """Return the instructions of each natural loop, in the order of the code; jumps out of line are no loops."""
        graph = nx.DiGraph(self.edges)
        graph.add_node(0)
        dominators = dict(nx.immediate_dominators(graph, 0))
        bodies: dict[int, set[int]] = {}
        for last, first in self.edges:
            if first <= last and last in dominators and _dominates(dominators, first, last):
                rest = graph.reverse(copy=False).subgraph(set(graph) - {first})
                inside = nx.descendants(rest, last) if last != first else set()
                bodies.setdefault(first, {first}).update(inside, {last})
        return [[self.instructions[n] for n in sorted(bodies[first])] for first in sorted(bodies)]


def _dominates(dominators: dict[int, int], above: int, node: int) -> bool:
    while node != above and dominators.get(node, node) not in (node, None):
        node = dominators[node]
    return node == above


def disassembled(cubin: Path) -> Code:
    """Disassemble a cubin with one kernel."""
    text = _output("nvdisasm", "-c", str(cubin))
    usage = _output("cuobjdump", "--dump-resource-usage", str(cubin))
    registers = max(int(number) for number in re.findall(r"REG:(\d+)", usage))
    return parsed(text, registers)


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def parsed(text: str, registers: int) -> Code:
    """Read the output of nvdisasm."""
    labels: dict[str, int] = {}
    found: list[tuple[bool, str, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif parts := _INSTRUCTION.search(line):
            name = parts[2]
            target = _TARGET.search(parts[3])
            # Behind the last instruction: a jump to itself, and padding.
            if name == "NOP" or (name == "BRA" and target and labels.get(target[1]) == len(found) and not parts[1]):
                continue
            found.append((bool(parts[1]), name, target[1] if target else ""))
    edges = []
    for position, (conditional, name, target_label) in enumerate(found):
        kind = name.partition(".")[0]
        if kind == "BRA":
            conditional = conditional or ".DIV" in name
            edges.append((position, labels[target_label]))
        if conditional or kind not in ("BRA", "EXIT", "RET"):
            edges.append((position, position + 1))
    inside = [(a, b) for a, b in edges if b < len(found)]
    return Code([name for _, name, _ in found], inside, registers)
