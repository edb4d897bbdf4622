"""What following a forward asks of its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from schedule.capture.tracing.functions import FunctionTracker
from schedule.capture.tracing.index_functions import IndexFunctions
from schedule.capture.tracing.opaque import OpaqueTracker
from schedule.capture.tracing.regions import RegionTracker
from schedule.capture.tracing.trace import Trace

Handler = Callable[..., Any]
"""What a builtin does with values from outside: takes the evaluator, then what the builtin takes."""


class Followed(Trace, Protocol):
    """The trace of a forward whose code is followed.

    Attributes:
        functions: writes autograd functions and scripted functions.
        index_functions: writes functions of indices.
        opaque: writes what is done with stateful objects.
        regions: writes grad-mode and autocast blocks.
    """

    functions: FunctionTracker
    index_functions: IndexFunctions
    opaque: OpaqueTracker
    regions: RegionTracker

    def call_module(self, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a module by the forward: a node of the graph, or what it does, if it is entered."""

    def call_forward(self, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``nn.Module.__call__`` does."""

    def found_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """The forward reads ``tensor`` at ``path``."""

    def guard_dtype(self, tensor: torch.Tensor) -> None:
        """From here on the graph only holds where ``tensor``, a parameter or a buffer, has the dtype it has."""
