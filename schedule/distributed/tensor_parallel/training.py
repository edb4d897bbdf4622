"""Training where some parameters are sharded and the others whole on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor.experimental import implicit_replication

from schedule.distributed.tensor_parallel.parameters import full_tensor


@contextmanager
def mixed_parameters() -> Iterator[None]:
    """Within, torch's list operations take DTensors and plain tensors together: the plain ones are whole.

    Needed around ``optimizer.step()`` where the optimizer uses its ``foreach`` form (the default on CUDA)::

        with schedule.distributed.mixed_parameters():
            optimizer.step()
    """
    with implicit_replication():
        yield


def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for sharded and whole parameters together; all ranks must call it.

    Returns:
        The norm of all gradients, whole ones and shards put together, as one plain tensor.
    """
    with mixed_parameters():
        norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type, error_if_nonfinite)
        return full_tensor(norm)
