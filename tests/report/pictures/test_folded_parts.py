"""What is far from a change is folded into one box, without a cycle and without a loss."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from schedule.report.pictures.flow import Flow, Kind, Node
from schedule.report.pictures.folded_parts import folded


def flow(count: int, *edges: tuple[int, int]) -> Flow:
    """A flow of nodes ``n0``, ``n1``, … of which the last is the output."""
    kinds: list[Kind] = ["op"] * (count - 1) + ["output"]
    nodes = tuple(Node(f"n{i}", kind, f"n{i}", (), ()) for i, kind in enumerate(kinds))
    return Flow(nodes, edges, (), (), ())


def titles(shown: Flow) -> list[str]:
    return [node.title for node in shown.nodes]


def chain(count: int) -> Flow:
    return flow(count, *((i, i + 1) for i in range(count - 1)))


def test_both_ends_of_a_chain_are_folded() -> None:
    shown = folded(chain(12), {"n5"})
    assert titles(shown) == ["4 nodes unchanged", "n4", "n5", "n6", "4 nodes unchanged", "n11"]
    assert shown.edges == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    assert shown.nodes[0].tip == ("4 nodes without a change:", "n0", "n1", "n2", "n3")


def test_two_nodes_are_not_worth_a_box() -> None:
    whole = chain(7)
    assert folded(whole, {"n3"}) is whole


def test_without_a_change_nothing_is_folded() -> None:
    whole = chain(12)
    assert folded(whole, ()) is whole and folded(whole, {"elsewhere"}) is whole


def test_a_part_beside_the_change_is_not_joined_with_one_before_it() -> None:
    beside = [(0, 3), (3, 4), (4, 5), (5, 9)]
    shown = folded(flow(10, (0, 1), (1, 2), (2, 6), (6, 7), (7, 8), (8, 9), *beside), {"n2"})
    assert titles(shown) == ["n0", "n1", "n2", "3 nodes unchanged", "n6", "n7", "n8", "n9"]


@given(st.data())
def test_no_cycle_no_loss_and_every_change_is_seen(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 16))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    whole = flow(count, *data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)))
    changed = data.draw(st.sets(st.sampled_from([node.name for node in whole.nodes]), min_size=1))
    shown = folded(whole, changed)
    graph = nx.DiGraph(shown.edges)
    assert nx.is_directed_acyclic_graph(graph)
    assert changed <= {node.name for node in shown.nodes if node.kind != "folded"}
    sizes = [int(node.title.split()[0]) if node.kind == "folded" else 1 for node in shown.nodes]
    assert sum(sizes) == count and all(size == 1 or size >= 3 for size in sizes)
    before, seen = nx.DiGraph(whole.edges), {node.name for node in shown.nodes if node.kind != "folded"}
    for source, target in before.edges:
        ends = f"n{source}", f"n{target}"
        if seen.issuperset(ends):
            at = [next(i for i, node in enumerate(shown.nodes) if node.name == name) for name in ends]
            assert graph.has_edge(*at)
