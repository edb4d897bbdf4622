"""Assertions about graphs and models, for the tests of users.

::

    import schedule.testing as testing

    graph = testing.graph_of(model, batch, "model.layers.0.mlp")
    testing.assert_graph_matches(graph, "tests/golden/mlp.txt")   # the graph has not changed
    testing.assert_graphs_equal(graph, other_graph)               # equal up to names and order
    testing.assert_equivalent(model, rewritten, batch)            # outputs, gradients, updates

With pytest, the fixture ``golden`` compares with files beside the test; ``pytest --update-golden`` writes them.
"""

from schedule.testing.graph_equality import Traced, assert_graph_matches, assert_graphs_equal, graph_of
from schedule.testing.model_equality import assert_equivalent

__all__ = ["Traced", "assert_equivalent", "assert_graph_matches", "assert_graphs_equal", "graph_of"]
