"""Lists of a cache that a forward makes longer, as recurrent models do for the layers they run several times."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import schedule
from schedule.runtime.scheduled import install, state_of
from schedule.util.errors import TraceError

LOOPS = 3


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, cache, index):
        y = self.linear(x)[:, None]
        if cache is not None:
            y, _ = cache.update(y, y, index)
        return x + torch.tanh(y[:, 0]).mean(1, keepdim=True)


class Looping(nn.Module):
    """One layer, run several times, each with a layer of the cache of its own."""

    def __init__(self, lengthen):
        super().__init__()
        self.layer, self.lengthen = Attending(), lengthen
        self.config = hf.LlamaConfig(num_hidden_layers=1)

    def forward(self, x, cache=None):
        if cache is None:
            cache = hf.DynamicCache(config=self.config)
        if len(cache.layers) == 1:
            self.lengthen(cache)
        for index in range(LOOPS):
            x = self.layer(x, cache, index)
        return {"x": x, "cache": cache}


def add_in_place(cache):
    cache.layers += [copy.deepcopy(layer) for layer in cache.layers[:1] * (LOOPS - 1)]


def extend(cache):
    cache.layers.extend(copy.deepcopy(layer) for layer in cache.layers * (LOOPS - 1))


def append(cache):
    layers = cache.layers
    for _ in range(LOOPS - 1):
        layers.append(copy.deepcopy(layers[0]))


def append_shallow_copies(cache):
    layers = cache.layers
    for _ in range(LOOPS - 1):
        layers.append(copy.copy(layers[0]))


WAYS = [add_in_place, extend, append, append_shallow_copies]


@pytest.mark.parametrize("lengthen", WAYS)
@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_layers_put_at_the_end_of_a_cache(lengthen, given):
    twin = Looping(lengthen).eval()
    model = copy.deepcopy(twin)

    def cache():
        return {"cache": hf.DynamicCache(config=twin.config)} if given else {}

    sch = schedule.create_schedule(model, {"x": torch.randn(2, 5, 4), **cache()})
    sch.trace(flatten=True)
    install(model, sch.specializations)
    for rows, length in ((2, 5), (3, 7)):
        ours, theirs, fallbacks = cache(), cache(), state_of(model).fallbacks
        for step in (length, 1, 2):
            x = torch.randn(rows, step, 4)
            our, their = model(x, **ours), twin(x, **theirs)
            torch.testing.assert_close(our["x"], their["x"])
            ours, theirs = {"cache": our["cache"]}, {"cache": their["cache"]}
            assert len(our["cache"].layers) == LOOPS == len({id(layer) for layer in our["cache"].layers})
            for one, other in zip(our["cache"].layers, their["cache"].layers, strict=True):
                torch.testing.assert_close(one.keys, other.keys)
            if step == length:
                assert state_of(model).fallbacks == fallbacks  # with a longer cache, the forward goes another way
            if not given:
                break


def insert(cache):
    layers = cache.layers
    for _ in range(LOOPS - 1):
        layers.insert(0, copy.deepcopy(layers[0]))


def read_again(cache):
    """The second reading asks for a length that is only known after the first change."""
    for _ in range(LOOPS - 1):
        cache.layers.append(copy.deepcopy(cache.layers[0]))


@pytest.mark.parametrize("lengthen", [insert, read_again])
def test_another_change_of_the_list_is_refused_and_the_model_goes_on(lengthen):
    twin = Looping(lengthen).eval()
    model = copy.deepcopy(twin)
    sch = schedule.create_schedule(model, {"x": torch.randn(2, 5, 4), "cache": hf.DynamicCache(config=twin.config)})
    with pytest.raises(TraceError, match=r"changes a list of an argument|may have changed state"):
        sch.trace(flatten=True)
    x, caches = torch.randn(3, 4, 4), [hf.DynamicCache(config=twin.config) for _ in range(2)]
    torch.testing.assert_close(model(x, caches[0])["x"], twin(x, caches[1])["x"], rtol=0, atol=0)
    assert len(caches[0].layers) == LOOPS


class Twice(list):
    def append(self, value):
        super().extend([value, value])


class Appending(nn.Module):
    def forward(self, x, state):
        state.total.append(1)
        return x * 2


def test_a_list_with_an_append_of_its_own_is_left_to_it():
    sch = schedule.create_schedule(Appending(), (torch.randn(2, 4), State(Twice([1]))))
    with pytest.raises(TraceError, match="changes a list of an argument"):
        sch.trace(flatten=True)


class Asked(nn.Module):
    def forward(self, x, state):
        found = state.found()
        return x if found is None else x + len(found)


class Finding:
    def __init__(self, value):
        self.value = value

    def found(self):
        return self.value


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.parametrize("recorded", [[1, 2], {"a": 1}])
@pytest.mark.parametrize("other", [None, 3, [1], (1,), {"b": 1, "a": 2}])
def test_a_method_that_returns_something_else_than_in_the_recorded_call(recorded, other):
    model = Asked()
    sch = schedule.create_schedule(model, (torch.randn(2, 4), Finding(recorded)))
    sch.trace(flatten=True)
    install(model, sch.specializations)
    x = torch.randn(3, 4)
    results = []
    for each in (model, Asked()):
        try:
            results.append(each(x, Finding(other)).tolist())
        except TypeError as error:
            results.append(str(error))
    assert results[0] == results[1]


class Deep(nn.Module):
    def forward(self, x, state):
        kept = copy.deepcopy(state)
        state.total.add_(x.sum(0))
        return x + kept.total + state.total


class State:
    def __init__(self, total):
        self.total = total


def test_a_deep_copy_of_an_argument_is_of_the_call():
    model = Deep()
    sch = schedule.create_schedule(model, (torch.randn(2, 4), State(torch.zeros(4))))
    sch.trace(flatten=True)
    install(model, sch.specializations)
    x = torch.randn(3, 4)
    ours, theirs = State(torch.ones(4)), State(torch.ones(4))
    torch.testing.assert_close(model(x, ours), Deep()(x, theirs))
    torch.testing.assert_close(ours.total, theirs.total)
    assert state_of(model).fallbacks == 0


class Scaled(nn.Module):
    def forward(self, x, state):
        return x * copy.deepcopy(state).total * state.total


def test_a_deep_copy_of_what_requires_gradients_has_none_itself():
    model = Scaled()
    sch = schedule.create_schedule(model, (torch.randn(2, 4), State(torch.ones(4, requires_grad=True))))
    sch.trace(flatten=True)
    install(model, sch.specializations)
    x, gradients = torch.randn(3, 4), []
    for each in (model, Scaled()):
        state = State(torch.full((4,), 2.0, requires_grad=True))
        each(x, state).sum().backward()
        gradients.append(state.total.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert state_of(model).fallbacks == 0
