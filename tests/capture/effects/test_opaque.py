"""Caches: watched inside a forward, made inside a forward, and passed between modules."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers as hf
from torch import nn

import schedule
from schedule.capture.recording.recording import Opaque, record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import install, state_of
from schedule.util.errors import TraceError
from tests.capture.running import assert_same, schedule_all
from tests.zoo import batch, build


def traced(root, path, example):
    module = root.get_submodule(path)
    recording = record(root, example)
    made = [
        specialize(module, type(module).forward, call, recording, training)
        for call in recording.calls[module]
        for training in (True, False)
    ]
    install(module, made, path)
    return recording, made


def test_a_recorded_cache_holds_no_data():
    model = build("gpt2").eval()
    recording = record(model, batch("gpt2"))
    call = recording.calls[model.transformer.h[1].attn][0]
    cache = next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Opaque)).snapshot
    assert isinstance(cache, hf.DynamicCache)
    assert type(cache.layers[0].keys).__name__ == "FakeTensor"
    assert cache.get_seq_length(0) == 7


def test_the_cache_is_updated_by_the_graph_as_by_the_forward():
    model = build("gpt2").eval()
    twin = copy.deepcopy(model)
    traced(model, "transformer.h.0.attn", batch("gpt2"))
    ids = torch.randint(3, 64, (3, 5))
    with torch.no_grad():
        ours, theirs = model(ids), twin(ids)
        for step in (1, 2):
            more = torch.randint(3, 64, (3, step))
            ours = model(more, past_key_values=ours.past_key_values)
            theirs = twin(more, past_key_values=theirs.past_key_values)
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=0)
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length() == 8
    assert state_of(model.transformer.h[0].attn).fallbacks == 0


def test_a_cache_made_inside_is_made_anew_at_each_call():
    model = build("llama").eval()
    _, made = traced(model, "model", batch("llama"))
    assert any(node.target is hf.DynamicCache for node in made[0].graph.nodes)
    first, second = model(torch.ones(1, 4, dtype=torch.long)), model(torch.ones(1, 3, dtype=torch.long))
    assert first.past_key_values is not second.past_key_values
    assert second.past_key_values.get_seq_length() == 3


def test_tracing_leaves_the_cache_class_as_it_was():
    before = vars(hf.DynamicCache)["__init__"]
    traced(build("gpt2"), "transformer", batch("gpt2"))
    assert vars(hf.DynamicCache)["__init__"] is before
    assert type(hf.DynamicCache()) is hf.DynamicCache


def test_many_traces_do_not_read_storage_that_is_not_there():
    """Copying a cache of data-free tensors once read their storage and corrupted the heap."""
    model, example = build("t5").eval(), batch("t5")
    recording = record(model, example)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            recording.traced.clear()
            specialize(model, type(model).forward, recording.calls[model][0], recording, True)


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_a_cache_of_two_made_inside_is_no_state_of_the_module():
    """What a decoder asks a cache that it has just made, between updates of it, is checked on the way."""
    model, twin = build("t5").eval(), build("t5").eval()
    sch = schedule.create_schedule(model, batch("t5"))
    sch["decoder"].trace(flatten=True)
    install(model.decoder, sch["decoder"].specializations)
    with torch.no_grad():
        for rows, length in ((3, 5), (4, 9)):
            inputs = batch("t5", rows, length)
            torch.testing.assert_close(model(**inputs).logits, twin(**inputs).logits, rtol=1e-5, atol=1e-5)
    assert state_of(model.decoder).fallbacks == 0


class Padding:
    """Made by a forward and filled with what it computes."""

    def __init__(self):
        self.layers = {}

    def update(self, name, x):
        self.layers[name] = x[:, -1:]
        return torch.cat([torch.zeros_like(x[:, :1]), x], dim=1)


class Streaming(nn.Module):
    def forward(self, x):
        padding = Padding()
        return padding.update("first", x), padding


class Inside(nn.Module):
    def forward(self, x):
        return Padding().update("first", x)


def test_an_object_that_is_made_filled_and_returned_is_refused():
    with pytest.raises(TraceError, match="object of class Padding that the forward makes"):
        schedule_all(Streaming(), torch.randn(2, 3))
    module = Inside()
    schedule_all(module, torch.randn(2, 3))
    x = torch.randn(4, 5)
    assert_same(module(x), Inside()(x))
    assert state_of(module).fallbacks == 0
