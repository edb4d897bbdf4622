"""Blocks whose exceptions the forward handles: ``try`` with handlers, ``with`` on an object that may swallow them.

A graph runs its operations outside of such a block, so an exception of one of them would leave the forward. A block
that computes with tensors or calls a module is refused.
"""

from __future__ import annotations

import contextlib
import dis
import operator
import types
from itertools import pairwise
from typing import Any

from torch import fx

from fused.assumptions import holds
from schedule.capture.effects.effects import QUIET, is_pure_query, runs_other_code
from schedule.capture.python.state_reads import Reads
from schedule.capture.recording.structure import TensorSpec, leaves
from schedule.capture.shapes.size_rules import size_read
from schedule.util.errors import ScheduleError
from schedule.util.internal_errors import InternalError

_FIX = "move the computation out of the block, or keep the module that has it a leaf (`leaves=(…,)`)"


class Protected:
    """One such block, entered while it is traced.

    Args:
        evaluator: the evaluator of the forward.
        inner: the object of the ``with`` statement, to enter too; None for a ``try`` statement.
    """

    def __init__(self, evaluator: Reads, inner: Any = None) -> None:
        self._evaluator, self._inner = evaluator, inner
        self._before = 0

    def __enter__(self) -> Any:
        self._before = len(self._evaluator.tracer.graph.nodes)
        return None if self._inner is None else self._inner.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        error = None if error is None else InternalError.of(error) or error
        if isinstance(error, ScheduleError):  # a handler of the user's may swallow it
            self._evaluator.failed = self._evaluator.failed or error
        elif self._evaluator.on:
            self._check(traceback)
        return None if self._inner is None else self._inner.__exit__(kind, error, traceback)

    def _check(self, traceback: types.TracebackType | None) -> None:
        made = list(self._evaluator.tracer.graph.nodes)[self._before :]
        if any(map(_computes, made)) or _comes_from_torch(traceback):
            raise self._evaluator.refused("the forward handles exceptions of operations that a graph would run", _FIX)


_NEVER_RAISING = {operator.add, operator.sub, operator.mul, operator.neg, operator.not_, operator.and_, operator.or_}
_NEVER_RAISING |= {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, abs, min, max}
_METADATA = {"shape", "dtype", "device", "ndim", "layout", "requires_grad"}
_DIVISIONS = {operator.floordiv, operator.mod, operator.truediv}


def _computes(node: fx.Node) -> bool:
    """Check whether the node may raise in another call: it computes, or runs a method or property of an object."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if any(isinstance(each, TensorSpec) for _, each in leaves(node.meta.get("spec"))) or runs_other_code(node):
        return True
    if is_pure_query(node.target) or node.target in _NEVER_RAISING or size_read(node) is not None:
        return False
    if node.target in _DIVISIONS and isinstance(node.args[1], (int, float)) and node.args[1]:
        return False
    return not (node.target is getattr and (node.meta.get(QUIET) or _is_metadata(node)))


def _is_metadata(node: fx.Node) -> bool:
    owner, name = node.args
    return name in _METADATA and isinstance(owner, fx.Node) and isinstance(owner.meta.get("spec"), TensorSpec)


def _comes_from_torch(traceback: types.TracebackType | None) -> bool:
    """Check whether an exception was raised by an operation on tensors."""
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "__torch_function__":
            return True
        traceback = traceback.tb_next
    return False


def may_swallow(manager: Any, leave: Any) -> bool:
    """Check whether a context manager may swallow an exception.

    Args:
        manager: the manager.
        leave: its ``__exit__``.
    """
    if not holds("bytecode of methods"):
        return isinstance(manager, contextlib._GeneratorContextManager) or isinstance(leave, types.FunctionType)
    if isinstance(manager, contextlib._GeneratorContextManager):
        return any(each.opname == "CHECK_EXC_MATCH" for each in dis.get_instructions(manager.func))
    if not isinstance(leave, types.FunctionType):
        return False
    found = list(dis.get_instructions(leave))
    returns = [(before, each) for before, each in pairwise(found) if each.opname.startswith("RETURN_")]
    return not all(_returns_nothing(before, each) for before, each in returns)


def _returns_nothing(before: dis.Instruction, instruction: dis.Instruction) -> bool:
    if instruction.opname == "RETURN_CONST":  # Python 3.12
        return not instruction.argval
    return instruction.opname == "RETURN_GENERATOR" or (before.opname == "LOAD_CONST" and not before.argval)
