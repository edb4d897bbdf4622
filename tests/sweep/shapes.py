"""Calls of a model with graphs at other shapes than the recorded one: by a graph or by the original forward."""

from __future__ import annotations

from torch import nn

from schedule.batches import Inputs
from schedule.runtime.scheduled import state_of
from schedule.util.errors import ScheduleError
from schedule.util.generators import seed_all
from schedule.util.named_values import call, named_tensors
from schedule.verify.preserve import preserved
from tests.sweep.parts import inputs_for

SHAPE = (2, 12)  # of example inputs: rows, text tokens
OTHER_SHAPES = ((3, 9), (1, 14))


def bound_to(twin: nn.Module, model: nn.Module, batch: Inputs, known: list[str]) -> str:
    """The rows, length or both of the recorded shape, if the trace holds for no others, or the empty string."""

    def misses(rows: int, length: int) -> bool:
        other = other_inputs(model, batch, rows, length)
        return other is not None and missed(twin, other) != known

    (rows, length), (others, shorter) = SHAPE, OTHER_SHAPES[0]
    if not misses(others, shorter):
        return ""
    one_length = misses(rows, shorter)
    one_number = misses(others, length)
    return "one number of rows" if not one_length else "one shape" if one_number else "one length"


def fallbacks(model: nn.Module, batch: Inputs) -> int:
    """How many calls of scheduled modules run the original forward, on ``batch`` in both modes."""
    return sum(_fallbacks_of(model, batch).values())


def missed(model: nn.Module, batch: Inputs) -> list[str]:
    """The modes in which such calls do."""
    return [mode for mode, count in _fallbacks_of(model, batch).items() if count]


def _fallbacks_of(model: nn.Module, batch: Inputs) -> dict[str, int]:
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    found = {}
    for mode in ("train", "eval"):
        before = sum(state.fallbacks for state in states)
        with preserved(model):
            seed_all(0)
            call(model.train(mode == "train"), batch)
        found[mode] = sum(state.fallbacks for state in states) - before
    return found


def other_inputs(model: nn.Module, batch: Inputs, rows: int, length: int) -> Inputs | None:
    """A batch of other sizes, if it has the same arguments."""
    try:
        other = inputs_for(model, rows, length)
    except ScheduleError:
        return None
    ranks, others = ({name: t.ndim for name, t in named_tensors(each).items()} for each in (batch, other))
    return other if ranks == others else None
