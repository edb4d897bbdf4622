"""Finding out what a region saves leaves nothing behind."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from schedule.capture.recording.structure import TensorSpec
from schedule.patterns.hazards import Hazards
from schedule.patterns.saving import refuse_saving
from schedule.util.errors import MatchError

_ALIVE: list[weakref.ref[Tensor]] = []


def rectified(x: Tensor) -> Tensor:
    """ReLU, which saves its result."""
    result = torch.relu(x)
    _ALIVE.append(weakref.ref(result))
    return result


def test_tensors_that_were_saved_are_freed() -> None:
    graph = fx.Graph()
    spec = TensorSpec.of(torch.zeros(2))

    def call(function: Any, *args: fx.Node) -> fx.Node:
        node = graph.call_function(function, args)
        node.meta["spec"] = spec
        return node

    x = graph.placeholder("x")
    x.meta["spec"] = spec
    was = call(torch.neg, x)
    made = call(rectified, x)
    graph.call_method("zero_", (was,))
    graph.output(was)
    with pytest.raises(MatchError, match="would keep neg for the backward pass"):
        refuse_saving([was], {was: made}, [made], Hazards(None))
    assert _ALIVE and not any(ref() is not None for ref in _ALIVE)
