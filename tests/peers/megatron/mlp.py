"""A pytest plugin (``-p mlp``) that counts the MLPs of each test; ``--fused-mlp`` makes `fused.MLP` of all of them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

MODULE = "megatron.core.transformer.mlp"


class _Replacing(importlib.abc.MetaPathFinder):
    """Replace the class as soon as its module has run, before another module imports or subclasses it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find the module of the MLP, and leave all others to other finders."""
        if name != MODULE:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            import fused

            execute(module)
            module.MLP = fused.MLP  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module
        return spec


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--fused-mlp", action="store_true", help="put fused.MLP in the place of Megatron's")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Watch for the import of the module, which Megatron's first conftest causes."""
    if early_config.known_args_namespace.fused_mlp:
        sys.meta_path.insert(0, _Replacing())


@pytest.fixture(autouse=True)
def mlps(record_property: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record how many MLPs a test makes, those of subclasses too."""
    mlp: Any = sys.modules[MODULE].MLP  # type: ignore[attr-defined]
    init, made = mlp.__init__, []

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(mlp, "__init__", __init__)
    yield
    record_property("mlps", len(made))
