"""Activation memory: tensors kept for backward, and modules recomputed instead."""

from schedule.primitives.activations.recomputing import Recomputed
from schedule.primitives.activations.saved import SavedBytes, measure_saved

__all__ = ["Recomputed", "SavedBytes", "measure_saved"]
