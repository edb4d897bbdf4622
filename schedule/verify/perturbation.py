"""Other weights for the same model: fresh initializations hide mistakes.

With weights of size 0.02 activations stay near zero, where the two GELUs agree to the last bit; a bias of
zero may be forgotten; queries and keys that hardly matter may be swapped. Two programs that are equal are so
for all weights, so they are compared a second time where nonlinearities bend and nothing is zero.
"""

from __future__ import annotations

import zlib

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

GAIN = 1.0
"""Size of what a perturbed matrix makes of inputs of size one. There the two GELUs differ by 3e-4, far above
rounding. At 2 attention sharpens so much that rounding grows tenfold over 12 layers."""
NUDGE = 4.0
"""What is added to weights to see what rounding does, in units of the dtype's. A reordered sum of n terms is off by
some √n roundings."""
SPREAD = 0.2
"""Standard deviation of what is added to vectors and scalars: biases, norm weights, sinks."""


@torch.no_grad()
def perturb(model: nn.Module, names: set[str]) -> None:
    """Give the parameters of ``model`` other values, the same for any two models that start equal.

    Args:
        names: the parameter names of the original model. A model that merged or split some is loaded through
            its ``state_dict``, which converts.
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
    """Move every floating parameter by a few roundings; each ``attempt`` in another direction."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            size = NUDGE * torch.finfo(parameter.dtype).eps
            parameter.add_(parameter * _noise(f"{name} {attempt}", parameter), alpha=size)


def _stirred(name: str, value: torch.Tensor) -> torch.Tensor:
    if value.numel() == 0:
        return value.clone()
    if value.ndim < 2:
        return value + SPREAD * _noise(name, value)
    fan_in = value.numel() / value.shape[0]
    size = float(value.float().pow(2).mean().sqrt()) * fan_in**0.5
    if size == 0.0:
        return _noise(name, value) * (GAIN / fan_in**0.5)
    return value * max(1.0, GAIN / size)


def _noise(name: str, like: torch.Tensor) -> torch.Tensor:
    """Normal noise that depends on the name and shape alone, from a generator of its own."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(tuple(like.shape), generator=generator).to(device=like.device, dtype=like.dtype)
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return noise
    return distribute_tensor(noise, mesh, like.placements)  # type: ignore[attr-defined]
