"""Methods of stateful objects that only answer a question, by their name and their code.

A graph may leave such a call out if its result is unused, and other code may be moved across it.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch

from fused.assumptions import holds

PREFIXES = ("get_", "is_", "has_")
"""Beginnings of the names of methods that ask a question."""

_STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "DELETE_GLOBAL")
_CHANGING_METHODS = {"append", "extend", "insert", "remove", "reverse", "sort", "clear", "pop", "popitem", "add"}
_CHANGING_METHODS |= {"update", "setdefault", "discard", "backward", "register_hook"}
_CHANGING_FUNCTIONS = ("setattr", "delattr", "exec", "eval", "open", "print", "input", "vars", "globals")
_ANSWERING = {
    name
    for cls in (torch.Tensor, dict, list, tuple, set, str, int, float)
    for name in dir(cls)
    if not name.endswith("_") and name not in _CHANGING_METHODS
}


def may_change(method: Any) -> bool:
    """Check whether a method with the name of a question may change state, in this call or in a later one.

    It may if its code assigns anything but its own variables, or calls a method or function that is not known to only
    answer a question; methods of the same object are followed. Methods written in C are taken at their name.
    """
    owner = getattr(method, "__self__", None)
    if not holds("bytecode of methods"):
        return isinstance(getattr(method, "__func__", method), types.FunctionType)
    return _function_may_change(getattr(method, "__func__", method), type(owner))


def _function_may_change(function: Any, cls: type) -> bool:
    pending, seen = [function], set[Any]()
    while pending:
        function = pending.pop()
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        code = function.__code__
        own_iterator = any(isinstance(each, types.CodeType) and each.co_name == "<genexpr>" for each in code.co_consts)
        if "next" in code.co_names and not own_iterator:
            return True
        for before, each in itertools.pairwise(_instructions(code)):
            if each.opname in _STORES or (_is_global(each) and each.argval in _CHANGING_FUNCTIONS):
                return True
            if not _is_method(each):
                continue
            own = getattr(cls, each.argval, None) if code.co_argcount and _reads(before, code.co_varnames[0]) else None
            if isinstance(own, types.FunctionType):
                pending.append(own)
            elif not each.argval.startswith(PREFIXES) and each.argval not in _ANSWERING:
                return True
    return False


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _is_global(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")


def _is_method(instruction: dis.Instruction) -> bool:
    """Check whether a method is looked up to be called."""
    called = instruction.opname in ("LOAD_METHOD", "LOAD_SUPER_ATTR")
    return called or (instruction.opname == "LOAD_ATTR" and "NULL|self" in instruction.argrepr)


def _reads(instruction: dis.Instruction, name: str) -> bool:
    return instruction.opname.startswith("LOAD_FAST") and instruction.argval == name
