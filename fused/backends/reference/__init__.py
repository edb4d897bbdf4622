"""Reference formulas of the ops, in plain torch."""
