"""What moves freely, what does not, and what may be erased."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fused.torch_internals.tensor_kinds import storage_of
from schedule.capture.effects.effects import changed, uses_random
from schedule.capture.effects.regions import begin_autocast
from schedule.patterns import declare_pure, effects
from schedule.patterns.ops import declare_view


def node_of(target, *extra, kind="call_function", meta=None, **kwargs):
    graph = fx.Graph()
    node = graph.create_node(kind, target, (graph.placeholder("x"), *extra), kwargs)
    node.meta.update(meta or {})
    return node


def unknown(x):
    return x


PURE = [
    torch.relu,
    F.softmax,
    torch.matmul,
    operator.getitem,
    torch.linalg.norm,
    torch.fft.fft,
    operator.index,
]
MUTATING = [torch.relu_, operator.setitem, operator.iadd, torch.sigmoid_]
RANDOM = [F.dropout, torch.bernoulli, torch.rand_like, F.gumbel_softmax, torch.normal]
OPAQUE = [unknown, print, setattr, torch.manual_seed, torch.nn.utils.clip_grad_norm_]


@pytest.mark.parametrize("target", PURE, ids=lambda target: getattr(target, "__name__", str(target)))
def test_pure(target):
    assert effects(node_of(target)).pure


@pytest.mark.parametrize("target", MUTATING, ids=lambda target: getattr(target, "__name__", str(target)))
def test_mutating(target):
    node = node_of(target)
    assert effects(node).mutates == (node.args[0],)


@pytest.mark.parametrize(
    "node",
    [node_of(target) for target in (*PURE, *MUTATING, *RANDOM)]
    + [node_of(F.relu, True), node_of(F.dropout, 0.5, False), node_of(F.dropout, 0.0), node_of(F.dropout, p=0)]
    + [node_of(F.dropout, 0.5, True, True), node_of(F.silu, inplace=True), node_of(F.alpha_dropout)]
    + [node_of(name, kind="call_method") for name in ("add_", "__iadd__", "__setitem__", "bernoulli_", "sum")],
    ids=lambda node: getattr(node.target, "__name__", str(node.target)) + str(node.args[1:]),
)
def test_the_tracer_and_the_matcher_agree(node):
    found = effects(node)
    assert (changed(node), uses_random(node)) == (found.mutates, found.rng)


@pytest.mark.parametrize("target", RANDOM, ids=lambda target: getattr(target, "__name__", str(target)))
def test_random(target):
    assert effects(node_of(target)).rng


@pytest.mark.parametrize("target", OPAQUE, ids=lambda target: getattr(target, "__name__", str(target)))
def test_unknown(target):
    assert effects(node_of(target)).opaque


def test_dropout_that_drops_nothing():
    assert effects(node_of(F.dropout, 0.0)).pure
    assert effects(node_of(F.dropout, training=False)).pure
    assert effects(node_of("dropout", kind="call_method")).rng


def test_attention_draws_with_a_dropout_probability():
    attention = F.scaled_dot_product_attention
    assert effects(node_of(attention, 1, 2)).pure
    assert effects(node_of(attention, 1, 2, None, 0.1)).rng
    assert effects(node_of(attention, 1, 2, dropout_p=0.1)).rng


def test_methods():
    assert effects(node_of("add", kind="call_method")).pure
    assert effects(node_of("add_", kind="call_method")).mutates
    assert effects(node_of("normal_", kind="call_method")).rng
    assert effects(node_of("update", kind="call_method")).opaque
    assert effects(node_of("get_seq_length", kind="call_method", meta={"opaque": True})).pure
    assert effects(node_of("add", kind="call_method", meta={"opaque": True})).opaque
    assert effects(node_of("size", 0, kind="call_method")).fresh


def test_modules():
    def call(module):
        return effects(node_of("m", kind="call_module"), {"m": module})

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert call(nn.Linear(2, 2)).pure and call(nn.Dropout(0.5).eval()).pure
    assert call(nn.Dropout(0.5)).rng and call(nn.ReLU(inplace=True)).mutates
    hooked_inside = nn.Sequential(nn.ReLU(), hooked)
    for module in (hooked, hooked_inside, nn.Sequential(nn.MultiheadAttention(2, 1)), nn.SyncBatchNorm(2), None):
        assert call(module).opaque


def test_layers_one_after_another():
    def call(*layers):
        return effects(node_of("m", kind="call_module"), {"m": nn.Sequential(*layers)})

    norm = nn.BatchNorm1d(2)
    assert call(nn.Linear(2, 2), nn.ReLU(inplace=True)).pure
    assert call(nn.Identity(), nn.ReLU(inplace=True), nn.Linear(2, 2)).mutates
    assert not call(nn.Identity(), nn.Dropout(0.5).eval()).fresh
    assert not call(nn.Flatten()).fresh and call(nn.Linear(2, 2)).fresh
    assert call(nn.Linear(2, 2), nn.Dropout(0.5)).rng
    assert not call(nn.Linear(2, 2), norm).pure and not call(norm).opaque
    assert call(norm).state == {storage_of(buffer) for buffer in norm.buffers()}
    assert call(nn.BatchNorm1d(2, track_running_stats=False)).pure


def test_blocks_are_barriers():
    assert effects(node_of(begin_autocast)).barrier
    assert effects(node_of(torch.manual_seed)).barrier


def test_declared_pure():
    def mine(x):
        return x

    assert effects(node_of(mine)).opaque
    declare_pure(mine)
    assert effects(node_of(mine)).pure
    declare_pure(mine, rng=True)
    assert effects(node_of(mine)).rng


def test_declared_view():
    def mine(x):
        return x

    declare_view(mine)
    assert effects(node_of(mine)).pure and not effects(node_of(mine)).fresh
