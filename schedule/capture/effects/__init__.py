"""Effects of the calls in a graph, and what is asked of objects that they may change."""
