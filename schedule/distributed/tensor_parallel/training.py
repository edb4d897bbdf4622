"""Training with some parameters sharded and the others replicated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

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

    All ranks must call it. Parameters may be sharded over different meshes, as by a plan and by FSDP2.

    Returns:
        The norm of all gradients, sharded and whole, as one plain tensor.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [
        full_tensor(get_total_norm([p.grad for p in each if p.grad is not None], norm_type, error_if_nonfinite))
        for each in by_mesh.values()
    ]
    norm = get_total_norm(norms, norm_type, error_if_nonfinite)
    with mixed_parameters():
        for each in by_mesh.values():
            clip_grads_with_norm_(each, max_norm, norm)
    return norm
