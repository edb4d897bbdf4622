"""Different random numbers inside a part of the model: on each tensor-parallel rank, or for a seed.

Outside such a region, all ranks draw the same numbers, because replicated tensors must get the same dropout. Inside a
sharded region, each rank needs different ones. The state inside is a function of the state outside and of the rank, and
the state outside advances identically on all ranks. So there is no extra state to save: code that restores the default
generators, such as activation checkpointing, restores these too. The same holds with a seed instead of the rank.

Idea: Megatron-LM's ``CudaRNGStatesTracker``, except that it has a second state to be saved and restored with the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Undo = Callable[[], None]

_OFFSET = 4  # offset by which one draw advances a CUDA generator


@dataclass(frozen=True)
class OwnRandomNumbers:
    """Call wrapper for drawing different random numbers on each rank.

    Attributes:
        rank: the tensor-parallel rank.
    """

    rank: int

    def __call__(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``run(*args, **kwargs)``, run with the random numbers of this rank."""
        with forked(self.rank):
            return run(*args, **kwargs)


@contextmanager
def forked(key: int) -> Iterator[None]:
    """Draw the random numbers of ``key`` inside the block, as between :func:`fork` and :func:`join`."""
    restore = fork(key)
    try:
        yield
    finally:
        join(restore)


@torch.compiler.disable
def fork(key: int) -> list[Undo]:
    """Set torch's default generators to states specific to ``key``, on the CPU and the current CUDA device.

    Args:
        key: a rank or a seed.

    Returns:
        the argument for :func:`join`.
    """
    restore = [_fork_cpu(torch.default_generator, key)]
    if torch.cuda.is_initialized():
        restore.append(_fork_cuda(torch.cuda.default_generators[torch.cuda.current_device()], key))
    return restore


@torch.compiler.disable
def join(restore: list[Undo]) -> None:
    """Restore the generator states from before :func:`fork`, which all ranks share, one draw later."""
    for undo in restore:
        undo()


def _fork_cpu(generator: torch.Generator, key: int) -> Undo:
    drawn = int(torch.randint(2**62, (), generator=generator))
    outside = generator.get_state()
    generator.manual_seed(_mixed(drawn, key))
    return lambda: _set(generator, outside)


def _fork_cuda(generator: Any, key: int) -> Undo:
    """Fork a CUDA generator by its seed and offset.

    Both are known on the host, so this does not synchronize with the device.
    """
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(_mixed(seed, offset, key))

    def undo() -> None:
        generator.manual_seed(seed)
        generator.set_offset(offset + _OFFSET)

    return undo


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _mixed(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
