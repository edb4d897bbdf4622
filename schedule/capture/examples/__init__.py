"""Example inputs, made from the model itself when none are given."""

from schedule.capture.examples.inputs import example_inputs

__all__ = ["example_inputs"]
