"""Example inputs, made from the model itself when none are given."""

from schedule.capture.examples.inputs import example_inputs
from schedule.capture.examples.placement import has_values, placed
from schedule.capture.examples.trials import found_inputs

__all__ = ["example_inputs", "found_inputs", "has_values", "placed"]
