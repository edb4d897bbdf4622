"""Models of diffusers, tiny: its UNets, transformers, autoencoders, ControlNets and vocoders.

Those that are missing train on no CPU (flex attention), need torchvision, are made of another model, do not encode
without tiles, or have no forward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from tests.sweep.beyond.case import Case
from tests.sweep.beyond.diffusion.autoencoders import AUTOENCODERS
from tests.sweep.beyond.diffusion.images import IMAGES
from tests.sweep.beyond.diffusion.sound import SOUND
from tests.sweep.beyond.diffusion.unets import UNETS
from tests.sweep.beyond.diffusion.videos import VIDEOS

TINY = {**UNETS, **AUTOENCODERS, **IMAGES, **VIDEOS, **SOUND}


def of_diffusers(name: str) -> Case:
    """The class ``name`` of diffusers with its tiny config."""
    config, batch = TINY[name]
    cls = getattr(importlib.import_module("diffusers.models"), name)
    return Case(lambda: _initialized(lambda: cls(**config)), batch)


def _initialized(make: Callable[[], nn.Module]) -> nn.Module:
    """A model, with random values for what it leaves to the weights that it loads."""
    torch.use_deterministic_algorithms(True)  # gives NaN for uninitialized memory
    try:
        model = make()
    finally:
        torch.use_deterministic_algorithms(False)
    for parameter in model.parameters():
        if parameter.isnan().any():
            nn.init.normal_(parameter, std=0.02)
    return model
