"""Integration of schedules with HuggingFace's tools.

Importing it makes ``OptimizeCallback`` known to transformers by the name ``"fxschedule"``, so that
``TrainingArguments(report_to=["fxschedule"])`` adds it to a ``Trainer``.
"""

import schedule.huggingface.releases  # noqa: F401, I001  # first: it refuses a transformers that is too old
from transformers.integrations import integration_utils

from schedule.huggingface.checkpoints import ShardedTrainer
from schedule.huggingface.trainer import OptimizeCallback

__all__ = ["OptimizeCallback", "ShardedTrainer"]

integration_utils.INTEGRATION_TO_CALLBACK.setdefault("fxschedule", OptimizeCallback)
