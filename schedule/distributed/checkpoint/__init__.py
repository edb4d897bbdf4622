"""Sharded checkpoints, and weight loading for models on the meta device."""

from schedule.distributed.checkpoint.checkpointing import load_sharded, save_sharded

__all__ = ["load_sharded", "save_sharded"]
