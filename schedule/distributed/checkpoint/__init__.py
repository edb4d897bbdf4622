"""Sharded checkpoints, and models on the meta device that get their data from one."""

from schedule.distributed.checkpoint.checkpointing import load_sharded, save_sharded

__all__ = ["load_sharded", "save_sharded"]
