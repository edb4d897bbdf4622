"""transformers' own hooks, which collect hidden states and attentions, are no hooks of the user's."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
import transformers as hf

import schedule
from schedule.runtime.scheduled import FallbackWarning, state_of
from schedule.util.errors import TraceError
from tests.needs import needs


@pytest.fixture
def llama():
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval()


by_hooks = needs(
    find_spec("transformers.utils.output_capturing") is not None, "hooks that collect: it replaces forwards"
)

ids = torch.arange(14).view(2, 7) + 3
longer = torch.arange(27).view(3, 9) + 3


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ("logits", "hidden_states", "attentions"):
        one, two = ours.get(name), theirs.get(name)
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two)


@by_hooks
@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
@torch.no_grad()
def test_what_is_collected_is_an_output_of_the_whole_graph(llama, wanted):
    twin = copy.deepcopy(llama)
    asked = {wanted: True, "use_cache": False}
    sch = schedule.create_schedule(llama, dict(input_ids=ids, **asked))
    sch.trace(flatten=True)
    schedule.runtime.scheduled.install(llama, sch.specializations)
    for x in (ids, longer):
        assert_same(llama(x, **asked), twin(x, **asked))
    assert state_of(llama).fallbacks == 0


@by_hooks
@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@torch.no_grad()
def test_calls_in_a_graph_hand_over_what_is_collected(llama):
    twin = copy.deepcopy(llama)
    asked = {"output_hidden_states": True, "use_cache": False}
    sch = schedule.create_schedule(llama, dict(input_ids=ids, **asked))
    sch.trace_until("model.layers.*")
    schedule.runtime.scheduled.install(llama, sch.specializations)
    assert_same(llama(longer, **asked), twin(longer, **asked))
    assert state_of(llama).fallbacks == 0


@by_hooks
def test_what_is_collected_inside_a_call_is_not_lost(llama):
    sch = schedule.create_schedule(llama, dict(input_ids=ids, output_attentions=True, use_cache=False))
    with pytest.raises(TraceError, match=r"collects outputs of modules inside model\.layers\.0"):
        sch.trace_until("model.layers.*")


@by_hooks
@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@torch.no_grad()
def test_a_layer_collected_from_runs_its_graph_while_nothing_is_collected(llama):
    twin = copy.deepcopy(llama)
    llama(ids, output_attentions=True)  # now the hooks are there
    sch = schedule.create_schedule(llama, dict(input_ids=ids, use_cache=False))
    sch["model.layers.0"].trace(flatten=True)
    layer = llama.model.layers[0]
    schedule.runtime.scheduled.install(layer, sch["model.layers.0"].specializations)
    assert_same(llama(longer, use_cache=False), twin(longer, use_cache=False))
    assert state_of(layer).fallbacks == 0
    with pytest.warns(FallbackWarning):
        ours = llama(longer, use_cache=False, output_attentions=True)
    assert_same(ours, twin(longer, use_cache=False, output_attentions=True))


def test_a_hook_of_the_user_is_still_refused(llama):
    llama(ids, output_hidden_states=True)
    llama.model.layers[1].register_forward_hook(lambda module, args, output: None)
    sch = schedule.create_schedule(llama, dict(input_ids=ids, use_cache=False))
    with pytest.raises(TraceError, match=r"model\.layers\.1 has a hook"):
        sch.trace(flatten=True)


@by_hooks
@pytest.mark.unreplayable("the test calls what adapts")
def test_the_collector_is_given_dicts_as_transformers_gives_them(llama, monkeypatch):
    from transformers.utils import output_capturing

    given = []
    put = output_capturing.CompileableContextVar.set

    def noted(self, value):
        given.append(tuple(value.keys()))  # transformers' own tests read them
        return put(self, value)

    schedule.optimize(llama, {"input_ids": ids}, cost_guard=False)
    monkeypatch.setattr(output_capturing.CompileableContextVar, "set", noted)
    schedule.optimize(llama, {"input_ids": ids}, cost_guard=False)
    assert not any(given)
    llama.double()(ids, output_hidden_states=True)
    assert ("hidden_states",) in given
