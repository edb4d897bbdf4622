"""Random numbers of each tensor-parallel rank's own, inside a part of the model.

Outside, all ranks draw the same numbers: what they hold whole must get the same dropout. Inside a sharded region each
needs its own. The state inside is a function of the state outside and of the rank, and the state outside moves on alike
on all ranks. So there is nothing to keep: what restores the default generators, as activation checkpointing does,
restores these too.

Idea: Megatron-LM's ``CudaRNGStatesTracker``, which keeps a second state, to be saved and restored with everything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Undo = Callable[[], None]

_OFFSET = 4  # what one draw of a CUDA generator takes


@dataclass(frozen=True)
class OwnRandomNumbers:
    """Runs a call with the random numbers of one rank.

    Attributes:
        rank: of the tensor-parallel ranks.
    """

    rank: int

    def __call__(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``run(*args, **kwargs)``."""
        restore = fork(self.rank)
        try:
            return run(*args, **kwargs)
        finally:
            join(restore)


@torch.compiler.disable
def fork(rank: int) -> list[Undo]:
    """Give torch's default generators, here and on the current CUDA device, states of ``rank``'s own.

    Returns:
        what :func:`join` takes.
    """
    restore = [_fork_cpu(torch.default_generator, rank)]
    if torch.cuda.is_initialized():
        restore.append(_fork_cuda(torch.cuda.default_generators[torch.cuda.current_device()], rank))
    return restore


@torch.compiler.disable
def join(restore: list[Undo]) -> None:
    """Go on with the numbers that all ranks draw alike."""
    for undo in restore:
        undo()


def _fork_cpu(generator: torch.Generator, rank: int) -> Undo:
    drawn = int(torch.randint(2**62, (), generator=generator))
    outside = generator.get_state()
    generator.manual_seed(_mixed(drawn, rank))
    return lambda: _set(generator, outside)


def _fork_cuda(generator: Any, rank: int) -> Undo:
    """A CUDA generator is a seed and an offset, both known here: the device is not waited for."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(_mixed(seed, offset, rank))

    def undo() -> None:
        generator.manual_seed(seed)
        generator.set_offset(offset + _OFFSET)

    return undo


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _mixed(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
