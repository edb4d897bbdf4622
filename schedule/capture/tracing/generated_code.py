"""Generated functions, with their source available to tracebacks as long as they exist."""

from __future__ import annotations

import itertools
import linecache
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
    exec(compile(source, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace.pop(name)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None).atexit = False
    return function
