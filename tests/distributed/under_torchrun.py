"""Models as ``torchrun`` starts them: ``torchrun --nproc-per-node 2 -m tests.distributed.under_torchrun``."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from tests.distributed.test_models import MINIMUM, trained_alike
from tests.fused.processes import leave


def main() -> None:
    """Every architecture's process group and mesh come from the environment alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name, sequence in itertools.product(MINIMUM, (False, True)):
        trained_alike(mesh, name, sequence)
        if dist.get_rank() == 0:
            print(f"{name} trains alike on {dist.get_world_size()}", flush=True)
    leave()


if __name__ == "__main__":
    main()
