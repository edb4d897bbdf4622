"""Counts what the house promises of its code: ``python -m tests.docs.house`` prints the figures, a test holds them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
INTERNALS = ("fused.torch_internals", "fused.assumptions")


@dataclass(frozen=True)
class House:
    """The product's files by module name."""

    root: Path = ROOT

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Module name → its syntax tree."""
        files = [
            path for top in ("fxschedule", "schedule", "fused") for path in sorted((self.root / top).rglob("*.py"))
        ]
        return {_module(path.relative_to(self.root)): ast.parse(path.read_text()) for path in files}

    @cached_property
    def imports(self) -> nx.DiGraph:
        """An edge for each import between files: at the top, in functions and for type checkers alike."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self.trees)
        for name, tree in self.trees.items():
            for target in _imported(tree):
                module = self._file_of(target)
                if module is not None and module != name:
                    graph.add_edge(name, module)
        return graph

    def _file_of(self, name: str) -> str | None:
        while name and name not in self.trees:
            name = name.rpartition(".")[0]
        return name or None

    def circles(self) -> list[list[str]]:
        """Groups of files that import each other."""
        return [sorted(group) for group in nx.strongly_connected_components(self.imports) if len(group) > 1]

    def upward(self) -> list[tuple[str, str]]:
        """Imports of a lower floor from a higher one, by the contract in pyproject.toml."""
        return [(a, b) for a, b in self.imports.edges if self.floor(a) > self.floor(b)]

    @cached_property
    def floors(self) -> list[str]:
        """Packages of the first contract of import-linter, the highest first."""
        settings = tomllib.loads((self.root / "pyproject.toml").read_text())
        layers: list[str] = settings["tool"]["importlinter"]["contracts"][0]["layers"]
        return layers

    def floor(self, module: str) -> float:
        """The number of the floor of ``module``; for the package ``schedule`` itself, right below ``fxschedule``."""
        for number, package in enumerate(self.floors, 1):
            if module == package or module.startswith(f"{package}."):
                return number
        assert module == "schedule", f"{module} is on no floor of pyproject.toml"
        return self.floors.index("fxschedule") + 1.5

    def private(self) -> list[str]:
        """Files that import or read private names of torch's modules."""
        return [name for name, tree in self.trees.items() if any(map(_is_private, _torch_names(tree)))]

    def broad_excepts(self) -> list[str]:
        """``module:line`` of each handler of ``Exception``, ``BaseException`` or everything."""
        nodes = ((name, node) for name, tree in self.trees.items() for node in ast.walk(tree))
        handlers = ((name, node) for name, node in nodes if isinstance(node, ast.ExceptHandler))
        return [f"{name}:{handler.lineno}" for name, handler in handlers if _is_broad(handler)]


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _torch_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names that are imported or read, those of imported modules and classes in full."""
    yield from _imported(tree)
    full = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            full |= {alias.asname: alias.name for alias in node.names if alias.asname}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"[\w.]+", text):
            first, _, rest = text.partition(".")
            yield f"{full.get(first, first)}.{rest}"


def _is_private(name: str) -> bool:
    """Check whether a dotted name passes through a private module or name of torch, operators apart."""
    parts = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
    return parts[0] == "torch" and parts[1:2] != ["ops"] and private


def _is_broad(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"all"}
    return bool(names & {"Exception", "BaseException", "all"})


def main() -> None:
    """Print the figures."""
    house = House()
    print(f"files                 {len(house.trees)}, {house.imports.number_of_edges()} imports")
    print(f"circles               {[len(circle) for circle in house.circles()]}")
    print(f"imports upwards       {len(house.upward())}")
    print(f"files on torch's private names  {len(house.private())}")
    print(f"broad excepts         {len(house.broad_excepts())}")


if __name__ == "__main__":
    main()
