"""Calls with a result that depends on the data of tensors: numbers read from them, and data-dependent shapes.

A tracer has no data, so it uses the results of the recorded run. Numbers become symbolic, and a branch on one is
checked when the graph runs. A tensor gets its recorded shape, and its sizes are read again where Python code asks for
them.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from schedule.capture.recording.structure import leaves
from schedule.capture.recording.user_lines import user_line

CallSite = tuple[str, str]  # line of the user's code, name of the function

NUMBERS = frozenset({"__bool__", "__int__", "__float__", "__index__"})
"""Conversions that have to return a plain number of Python."""

_READS = NUMBERS | {"item", "tolist", "equal", "allclose", "is_nonzero"}
_SHAPED_BY_DATA = {
    "nonzero", "argwhere", "where", "masked_select", "unique", "_return_output", "_return_inverse", "_return_counts",
    "_unique_impl", "unique_consecutive", "_consecutive_return_output", "_consecutive_return_inverse",
    "_consecutive_return_counts", "repeat_interleave", "bincount",
}  # fmt: skip


_TAKES_SIZES = {
    "view", "reshape", "expand", "repeat", "interpolate", "arange", "linspace", "zeros", "ones", "full", "empty",
    "new_zeros", "new_ones", "new_full", "new_empty", "pad", "unflatten", "narrow", "split",
}  # fmt: skip


def depends_on_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check whether a number or a shape in the result may depend on data."""
    name = getattr(func, "__name__", "")
    if name in _TAKES_SIZES:  # given as tensors
        return any(isinstance(leaf, torch.Tensor) and leaf.ndim == 0 for _, leaf in leaves((args, kwargs)))
    if name == "where":
        return len(args) == 1
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(map(_shaped_by, index))
    return name in _READS or name in _SHAPED_BY_DATA


def is_shaped_by_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Check whether the shape of the result depends on data."""
    name = getattr(func, "__name__", "")
    if name in ("where", "__getitem__"):
        return depends_on_data(func, args, {})
    return name in _SHAPED_BY_DATA


def writes_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Check whether ``func`` formats the only number of a tensor, as f-strings do."""
    return func is torch.Tensor.__format__ and args[0].ndim == 0


def _shaped_by(index: Any) -> bool:
    """Check whether data decides how much an index picks: a mask, or a slice with a tensor as a bound."""
    if isinstance(index, slice):
        return any(isinstance(bound, torch.Tensor) for bound in (index.start, index.stop, index.step))
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def call_site(func: Any) -> CallSite:
    """Return the key of a call in a forward, equal in the recorded run and in a trace."""
    return user_line(), getattr(func, "__name__", "")


class Seen:
    """Data-dependent results of the calls of one module, in order."""

    def __init__(self) -> None:
        self.results: dict[CallSite, list[Any]] = {}

    def add(self, func: Any, result: Any) -> None:
        """Save a described result. A list of numbers is saved as single ones, because a trace reads them one by one."""
        line, name = call_site(func)
        if name == "tolist":
            self.results.setdefault((line, "item"), []).extend(leaf for _, leaf in leaves(result))
        else:
            self.results.setdefault((line, name), []).append(result)


class Replay:
    """The results of recorded calls, each used once, and the last one of a line again for further calls there."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[int, CallSite]] = Counter()

    def next(self, seen: Seen | None, func: Any) -> list[Any]:
        """Return the described result of the next such call in a list, empty if none was seen."""
        where = call_site(func)
        results = seen.results.get(where, []) if seen is not None else []
        number = min(self._taken[id(seen), where], len(results) - 1)
        self._taken[id(seen), where] += 1
        return results[number : number + 1] if results else []


_UNIFORM = frozenset({torch.rand, torch.rand_like})
_BELOW = frozenset({operator.lt, operator.le})
_ABOVE = frozenset({operator.gt, operator.ge})


def decided(node: fx.Node) -> bool | None:
    """Return the result of a comparison if it is the same for every draw, as of ``torch.rand(()) < 0.0``, else None.

    ``torch.rand`` returns at least 0 and less than 1. LayerDrop makes such a comparison if it is off.
    """
    compared = node.args[0] if node.args else None
    if not isinstance(compared, fx.Node) or compared.target not in _BELOW | _ABOVE:
        return None
    draw, bound = compared.args
    if not isinstance(draw, fx.Node) or draw.target not in _UNIFORM or not isinstance(bound, (int, float)):
        return None
    if bound >= 1:
        return compared.target in _BELOW
    if bound < 0 or (bound == 0 and compared.target in (operator.lt, operator.ge)):
        return compared.target in _ABOVE
    return None


_OF_FINITE = {"isfinite": True, "isinf": False, "isposinf": False, "isneginf": False, "isnan": False}
_UNCHANGED = frozenset({"all", "any"})
_NEGATED = frozenset({"logical_not", "bitwise_not", "__invert__", "invert"})


def expected(node: fx.Node) -> bool | None:
    """Return the answer to a question about infinities for finite values, for a branch never reached in a recorded run.

    Models that clamp overflows ask it in training only: ``if not torch.isfinite(x).all()``.
    """
    asked = node.args[0] if node.args else None
    if not isinstance(asked, fx.Node):
        return None
    name = str(getattr(asked.target, "__name__", asked.target))
    if name in _OF_FINITE:
        return _OF_FINITE[name]
    answer = expected(asked) if name in _UNCHANGED | _NEGATED else None
    return answer if answer is None or name in _UNCHANGED else not answer
