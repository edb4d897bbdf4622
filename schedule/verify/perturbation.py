"""Perturbation of a model's weights, since fresh initializations hide mistakes.

With weights of size 0.02 activations stay near zero, where the two GELUs agree to the last bit; a missing bias of
zero, or a swap of queries and keys with almost no effect, goes unnoticed. Equal programs are equal for all weights, so
they are compared a second time with weights that reach the nonlinear range and are not zero.
"""

from __future__ import annotations

import zlib

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

GAIN = 1.0
"""Size of a perturbed matrix's outputs for inputs of size one. There the two GELUs differ by 3e-4, far above
rounding. At 2, attention becomes so sharp that rounding grows tenfold over 12 layers."""
SHIFT = 4.0
"""Size of a slight perturbation, relative to the weight, in units of the dtype's eps. A reordered sum of n terms is off
by about √n roundings."""
SPREAD = 0.2
"""Standard deviation of the noise added to vectors and scalars: biases, norm weights, sinks."""


@torch.no_grad()
def perturb(model: nn.Module, names: set[str]) -> None:
    """Perturb the parameters of ``model``, in the same way for any two models with equal weights.

    Args:
        names: the parameter names of the original model. A model that merged or split some is loaded through
            its ``state_dict``, which converts them.
    """
    own = dict(model.named_parameters())
    if set(own) == names:
        for name, parameter in own.items():
            if parameter.is_floating_point():
                parameter.copy_(_stirred(name, parameter))
        return
    state = model.state_dict()
    for name in names & set(state):
        if state[name].is_floating_point():
            state[name] = _stirred(name, state[name])
    model.load_state_dict(state)


@torch.no_grad()
def perturb_slightly(model: nn.Module, attempt: int) -> None:
    """Perturb every floating parameter by a few roundings, in another direction for each ``attempt``."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            size, noise = SHIFT * torch.finfo(parameter.dtype).eps, _noise(f"{name} {attempt}", parameter)
            if parameter.dtype.itemsize == 1:  # torch does not compute in 8 bits
                parameter.copy_(parameter.float() * (1 + size * noise.float()))
            else:
                parameter.add_(parameter * noise, alpha=size)


def _stirred(name: str, value: torch.Tensor) -> torch.Tensor:
    if value.numel() == 0:
        return value.clone()
    if value.dtype.itemsize == 1:
        return _stirred(name, value.float()).to(value.dtype)
    if value.ndim < 2:
        return value + SPREAD * _noise(name, value)
    fan_in = value.numel() / value.shape[0]
    size = float(value.float().pow(2).mean().sqrt()) * fan_in**0.5
    if size == 0.0:
        return _noise(name, value) * (GAIN / fan_in**0.5)
    return value * max(1.0, GAIN / size)


def _noise(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return normal noise from a separate generator, dependent only on the name and shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(tuple(like.shape), generator=generator).to(device=like.device, dtype=like.dtype)
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return noise
    return distribute_tensor(noise, mesh, like.placements)  # type: ignore[attr-defined]
