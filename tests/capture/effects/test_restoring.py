"""Caches are put back as they were where a graph finds that it does not hold after it has written to them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

import schedule
from schedule.capture.effects.restoring import restoring
from schedule.capture.recording.recording import record
from schedule.capture.specializing import rollback
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import install, state_of
from schedule.util.errors import ScheduleError, TraceError
from tests.needs import needs
from tests.zoo import batch, build

pytestmark = pytest.mark.unreplayable("the test installs graphs beside the schedule")


class Reading(nn.Module):
    """Looks at the length of the cache after it has written to it."""

    def forward(self, x, cache):
        keys, _ = cache.update(x, x, 0)
        return keys.sum(2) if keys.shape[2] > x.shape[2] else keys.mean(2)


class Refusing(nn.Module):
    """As attentions were once written."""

    def forward(self, x, mask, cache):
        keys, values = cache.update(x, x, 0)
        scores = x @ keys.transpose(2, 3)
        if mask.size() != (x.shape[0], 1, x.shape[2], keys.shape[2]):
            raise ValueError(f"the mask is {tuple(mask.shape)}")
        return (scores + mask).softmax(-1) @ values


def installed(module, *example):
    recording = record(module, example)
    made = specialize(module, type(module).forward, recording.calls[module][0], recording, False)
    twin = copy.deepcopy(module).eval()
    install(module.eval(), [made], "")
    return module, twin


def same_cache(ours, theirs):
    assert ours.get_seq_length() == theirs.get_seq_length()
    torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys, rtol=0, atol=0)


def test_a_branch_that_comes_out_otherwise_finds_the_cache_as_it_was():
    module, twin = installed(Reading(), torch.randn(1, 2, 3, 4), hf.DynamicCache())
    ours, theirs = hf.DynamicCache(), hf.DynamicCache()
    for length, misses in ((3, 0), (1, 1), (2, 2)):
        x = torch.randn(1, 2, length, 4)
        assert torch.equal(module(x, ours), twin(x, theirs))
        same_cache(ours, theirs)
        assert state_of(module).fallbacks == misses


def test_without_it_keys_would_be_there_twice(monkeypatch):
    monkeypatch.setattr(rollback, "restoring", lambda objects: [])
    module, twin = installed(Reading(), torch.randn(1, 2, 3, 4), hf.DynamicCache())
    ours, theirs = hf.DynamicCache(), hf.DynamicCache()
    for length in (3, 1):
        x = torch.randn(1, 2, length, 4)
        module(x, ours), twin(x, theirs)
    with pytest.raises(AssertionError):
        same_cache(ours, theirs)


def test_a_check_that_refuses_a_call_refuses_it_once():
    module, twin = installed(Refusing(), torch.randn(1, 2, 3, 4), torch.zeros(1, 1, 3, 3), hf.DynamicCache())
    ours, theirs = hf.DynamicCache(), hf.DynamicCache()
    for queries, keys in ((3, 3), (1, 4), (2, 6)):
        x, mask = torch.randn(1, 2, queries, 4), torch.zeros(1, 1, queries, keys)
        assert torch.equal(module(x, mask, ours), twin(x, mask, theirs))
    assert state_of(module).fallbacks == 0
    for each, cache in ((module, ours), (twin, theirs)):
        with pytest.raises(ValueError, match="the mask is"):
            each(torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 1, 2), cache)
    same_cache(ours, theirs)


def test_a_cache_that_is_written_to_in_place_is_refused():
    config = hf.LlamaConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    with pytest.raises(TraceError, match="may have changed state"):
        installed(Reading(), torch.randn(1, 2, 3, 16), hf.StaticCache(config, max_cache_len=8))


class Careless:
    """Writes in place, but not in the recorded call."""

    def __init__(self):
        self.keys = None

    def update(self, x):
        if self.keys is None:
            self.keys = x
        else:
            self.keys.add_(x)
        return self.keys


class ReadingCareless(nn.Module):
    def forward(self, x, cache):
        keys = cache.update(x)
        return keys.sum() if keys.sum() > 0 else keys.mean()


def test_a_big_tensor_that_was_written_to_in_place_is_told():
    module, _ = installed(ReadingCareless(), torch.ones(8, 8), Careless())
    cache = Careless()
    module(torch.ones(8, 8), cache)
    with pytest.raises(ScheduleError, match="written to in place"):
        module(torch.full((8, 8), -3.0), cache)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param("t5", marks=needs(hf.T5Model._supports_sdpa, "SDPA in t5")), "whisper"])
def test_decoders_with_sdpa_and_a_cache(name):
    """They look at the length of the keys to tell whether they are causal."""
    models = [build(name, attention="sdpa").eval() for _ in range(2)]
    report = schedule.optimize(models[0], batch(name), rules="qkv_merge", cost_guard=False)
    assert not [entry for entry in report.entries if "may have changed state" in entry.reason]
    inputs = {k: v for k, v in batch(name).items() if k in ("input_ids", "attention_mask", "input_features")}
    ours, theirs = (model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in models)
    assert torch.equal(ours, theirs)
    attentions = [m for path, m in models[0].named_modules() if path.endswith(("self_attn", "SelfAttention"))]
    states = [state for module in attentions if (state := state_of(module)) is not None]
    assert states and sum(state.fallbacks for state in states) == 0


# -- the pieces ----------------------------------------------------------------------------------------------


def test_structure_is_put_back_and_counters_are():
    counter, keys = torch.tensor(3), torch.zeros(8, 8)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=keys, seen=counter, length=1)], by_name={"a": 1})
    pieces = restoring([cache])
    layer = cache.layers[0]
    layer.keys, layer.length, layer.more = torch.ones(9, 8), 2, "new"
    counter.add_(1)
    cache.layers.append(SimpleNamespace())
    cache.by_name["b"] = 2
    for restore in pieces:
        restore()
    assert cache.layers == [layer] and vars(layer) == {"keys": keys, "seen": counter, "length": 1}
    assert counter.item() == 3 and cache.by_name == {"a": 1}


def test_tensors_that_count_no_changes_are_kept_whole():
    with torch.inference_mode():
        keys = torch.zeros(8, 8)
        pieces = restoring([{"keys": keys}])
        keys.add_(1)
        for restore in pieces:
            restore()
        assert keys.sum() == 0


def test_what_was_not_written_to_is_not_either():
    keys = torch.zeros(2, requires_grad=True)
    kept = keys * 2
    loss = kept.exp().sum()
    for restore in restoring([[kept]]):
        restore()
    loss.backward()
    assert keys.grad is not None
