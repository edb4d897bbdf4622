"""Integration of schedules with HuggingFace's tools."""

from schedule.huggingface.trainer import OptimizeCallback

__all__ = ["OptimizeCallback"]
