"""Draws docs/before_after.svg: the graph of GPT-2's MLP before and after fusing, matched nodes colored.

Run ``python docs/tools/draw_before_after.py`` from the project's root.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import networkx as nx
import torch
import transformers as hf
from torch import fx

import schedule
from schedule.capture.specializing.expansion import expand

MATCHED, FUSED, PLAIN = "#f4b183", "#a9d18e", "#e7e6e6"


def label(node: fx.Node) -> str:
    """What a node does, in one short line."""
    if node.op == "placeholder":
        return node.name
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.op == "output":
        return "return"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    constants = [str(a) for a in node.args if not isinstance(a, fx.Node)]
    constants += [f"{k}={v}" for k, v in node.kwargs.items() if not isinstance(v, fx.Node) and k in ("p", "activation")]
    return f"{name}({', '.join(constants)})" if constants else name


def draw(axes: plt.Axes, graph: fx.Graph, colors: dict[str, str], title: str) -> None:
    """Draw ``graph`` top down, one layer a depth."""
    picture: nx.DiGraph = nx.DiGraph()
    depth: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depth[node] = 1 + max((depth[source] for source in node.all_input_nodes), default=-1)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") and node.users:
            depth[node] = min(depth[user] for user in node.users) - 1
    for node in graph.nodes:
        picture.add_node(node.name, layer=-depth[node], text=label(node))
        picture.add_edges_from((source.name, node.name) for source in node.all_input_nodes)
    place = nx.multipartite_layout(picture, subset_key="layer", align="horizontal")
    nx.draw_networkx_edges(picture, place, ax=axes, edge_color="#888888", arrowsize=9, node_size=350)
    for name, (x, y) in place.items():
        axes.text(
            x,
            y,
            picture.nodes[name]["text"],
            ha="center",
            va="center",
            fontsize=7.5,
            family="monospace",
            bbox={"boxstyle": "round,pad=0.35", "facecolor": colors.get(name, PLAIN), "edgecolor": "#555555"},
        )
    axes.set_title(title, fontsize=10)
    axes.margins(0.18, 0.05)
    axes.axis("off")


def main() -> None:
    """Schedule a tiny GPT-2 and draw its MLP before and after."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "before-after"
    config = hf.GPT2Config(
        n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    sch = schedule.create_schedule(model, {"input_ids": torch.randint(3, 64, (2, 8))})
    mlp = sch["transformer.h.0.mlp"]
    matches = mlp.find("bias_gelu_tanh", expect=1)
    before = next(made for made in mlp.specializations if made.training)
    opened = expand(before, mlp.module, sch.tree.graphs.recording, ["c_fc", "act"]).graph
    mlp.fuse(matches)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 7.5))
    matched = dict.fromkeys((node.name for node in matches[0].nodes), MATCHED)
    draw(left, opened, matched, "before: what c_fc and act compute")
    fused = {node.name: FUSED for node in mlp.graph.nodes if "bias" in str(node.target) and node.op == "call_function"}
    draw(right, mlp.graph, fused, "after: one fused op, same parameters")
    figure.tight_layout()
    figure.savefig(Path(__file__).parents[1] / "before_after.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
