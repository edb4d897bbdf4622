"""Schedules inside HuggingFace's own tools."""

from schedule.huggingface.trainer import OptimizeCallback

__all__ = ["OptimizeCallback"]
