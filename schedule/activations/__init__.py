"""Activation memory: what a forward keeps for its backward, and what is computed again instead."""

from schedule.activations.recomputing import Recomputed
from schedule.activations.saved import SavedBytes, measure_saved

__all__ = ["Recomputed", "SavedBytes", "measure_saved"]
