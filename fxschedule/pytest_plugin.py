"""Plugin of pytest: the fixtures ``graph_of`` and ``golden``, and the option ``--update-golden``.

Nothing is imported before a test asks for one of the fixtures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    group = parser.getgroup("fxschedule", "graphs of models")
    group.addoption(
        "--update-golden", action="store_true", help="write the golden files of graphs, instead of comparing with them"
    )


@pytest.fixture
def graph_of() -> Callable[..., Any]:
    """Return :func:`schedule.testing.graph_of`, which traces a module of a model by its path."""
    from schedule.testing import graph_of as trace

    return trace


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function of a graph and a name, to compare the graph with ``golden/<name>.txt`` beside the test.

    Without a name, the file is called like the test.
    """
    from schedule.testing import assert_graph_matches

    def compare(graph: Any, name: str = "") -> None:
        __tracebackhide__ = True
        file = re.sub(r"[^\w.-]+", "-", name or request.node.name).strip("-")
        path = request.path.parent / "golden" / f"{file}.txt"
        assert_graph_matches(graph, path, update=request.config.getoption("--update-golden"))

    return compare
