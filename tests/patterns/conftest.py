"""Graphs with recorded specs, made without our tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from schedule.capture.recording.structure import TensorSpec


class _Recorder(fx.Interpreter):
    """Runs a graph and notes what each node gave."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["spec"] = fx.node.map_aggregate(value, _spec)  # type: ignore[arg-type]
        return value


def _spec(value: Any) -> Any:
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else value


@pytest.fixture
def traced() -> Callable[..., fx.Graph]:
    """``traced(function_or_module, *inputs)``: its graph, with specs if inputs are given."""

    def trace(what: Any, *inputs: Any) -> fx.Graph:
        graph = fx.Tracer().trace(what)
        if inputs:
            root = what if isinstance(what, nn.Module) else nn.Module()
            _Recorder(fx.GraphModule(root, graph)).run(*inputs)
        return graph

    return trace
