"""Random generators of torch, its devices, Python and numpy."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def generator_states(model: nn.Module | None = None) -> dict[str, Any]:
    """Return the states of the random generators of torch, its devices, Python and numpy.

    Args:
        model: include only the GPUs of its parameters; all GPUs if None and CUDA is initialized.
    """
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if _numpy() is not None:
        states["numpy"] = _numpy().random.get_state()
    if model is not None:
        gpus = {t.device.index or 0 for t in model.parameters() if t.device.type == "cuda"}
    else:
        gpus = set(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else set()
    for index in sorted(gpus):
        states[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
    return states


@contextmanager
def generators_restored(model: nn.Module) -> Iterator[None]:
    """Restore the random generators used by ``model`` on exit."""
    states = generator_states(model)
    try:
        yield
    finally:
        restore_generators(states)


def restore_generators(states: dict[str, Any]) -> None:
    """Restore the random generators to ``states`` from :func:`generator_states`."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == "python":
            random.setstate(state)
        elif name == "numpy":
            _numpy().random.set_state(state)
        else:
            torch.cuda.set_rng_state(state, name)


State = tuple[Callable[[Any], Any], Any]
"""A function that sets the state of a random generator, and the state."""


def torch_states() -> list[State]:
    """Return the states of torch's default generators, of the CPU and the current GPU, for :func:`set_states`.

    Dropout draws from these. The call takes about 1 µs. The GPU is left out while its stream is being captured.
    """
    generators = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(generator.set_state, generator.get_state()) for generator in generators]


def all_states() -> list[State]:
    """Return the states of :func:`torch_states`, and those of Python and numpy, which takes about 30 µs."""
    states = [*torch_states(), (random.setstate, random.getstate())]
    return states if _numpy() is None else [*states, (_numpy().random.set_state, _numpy().random.get_state())]


def set_states(states: Iterable[State]) -> None:
    """Set the generators to ``states``."""
    for set_state, state in states:
        set_state(state)


def seed_all(seed: int) -> None:
    """Seed the random generators of torch, Python and numpy.

    LayerDrop and SpecAugment draw from those of Python and numpy.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    if _numpy() is not None:
        _numpy().random.seed(seed)


def _numpy() -> Any:
    """Return numpy if it has been imported, else None.

    It is not a dependency.
    """
    return sys.modules.get("numpy")
