"""Numbers that a forward draws outside of torch, as for LayerDrop by ``random.uniform`` or ``numpy.random.uniform``."""

from __future__ import annotations

import sys
from typing import Any

from schedule.capture.tracing.reading.plain import is_atom


def drawn_number(module: str, name: str, *args: Any) -> Any:
    """Return a number drawn by a function of the module ``random`` or ``numpy.random`` (graph target)."""
    return getattr(sys.modules[module], name)(*args)


def drawn_by(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments of :func:`drawn_number` for a call that draws a number, None for any other call."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if owner is None and args:  # the function of a method
        owner, *rest = args
        args = tuple(rest)
    for module, most in _NUMBERS.items():
        known = getattr(getattr(sys.modules.get(module), "random", None), "__self__", None)
        if owner is known is not None and len(args) <= most.get(name, -1) and all(map(is_atom, args)):
            return module, name, *args
    return None


_NUMBERS = {
    "random": {
        "random": 0,
        "getrandbits": 1,
        "randint": 2,
        "randrange": 3,
        "uniform": 2,
        "gauss": 2,
        "normalvariate": 2,
    },
    "numpy.random": {"random": 0, "rand": 0, "randn": 0, "randint": 2, "uniform": 2, "normal": 2},
}
"""Functions that draw one number, and how many arguments they take at most to do so."""
