"""Checks that ``torch.compile`` makes before each run of the code that it compiled."""

from __future__ import annotations

from collections.abc import Callable

from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBase


class CompiledCheck(OpaqueBase):
    """A function of Python state that ``torch.compile`` calls, and guards on, without following its code.

    Compiled code that calls :meth:`holds` has its present answer as a constant, and is compiled again where a later
    call finds another answer. ``torch.distributed.DeviceMesh`` is guarded in the same way.

    Args:
        check: the function. It must not change anything.
    """

    def __init__(self, check: Callable[[], bool]) -> None:
        self._check = check

    def holds(self) -> bool:
        """Return the answer of the function."""
        return self._check()


def _answers(check: CompiledCheck) -> list[bool]:
    return [check.holds()]


register_opaque_type(CompiledCheck, typ="reference", guard_fn=_answers, members={"holds": MemberType.USE_REAL})
