"""Models that are scheduled, adapted, copied and dropped leave nothing behind; run as a program."""

from __future__ import annotations

import copy
import gc
import linecache
import traceback
import tracemalloc
import warnings
import weakref
from typing import Any

import torch
from torch import nn

import schedule
from schedule.runtime import classes
from schedule.runtime.scheduled import state_of

HIDDEN = torch.linspace(-1, 1, 160).reshape(2, 5, 16)
MODELS = 50


def scheduled() -> nn.Module:
    """A model of a class of its own, adapted to another dtype."""

    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act, self.last = nn.Linear(16, 16), nn.GELU(approximate="tanh"), nn.Identity()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.last(self.act(self.fc(hidden)))

    model = Gelu()
    schedule.optimize(model, HIDDEN, cost_guard=False)
    state = state_of(model)
    assert state is not None
    copy.deepcopy(model)(HIDDEN)
    model.double()(HIDDEN.double())
    assert state.adaptations
    model.float()
    return model


def tables() -> tuple[int, ...]:
    """Sizes of what is shared in the process."""
    while gc.collect():  # what goes may hold the last reference to something else
        pass
    sources = [name for name in linecache.cache if name.startswith("<schedule")]
    return len(sources), len(classes._generated), len(classes._remakes)


def grows() -> None:
    """Schedule and drop many."""
    dropped: list[weakref.ref[Any]] = [weakref.ref(type(scheduled()).__mro__[2]) for _ in range(3)]
    assert tables() == (0, 0, 0), tables()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    dropped += [weakref.ref(type(scheduled()).__mro__[2]) for _ in range(MODELS)]
    assert tables() == (0, 0, 0), tables()
    assert not [cls for cls in dropped if cls() is not None]
    grown = (tracemalloc.get_traced_memory()[0] - before) / MODELS
    tracemalloc.stop()
    print(f"{grown:.0f} bytes a model")
    assert grown < 5_000, f"{grown:.0f} bytes a model"


def tracebacks() -> None:
    """An error in a generated function shows the line, also when the model is gone."""
    model: Any = scheduled()
    model.last.forward = lambda hidden: hidden.no_such_method()
    try:
        model(HIDDEN)
    except AttributeError as error:
        caught = error
    model = None
    assert tables()[0] > 0
    shown = "".join(traceback.format_exception(caught))
    assert "<schedule graph" in shown and "self.last(" in shown, shown
    del caught
    assert tables()[0] == 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    grows()
    tracebacks()
