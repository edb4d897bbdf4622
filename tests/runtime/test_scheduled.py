"""Scheduling changes what a module computes, not what it is."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import fx, nn

import schedule
from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import FallbackWarning, install, state_of
from tests.zoo import batch, build


def scheduled(name="gpt2"):
    model = build(name)
    recording = record(model, batch(name))
    for path, module in model.named_modules():
        if module in recording.calls and list(module.children()):
            call = recording.calls[module][0]
            made = [specialize(module, type(module).forward, call, recording, train) for train in (True, False)]
            install(module, made, path)
    return model


@pytest.fixture(scope="module")
def pair():
    model = scheduled()
    twin = build("gpt2")
    return model.eval(), twin.eval()


def test_the_module_is_what_it_was(pair):
    model, twin = pair
    assert all(isinstance(a, type(b)) for a, b in zip(model.modules(), twin.modules(), strict=True))
    assert [type(m).__qualname__ for m in model.modules()] == [type(m).__qualname__ for m in twin.modules()]
    assert str(model) == str(twin)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_forward_tells_the_signature_of_the_original(pair):
    """Trainers and generation ask what a model takes."""
    model, twin = pair
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
        assert ours.forward.__doc__ == theirs.forward.__doc__


def test_state_dicts_are_interchangeable(pair):
    model, _ = pair
    other = build("gpt2", seed=7)
    other.load_state_dict(model.state_dict())
    inputs = batch("gpt2", 3, 5)
    torch.testing.assert_close(model(**inputs).logits, other.eval()(**inputs).logits, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_scheduled_and_independent(pair, how):
    model, _ = pair
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    inputs = batch("gpt2", 3, 5)
    count = [sum(state_of(m) is not None for m in each.modules()) for each in (other, model)]
    assert count[0] == count[1] > 0
    torch.testing.assert_close(other(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)
    install(other, [])
    assert state_of(model) is not None and state_of(other) is None
    assert all(state_of(m).fallbacks == 0 for m in other.modules() if state_of(m))


def test_taking_the_graphs_away_gives_the_class_back():
    model = scheduled()
    for module in model.modules():
        install(module, [])
    twin = build("gpt2")
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(model.modules(), twin.modules(), strict=True))


def test_hooks_fire_once_and_see_what_the_original_s_see(pair):
    model, twin = pair
    seen = {}
    for label, m in (("ours", model), ("theirs", twin)):
        calls = seen[label] = []
        mlp = m.transformer.h[0].mlp
        handles = [
            mlp.register_forward_hook(lambda mod, args, out, calls=calls: calls.append(out.sum())),
            mlp.register_forward_pre_hook(lambda mod, args, calls=calls: calls.append(args[0].sum())),
        ]
        m(**batch("gpt2"))
        for handle in handles:
            handle.remove()
    assert len(seen["ours"]) == 2 and all(torch.equal(a, b) for a, b in zip(seen["ours"], seen["theirs"], strict=True))


def test_generate_gives_the_same_tokens_with_and_without_cache(pair):
    model, twin = pair
    ids = batch("gpt2", 2, 5)["input_ids"]
    for cache in (True, False):
        options = dict(max_new_tokens=6, do_sample=False, use_cache=cache, pad_token_id=0)
        assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))


def test_a_miss_warns_once_and_counts(pair):
    model = scheduled()
    inputs = {**batch("gpt2"), "output_attentions": True}
    with pytest.warns(FallbackWarning, match=r"transformer.*output_attentions=True"):
        first = model(**inputs)
    assert first.attentions is not None
    count = state_of(model).fallbacks
    model(**inputs)
    assert state_of(model).fallbacks == count + 1


def test_threads_run_the_same_graphs(pair):
    model, _ = pair
    inputs = batch("gpt2", 2, 9)
    expected, found = model(**inputs).logits, []

    def run():
        with torch.no_grad():
            found.append(model(**inputs).logits)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(torch.equal(expected, one) for one in found)


def test_another_model_of_the_class_is_untouched(pair):
    before = nn.Module.__call__
    other = build("gpt2")
    assert all(state_of(m) is None for m in other.modules()) and nn.Module.__call__ is before


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("again", [copy.deepcopy, pickled])
def test_a_scheduled_graph_module_copies_and_pickles(again):
    """Each GraphModule has a class of its own, and makes its copies itself."""
    root = nn.Module()
    root.fc, root.drop = nn.Linear(4, 4), nn.Dropout(0.5)
    graph = fx.Graph()
    x = graph.placeholder("x")
    hidden = graph.call_function(torch.relu, (graph.call_module("fc", (x,)),))
    graph.output(graph.call_function(torch.add, (graph.call_module("drop", (hidden,)), x)))
    sch = schedule.create_schedule(fx.GraphModule(root, graph), torch.randn(2, 4))
    sch.fuse(sch.find("bias_relu", expect=1))
    model = sch.module
    twin = again(model)
    assert type(twin) is not type(model) and isinstance(twin, fx.GraphModule)
    assert state_of(twin).specializations and state_of(model).specializations and twin.fc.weight is not model.fc.weight
    x = torch.randn(3, 4)
    assert torch.equal(twin.eval()(x), model.eval()(x)) and not state_of(twin).fallbacks
    with torch.no_grad():
        twin.fc.weight.zero_()
    assert not torch.equal(twin(x), model(x)) and model.fc.weight.any()
    sch.undo()
    assert torch.equal(again(model)(x), model(x))
