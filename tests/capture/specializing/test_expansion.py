"""Opening leaf modules: the same values, on the same parameters, and closed again when they change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from schedule.capture.recording.recording import record
from schedule.capture.specializing.expansion import expand
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import FallbackWarning, install, state_of
from tests.zoo import batch, build

PLACES = [
    ("gpt2", "transformer.h.0.mlp"),
    ("bert", "bert.encoder.layer.0.intermediate"),
    ("bert", "bert.encoder.layer.1.output"),
    ("llama", "model.layers.0"),
    ("t5", "encoder.block.0.layer.1.DenseReluDense"),
    ("vit", "vit.layers.0"),
]


@pytest.mark.parametrize(("name", "path"), PLACES)
def test_the_expanded_graph_computes_the_same(name, path):
    model = build(name).eval()
    twin = copy.deepcopy(model)
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = next(m for n, m in model.named_modules() if n.endswith("layer.0") or n.endswith("layers.0"))
    recording = record(model, batch(name))
    made = specialize(module, type(module).forward, recording.calls[module][0], recording, False)
    expansion = expand(made, module, recording)
    assert expansion.inlined and any(node.op == "call_module" for node in made.graph.nodes)
    install(module, [made.with_graph(expansion.graph, expansion.inlined)])
    for rows, length in ((2, 7), (3, 4)):
        inputs = batch(name, rows, length)
        torch.testing.assert_close(model(**inputs).logits, twin(**inputs).logits, rtol=1e-5, atol=1e-6)
    assert state_of(module).fallbacks == 0


class Block(nn.Module):
    def __init__(self, p: float = 0.1):
        super().__init__()
        self.first, self.act, self.drop = nn.Linear(4, 4), nn.GELU(), nn.Dropout(p)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.second(self.drop(self.act(self.first(x))))


def expanded(root, module, only=None):
    recording = record(root, torch.randn(2, 4))
    made = specialize(module, type(module).forward, recording.calls[module][0], recording, True)
    return made, expand(made, module, recording, only)


def test_names_do_not_depend_on_what_else_is_opened():
    block = Block()
    _, everything = expanded(block, block)
    _, some = expanded(block, block, only={"act"})
    inside = [node.name for node in some.graph.nodes if node.name in some.origin]
    assert inside and set(inside) <= {node.name for node in everything.graph.nodes}
    assert list(some.inlined) == ["act"]


def test_a_hooked_module_stays_closed():
    block = Block()
    block.act.register_forward_hook(lambda *_: None)
    _, expansion = expanded(block, block)
    assert "act" not in expansion.inlined and "first" in expansion.inlined


@pytest.mark.parametrize("change", ["hook", "replace", "setting", "eval"])
def test_an_opened_module_that_changes_sends_calls_to_the_original_forward(change):
    block = Block(p=0.0)
    made, expansion = expanded(block, block)
    install(block, [made.with_graph(expansion.graph, expansion.inlined)])
    x = torch.randn(3, 4)
    block(x)
    assert state_of(block).fallbacks == 0
    if change == "hook":
        block.act.register_forward_hook(lambda module, args, output: output * 0)
    elif change == "replace":
        block.act = nn.ReLU()
    elif change == "setting":
        block.drop.p = 1.0
    else:
        block.drop.eval()
    with pytest.warns(FallbackWarning):
        found = block(x)
    torch.testing.assert_close(found, Block.forward(block, x), rtol=0, atol=0)


def test_modules_that_share_a_graph_keep_their_own_settings():
    """Dropout's p is read inside the dropout: two blocks may share their graph and still differ in it."""
    root = nn.Sequential(Block(0.1), Block(0.1), Block(0.9))
    recording = record(root, torch.randn(2, 4))
    found = []
    for block in root:
        made = specialize(block, Block.forward, recording.calls[block][0], recording, True)
        graph = expand(made, block, recording).graph
        found.append((made.graph, next(n for n in graph.nodes if "dropout" in n.name).kwargs["p"]))
    assert found[0][0] is found[1][0]
    assert [p for _, p in found] == [0.1, 0.1, 0.9]


def test_what_is_inside_a_module_of_torch_has_the_line_of_its_call():
    """Not a line of torch, nor that of whoever had the graph made."""
    root = Block()
    line = Block.forward.__code__.co_firstlineno + 1
    made, expansion = expanded(root, root)
    sources = {node.name: node.meta["source"] for node in expansion.graph.nodes if node.name in expansion.origin}
    assert {"act__gelu", "drop__dropout", "first__product"} <= sources.keys()
    assert set(sources.values()) == {f"{__file__}:{line} in forward"}
    assert made.graph is not expansion.graph
