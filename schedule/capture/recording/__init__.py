"""One forward of a model, recorded: the calls of its submodules, and what is remembered of each value."""
