"""What forwards use besides their arguments is left as it was: registries of classes, transformers' mask functions."""

from __future__ import annotations

import inspect
import types
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import masking_utils

from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.util.errors import TraceError


def traced(module, *example, training=False):
    recording = record(module, example)
    return specialize(module, type(module).forward, recording.calls[module][0], recording, training)


class Registered:
    """Keeps a list of its kinds, as the layers of transformers' caches do."""

    known: ClassVar[list[type]] = []

    def __init_subclass__(cls):
        Registered.known.append(cls)

    def __init__(self):
        self.scale = torch.ones(())


class Scaling(nn.Module):
    def forward(self, x, state):
        return x * state.scale


def test_a_watched_object_is_of_no_registered_class():
    assert traced(Scaling(), torch.randn(3), Registered()).signature.inputs and not Registered.known


class Settings(types.SimpleNamespace):
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls):
        Settings.known.append(cls)


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Settings(scale=2.0)

    def forward(self, x):
        return x * self.config.scale


def test_a_watched_config_is_no_new_class_of_configs():
    made = traced(Configured(), torch.randn(3))
    assert not Settings.known and "self.config.scale same 2.0" in map(str, made.guard_set)


ALWAYS = {"allow_is_causal_skip": False}
BY_LENGTH = "q_length" in inspect.signature(masking_utils.sdpa_mask).parameters  # 5.0 takes the positions of queries


class Masking(nn.Module):
    """Masks by a function of single indices, which looks one up."""

    def forward(self, x, hidden):
        def kept(batch, head, query, key):
            return query.new_ones((), dtype=torch.bool) & (key >= query - 1) & hidden[batch, key]

        function = masking_utils.and_masks(masking_utils.causal_mask_function, kept)
        rows, length = x.shape
        queries = length if BY_LENGTH else torch.arange(length)
        mask = masking_utils.sdpa_mask(rows, queries, length, mask_function=function, use_vmap=True, **ALWAYS)
        return x @ mask[:, 0].to(x.dtype)


@pytest.mark.parametrize("training", [True, False])
def test_masks_made_index_by_index(training):
    module = Masking()
    made = traced(module, torch.randn(3, 5), torch.rand(3, 5) > 0.3, training=training)
    assert not made.guards and not made.has_checks
    for rows, length in ((3, 5), (4, 7), (1, 1)):
        x, hidden = torch.randn(rows, length), torch.rand(rows, length) > 0.3
        torch.testing.assert_close(made.function(module, x, hidden), module(x, hidden))


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.dtype = torch.float32

    def forward(self, x):
        self.inner = self.inner.to(self.dtype)
        return self.inner(x)


def test_a_module_that_is_where_it_should_be_is_not_moved():
    module = Casting()
    made = traced(module, torch.randn(2, 3))
    x = torch.randn(5, 3)
    assert torch.equal(made.function(module, x), module(x))
    assert "dtype" in " ".join(made.guards)


def test_a_module_that_would_be_moved_is_refused():
    module = Casting()
    recording = record(module, (torch.randn(2, 3),))
    module.dtype = torch.float64
    with pytest.raises(TraceError, match=r"moves a module to torch\.float64"):
        specialize(module, Casting.forward, recording.calls[module][0], recording, False)
    assert module.inner.weight.dtype is torch.float32
