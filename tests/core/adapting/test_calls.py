"""Calls that differ from the recorded ones get graphs of their own, rewritten as the recorded ones are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused
import schedule
from schedule.runtime.scheduled import FallbackWarning, state_of
from tests.core.adapting.counting import X, adaptations, fallbacks
from tests.small import Mlp, bias_gelu, ids, small
from tests.zoo import batch, build

AUTOCAST = dict(device_type="cpu", dtype=torch.bfloat16)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[dict[str, int]]:
    """Within, how often each fused function is really called by graphs that are made within."""
    counts = dict.fromkeys(names, 0)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        call.__module__ = "fused"
        return call

    with monkeypatch.context() as patched:
        for name in names:
            patched.setattr(fused, name, counting(name, getattr(fused, name)))
        yield counts


def train_step(model: nn.Module, inputs: dict[str, Any], seed: int = 1) -> list[torch.Tensor]:
    """Loss and gradients in training mode, under one seed."""
    model.train().zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def optimized(name: str) -> tuple[nn.Module, nn.Module, schedule.Report]:
    """A rewritten model, its twin and the report."""
    model, twin = build(name), build(name)
    return model, twin, schedule.optimize(model, batch(name), cost_guard=False)


@pytest.mark.one_in(2)
@pytest.mark.unreplayable("the test exchanges fused ops to count them")
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_training_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = {"gpt2": 4, "bert": 5, "llama": 2}
    with counted(monkeypatch, "bias_activation", "scaled_masked_softmax") as counts:
        model, twin, report = optimized(name)
        for seed, inputs in enumerate((batch(name), batch(name, 3, 5))):
            with torch.autocast(**AUTOCAST):
                train_step(model, inputs)  # the first call adapts
                counts.update(dict.fromkeys(counts, 0))
                ours = train_step(model, inputs, seed)
                assert sum(counts.values()) == ops[name], "the fused ops ran"
                theirs = train_step(twin, inputs, seed)
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-2)
    assert report.fallbacks == {} and report.declined == {}
    assert all("autocast bfloat16" in text for texts in report.adapted.values() for text in texts)
    assert "graphs for other kinds of calls" in str(report)
    assert report.to_dict()["adapted"] == report.adapted


def test_autocast_leaves_no_cast_parameters_behind() -> None:
    """What autocast caches of a parameter while tracing would take its gradient away."""
    model, twin, _ = optimized("gpt2")
    with torch.autocast(**AUTOCAST):
        ours = train_step(model, batch("gpt2"))  # adapts in the middle of the step
        theirs = train_step(twin, batch("gpt2"))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-2)


@pytest.mark.unreplayable("the test exchanges fused ops to count them")
def test_another_dtype_after_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch, "bias_activation", "scaled_masked_softmax") as counts:
        model, twin, report = optimized("bert")
        model, twin = model.bfloat16(), twin.bfloat16()
        train_step(model, batch("bert"))
        counts.update(dict.fromkeys(counts, 0))
        ours, theirs = train_step(model, batch("bert", 3, 5)), train_step(twin, batch("bert", 3, 5))
    assert counts == {"bias_activation": 3, "scaled_masked_softmax": 2}
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-2)
    assert report.fallbacks == {}
    model.float()
    assert train_step(model, batch("bert"))[0].dtype == torch.float32 and fallbacks(model) == 0


@pytest.mark.parametrize("given_first", [True, False])
def test_a_mask_or_none(given_first: bool) -> None:
    model, twin = build("bert").eval(), build("bert").eval()
    with_mask = batch("bert")
    without = {key: value for key, value in with_mask.items() if key != "attention_mask"}
    first, then = (with_mask, without) if given_first else (without, with_mask)
    report = schedule.optimize(model, first, cost_guard=False)
    for inputs in (then, first, then):
        torch.testing.assert_close(model(**inputs).logits, twin(**inputs).logits, rtol=1e-5, atol=1e-5)
    assert report.fallbacks == {}


def test_scores_without_a_mask_are_fused_too() -> None:
    model = small()
    report = schedule.optimize(model, {**ids(), "mask": torch.zeros(5, 5)}, cost_guard=False)
    twin = small()
    torch.manual_seed(0)
    ours = model(**ids())
    torch.manual_seed(0)
    torch.testing.assert_close(ours, twin(**ids()))
    attention = {path: texts for path, texts in report.adapted.items() if path.endswith("attn")}
    assert attention == {f"blocks.{i}.attn": ["float32, mask=None: attention_softmax × 1"] for i in (0, 1)}
    assert fallbacks(model) == 0


@pytest.mark.parametrize("recorded_cache", [True, False])
def test_generate_with_and_without_a_cache(recorded_cache: bool) -> None:
    model, twin = build("gpt2").eval(), build("gpt2").eval()
    schedule.optimize(model, {**batch("gpt2"), "use_cache": recorded_cache}, cost_guard=False)
    for cache in (not recorded_cache, recorded_cache):
        options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=cache, pad_token_id=0)
        prompt = batch("gpt2", 2, 5)["input_ids"]
        assert torch.equal(model.generate(prompt, **options), twin.generate(prompt, **options))
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    assert fallbacks(model) == 0 and 0 < max(len(state.adaptations) for state in states) <= 3


def test_labels_given_where_there_were_none() -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            y = super().forward(x)
            return y if labels is None else (F.mse_loss(y, labels), y)

    torch.manual_seed(0)
    model = Model(16)
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, X, cost_guard=False)
    assert report.applied == {"bias_gelu_tanh": 1}
    for ours, theirs in zip(model(X, labels=X), twin(X, labels=X), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert report.fallbacks == {} and report.adapted == {"": ["float32, labels=float32: bias_gelu_tanh × 1"]}


def test_signatures_do_not_share_names() -> None:
    """Two kinds of calls that differ in an object the guard compares with."""

    class Chosen(Mlp):
        def forward(self, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
            hidden = super().forward(hidden)
            return hidden * options["scale"] if "scale" in options else hidden + options["shift"]

    torch.manual_seed(0)
    model = Chosen(16)
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, (X, {"scale": 2.0}), cost_guard=False)
    for options in ({"shift": 1.0}, {"scale": 2.0}, {"shift": 1.0}):
        torch.testing.assert_close(model(X, options), twin(X, options))
    assert report.fallbacks == {} and adaptations(model) == 1


def narrow_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As ``F.cross_entropy``, in the dtype of ``x``."""
    return -(y * F.log_softmax(x, dim=-1)).sum(-1).mean()


