"""Refusal of functions that set the state of torch's random generators."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from schedule.capture.tracing.reading.following import Handler
from schedule.capture.tracing.reading.reads import Reads


def _refusing(name: str) -> Handler:
    def refuse(evaluator: Reads, *_: Any, **__: Any) -> NoReturn:
        raise evaluator.refused(
            f"the forward calls {name}, which a graph would not do at each call",
            "seed outside the forward, or draw from a torch.Generator that the module holds",
        )

    return refuse


_NAMES = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")


def seeding_handlers() -> dict[Any, Handler]:
    """Return handlers that refuse each seeding function.

    They are looked up anew for each trace, because torch wraps some of these functions when its compiler is imported.
    """
    return {
        getattr(module, name): _refusing(f"{module.__name__}.{name}")
        for module in (torch.random, torch.cuda, torch)
        for name in _NAMES
        if hasattr(module, name)
    }
