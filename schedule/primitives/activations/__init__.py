"""Activation memory: what a forward keeps for its backward, and what is computed again instead."""

from schedule.primitives.activations.recomputing import Recomputed
from schedule.primitives.activations.saved import SavedBytes, measure_saved

__all__ = ["Recomputed", "SavedBytes", "measure_saved"]
