"""Generated functions, with their source available to tracebacks as long as they exist."""

from __future__ import annotations

import functools
import itertools
import linecache
import types
import weakref
from collections.abc import Callable
from typing import Any

_numbers = itertools.count()


def generated(source: str, name: str, namespace: dict[str, Any], kind: str) -> Callable[..., Any]:
    """Compile ``source`` and return its function ``name``.

    Args:
        source: Python code.
        name: name of the function.
        namespace: its globals; the function itself is removed from them, so it is freed with its last reference.
        kind: name of the file in tracebacks, such as ``schedule graph``.
    """
    filename = f"<{kind} {next(_numbers)}>"
    exec(code_of(source, filename), namespace)
    function: Callable[..., Any] = namespace.pop(name)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None).atexit = False
    return function


def code_of(source: str, filename: str) -> types.CodeType:
    """Compile ``source``; like sources, as of the layers of a model, are compiled once.

    The code is a copy of its own: the interpreter and torch.compile keep what they learn of a function at its code.
    """
    return _copied(_compiled(source), filename)


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<schedule>", "exec")


def _copied(code: types.CodeType, filename: str) -> types.CodeType:
    constants = (_copied(each, filename) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=filename, co_consts=tuple(constants))
