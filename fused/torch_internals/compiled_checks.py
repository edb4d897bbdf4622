"""Checks that ``torch.compile`` makes before each run of the code that it compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from fused.assumptions import holds

_CAN_REGISTER = holds("guards in compiled code")
_Base: Any = object
if _CAN_REGISTER and find_spec("torch._custom_class_base") is not None:  # torch 2.14
    _Base = import_module("torch._custom_class_base").CustomClassBase
elif _CAN_REGISTER:
    _Base = import_module("torch._opaque_base").OpaqueBase

Place = tuple[Any, str | None]
_GLOBAL = "NewGlobalVariable"  # torch's class for globals set by the function that is compiled


class CompiledCheck(_Base):
    """A function of Python state that ``torch.compile`` calls, and guards on, without following its code.

    Compiled code that calls :meth:`holds` has its present answer as a constant, and is compiled again where a later
    call finds another answer. ``torch.distributed.DeviceMesh`` is guarded in the same way. What the code changes before
    the call of :meth:`holds` has not happened yet while it is compiled: there the answer is False.

    Args:
        check: the function. It must not change anything.
        places: returns what the function depends on: objects, each with the name of an attribute or None for items.
    """

    def __init__(self, check: Callable[[], bool], places: Callable[[], Iterable[Place]]) -> None:
        self._check, self._places = check, places

    def holds(self) -> bool:
        """Return the answer of the function."""
        if not _CAN_REGISTER and torch.compiler.is_compiling():
            return False  # the original forward is compiled
        return not _changes(self._places) and self._check()


def _changes(places: Callable[[], Iterable[Place]]) -> bool:
    """Check whether code that is being compiled, as far as it is compiled, changes one of ``places``."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        effects = dynamo.InstructionTranslator.current_tx().output.side_effects  # type: ignore[union-attr]
    except AttributeError:  # nothing is being compiled
        return False
    if not any(_is_modified(effects, each) for each in effects.id_to_variable.values()):
        return False
    return any(_is_changed(effects, owner, name) for owner, name in places())


def _is_modified(effects: Any, variable: Any) -> bool:
    mutated = variable.source is not None and variable.source in getattr(effects, "mutated_sources", ())
    return mutated or bool(variable.mutation_type and effects.is_modified(variable))


def _is_changed(effects: Any, owner: Any, name: Any) -> bool:
    if isinstance(owner, dict) and "__builtins__" in owner:  # the globals of a file
        owner = sys.modules.get(str(owner.get("__name__")), owner)
        of_root = (names for each, names in effects.store_attr_mutations.items() if type(each).__name__ == _GLOBAL)
        if any(name in names for names in of_root):
            return True
    if owner not in effects:
        return False
    variable = effects[owner]
    if name is not None and effects.is_attribute_mutation(variable):
        return name in effects.store_attr_mutations.get(variable, ())
    return _is_modified(effects, variable)


def _answers(check: CompiledCheck) -> list[bool]:
    return [check.holds()]


def _register() -> None:
    from torch._library import opaque_object as registry

    members = {"holds": registry.MemberType.USE_REAL}
    if hasattr(registry, "register_custom_class"):  # torch 2.14
        registry.register_custom_class(CompiledCheck, typ="symbolic", guard_fn=_answers, members=members)
    else:
        registry.register_opaque_type(CompiledCheck, typ="reference", guard_fn=_answers, members=members)
    # Where a caller is not compiled, because a graph ended before, it is not compiled by itself either.
    frames = torch._C._dynamo.eval_frame
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(CompiledCheck.holds.__code__, skipped)


if _CAN_REGISTER:
    _register()
