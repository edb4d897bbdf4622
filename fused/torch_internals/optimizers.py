"""Optimizers before their first step."""

from torch.distributed.checkpoint.state_dict import _init_optim_state as initialize_state

__all__ = ["initialize_state"]
