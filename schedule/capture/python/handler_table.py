"""Interface of a trace, as used to follow a forward, and the table of handlers of builtins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from schedule.capture.effects.autograd_functions import FunctionTracker
from schedule.capture.effects.opaque import OpaqueTracker
from schedule.capture.effects.regions import RegionTracker
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.python.index_functions import IndexFunctions

# -- Interface of a trace, as used to follow a forward ------------------------------------------------------


Handler = Callable[..., Any]
"""Implementation of a builtin for values from outside: takes the evaluator, then the builtin's arguments."""


class Calls(Protocol):
    """Calls of modules during one trace."""

    def call(self, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module from the forward: write a node, or trace the call if the module is inlined."""

    def forward(self, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the work of ``nn.Module.__call__``."""

    def traces_into(self, path: str) -> bool:
        """Check whether calls of the submodule at ``path`` are inlined, and those of the modules around it."""


class Followed(Trace, Protocol):
    """Trace of a forward run as instrumented code.

    Attributes:
        functions: writes autograd functions and scripted functions.
        index_functions: writes functions of indices.
        opaque: writes operations on stateful objects.
        regions: writes grad-mode and autocast blocks.
    """

    functions: FunctionTracker
    index_functions: IndexFunctions
    opaque: OpaqueTracker
    regions: RegionTracker

    @property
    def calls(self) -> Calls:
        """Calls of modules."""

    def guard_dtype(self, tensor: torch.Tensor) -> None:
        """Guard on the dtype of ``tensor``, a parameter or buffer."""


# -- The table of handlers ----------------------------------------------------------------------------------


HANDLERS: dict[Any, Handler] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler of ``functions``."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register
