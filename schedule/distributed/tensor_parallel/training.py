"""Training with some parameters sharded and the others replicated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor.experimental import implicit_replication

from fused.sharding import full_tensor


@contextmanager
def mixed_parameters() -> Iterator[None]:
    """Let torch's list operations mix DTensors and plain tensors by treating plain ones as replicated.

    Needed around ``optimizer.step()`` if the optimizer uses its ``foreach`` form (the default on CUDA)::

        with schedule.distributed.mixed_parameters():
            optimizer.step()
    """
    with implicit_replication():
        yield


def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, with sharded and whole parameters together.

    All ranks must call it.

    Returns:
        The norm of all gradients, sharded and whole, as one plain tensor.
    """
    with mixed_parameters():
        norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type, error_if_nonfinite)
        return full_tensor(norm)
