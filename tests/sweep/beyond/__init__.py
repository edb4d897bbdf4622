"""Models of other libraries, tiny or on small images: ``library:name``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn

from schedule.batches import Inputs
from tests.sweep import REFUSALS
from tests.sweep.beyond.case import Case, Unavailable, parameters, refuse_large
from tests.sweep.beyond.diffusion import TINY, of_diffusers
from tests.sweep.beyond.timm import library, of_timm
from tests.sweep.beyond.torch_nn import TORCH
from tests.sweep.beyond.x_transformers import X_TRANSFORMERS, of_flags

__all__ = ["Unavailable", "build", "inputs_of", "names", "sources"]

_CASES: WeakKeyDictionary[nn.Module, Case] = WeakKeyDictionary()


def names() -> list[str]:
    """All models of the libraries that are installed."""
    found = [f"torch:{name}" for name in TORCH]
    if importlib.util.find_spec("timm") is not None:
        found += [f"timm:{family}" for family in library().list_modules()]
    for package, cases in (("diffusers", TINY), ("x_transformers", X_TRANSFORMERS)):
        if importlib.util.find_spec(package) is not None:
            found += [f"{package}:{name}" for name in cases]
    return sorted(found)


def build(name: str, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """Make a model and its example.

    Raises:
        Unavailable: there is none that runs.
    """
    package, _, which = name.partition(":")
    case = {"torch": TORCH.__getitem__, "timm": of_timm, "diffusers": of_diffusers, "x_transformers": of_flags}[package]
    torch.manual_seed(seed)
    try:
        made = case(which)
        model = made.make()
    except (*REFUSALS, ImportError) as error:
        raise Unavailable("not built", f"{type(error).__name__}: {error}") from error
    refuse_large(parameters(model))
    _CASES[model] = made
    return model, made.batch(2, 12)


def inputs_of(model: nn.Module, rows: int, length: int) -> Inputs | None:
    """Return an example of these sizes for a model of :func:`build`, or None for another model."""
    return _CASES[model].batch(rows, length) if model in _CASES else None


def sources(name: str) -> list[str]:
    """The files that a result depends on besides ours: the version of the library."""
    package, _, _ = name.partition(":")
    spec = importlib.util.find_spec(package)
    return [str(Path(spec.origin).parent / "__init__.py")] if spec and spec.origin else []
