"""Selection of the backend by a context, the process default, or the environment, in this order."""

from __future__ import annotations

import contextvars
import os
import threading
from dataclasses import dataclass
from types import TracebackType

import torch

BACKENDS = ("reference", "inductor", "triton")
ENVIRONMENT_VARIABLE = "FUSED_BACKEND"

_in_context: contextvars.ContextVar[str | None] = contextvars.ContextVar("fused_backend", default=None)
_lock = threading.Lock()
_defaults: list[backend] = []


@dataclass(frozen=True)
class Choice:
    """Backend of an op, with the reason."""

    op: str
    device: str
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} on {self.device}: {self.backend} ({self.reason})"


class backend:
    """Force a backend for the fused ops, for the process or for a block.

    ``fused.backend("reference")`` as a statement sets the default of the whole process.
    ``with fused.backend("reference"): ...`` sets it for the block, in this thread and context only, and
    restores the previous setting. A backward pass runs on the backend requested in its forward pass.

    Args:
        name: ``"reference"`` (plain torch), ``"inductor"`` (the formulas compiled), ``"triton"``
            (hand-written kernels), or ``"auto"`` to choose by device again.

    Raises:
        ValueError: for any other name.
    """

    def __init__(self, name: str) -> None:
        self.name = _checked(name, "fused.backend")
        self._tokens: list[contextvars.Token[str | None]] = []
        with _lock:
            _defaults.append(self)

    def __enter__(self) -> backend:
        # Used as a block, not a statement: remove it from the process defaults, even if another one was set since.
        with _lock:
            if self in _defaults:
                _defaults.remove(self)
        self._tokens.append(_in_context.set(self.name))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _in_context.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return f"fused.backend({self.name!r})"


def requested() -> str | None:
    """Return the requested backend, or None if the device decides.

    Raises:
        ValueError: if the environment variable ``FUSED_BACKEND`` is not the name of a backend.
    """
    if torch.compiler.is_compiling():
        return None  # under torch.compile the ops always run plain torch
    name = _in_context.get()
    if name is None and _defaults:
        name = _defaults[-1].name
    if name is None:
        setting = os.environ.get(ENVIRONMENT_VARIABLE)
        name = _checked(setting, ENVIRONMENT_VARIABLE) if setting else None
    return None if name == "auto" else name


def _checked(name: str, where: str) -> str:
    if name not in (*BACKENDS, "auto"):
        names = ", ".join((*BACKENDS, "auto"))
        raise ValueError(f"{where}: there is no backend {name!r}; the backends are {names}")
    return name