@pytest.mark.unwritable("the rule is not registered")
def test_what_autocast_widens_stays_wide() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            return F.cross_entropy(y, y * 0.5)

    def build_narrow(graph: Any, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        return graph.call_function(narrow_loss, (inputs["x"], inputs["y"]))

    def entropy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y)

    rule = schedule.Rule("narrow", "losses", (entropy,), build_narrow)
    x = X[0]
    torch.manual_seed(0)
    model = Loss()
    report = schedule.optimize(model, x, rules=[rule], cost_guard=False)
    assert report.applied == {"narrow": 1}
    with torch.autocast(**AUTOCAST):
        got = model(x)
        wide = F.cross_entropy(model.fc(x), model.fc(x) * 0.5)
    assert got.dtype is wide.dtype is torch.float32
    torch.testing.assert_close(got, wide, rtol=2e-2, atol=1e-2)
    assert report.adapted == {"": ["float32, autocast bfloat16: narrow × 1"]}


@pytest.mark.unwritable("what is put in is defined inside the test")
def test_a_dtype_that_only_parameters_show() -> None:
    """Token ids look the same whatever the model computes in."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = nn.Embedding(32, 16), nn.Linear(16, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.fc(self.embed(ids)), approximate="tanh")

    def narrow(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return bias_gelu(x.float(), bias.float())

    torch.manual_seed(0)
    model, tokens = Embedded(), torch.arange(6).reshape(2, 3)
    twin = copy.deepcopy(model).double()
    sch = schedule.create_schedule(model, tokens)
    sch.replace(narrow, sch.find(bias_gelu, expect=1))
    torch.testing.assert_close(model(tokens).double(), twin(tokens), rtol=1e-5, atol=1e-5)
    model.double()
    with pytest.warns(FallbackWarning, match="returns torch.float32"):
        torch.testing.assert_close(model(tokens), twin(tokens), rtol=1e-12, atol=1e-12)
    model.bfloat16()
    model(tokens)
    model.float()(tokens)
    assert fallbacks(model) == 2 and adaptations(model) == 2
