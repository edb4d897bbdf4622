"""The formulas that define the ops, in plain torch."""
