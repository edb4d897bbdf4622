"""A graph of a module with the conditions for running it: signature, checks, expansion."""
