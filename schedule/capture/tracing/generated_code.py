"""Generated functions with sources that tracebacks show, for as long as the functions exist."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

_numbers = itertools.count()


def generated(source: str, name: str, namespace: dict[str, Any], kind: str) -> Callable[..., Any]:
    """Compile ``source`` and return the function ``name`` that it defines.

    Args:
        source: Python code.
        name: of the function.
        namespace: its globals; the function itself is not left there, so that it is freed when it is dropped.
        kind: what tracebacks call the file, such as ``schedule graph``.
    """
    filename = f"<{kind} {next(_numbers)}>"
    exec(compile(source, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace.pop(name)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None).atexit = False
    return function
