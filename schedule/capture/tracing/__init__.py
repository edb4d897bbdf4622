"""One trace of one module: the calls of its submodules, its results and state, and the graph as data."""
