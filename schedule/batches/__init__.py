"""Batches of a model: made from the model itself when none is given, placed on its device, and at other sizes."""

from schedule.batches.inputs import Inputs, example_inputs
from schedule.batches.other_sizes import cut, other_shapes, small_shapes
from schedule.batches.placement import has_values, placed

__all__ = ["Inputs", "cut", "example_inputs", "has_values", "other_shapes", "placed", "small_shapes"]
