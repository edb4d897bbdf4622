"""Calls unlike the recorded ones get graphs of their own, rewritten as the recorded ones are; never a wrong answer."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused
import schedule
from schedule.runtime import MAX_ADAPTATIONS, FallbackWarning, state_of
from tests.small import Mlp, bias_gelu, ids, small
from tests.zoo import batch, build

AUTOCAST = dict(device_type="cpu", dtype=torch.bfloat16)
X = torch.linspace(-2, 2, 96).reshape(2, 3, 16)


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with fused.backend("reference"):
        yield


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


def fallbacks(model: nn.Module) -> int:
    return sum(state.fallbacks for module in model.modules() if (state := state_of(module)) is not None)


def adaptations(model: nn.Module) -> int:
    return sum(len(state.adaptations) for module in model.modules() if (state := state_of(module)) is not None)


def optimized(name: str) -> tuple[nn.Module, nn.Module, schedule.Report]:
    """A rewritten model, its twin and the report."""
    model, twin = build(name), build(name)
    return model, twin, schedule.optimize(model, batch(name), cost_guard=False)


# -- calls of another kind ----------------------------------------------------------------------------------


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
    assert "adapted to calls unlike the recorded ones" in str(report)
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


# -- every way of rewriting ---------------------------------------------------------------------------------


def fast(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A user's replacement."""
    fast.calls += 1  # type: ignore[attr-defined]
    return F.gelu(x + bias, approximate="tanh")


def projection(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def qkv(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three products as one."""
    fast.calls += 1  # type: ignore[attr-defined]
    return F.linear(x, torch.cat(weights)).chunk(len(weights), dim=-1)


class Fast(nn.Module):
    """A replacement that is a module."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return fast(x, bias)


def _fuse(sch: Any) -> None:
    sch["blocks.*.mlp"].fuse(sch["blocks.*.mlp"].find(bias_gelu, expect=2))


def _compile(sch: Any) -> None:
    sch["blocks.*.mlp"].fuse(sch["blocks.*.mlp"].find(bias_gelu), compiler=None)


def _replace(sch: Any) -> None:
    sch["blocks.*.mlp"].replace(fast, sch["blocks.*.mlp"].find(bias_gelu))


def _replace_by_module(sch: Any) -> None:
    sch["blocks.*.mlp"].replace(Fast(), sch["blocks.*.mlp"].find(bias_gelu))


def _merge(sch: Any) -> None:
    attn = sch["blocks.*.attn"]
    for name in ("q", "k", "v"):
        attn[name].decompose()
    weights = [[m for m in group if m.source] for group in attn.find_parallel(projection)]
    attn.replace(qkv, weights)


def _decompose_and_replace(sch: Any) -> None:
    sch["blocks.*.mlp.fc1"].decompose()
    _replace(sch)


def _trace_and_replace(sch: Any) -> None:
    sch["blocks.*"].trace(flatten=True)
    sch["blocks.*"].replace(fast, sch["blocks.*"].find(bias_gelu))


WAYS = [_fuse, _compile, _replace, _replace_by_module, _merge, _decompose_and_replace, _trace_and_replace]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", ["", "deepcopy", "pickle"])
def test_rewrites_are_made_again(way: Callable[[Any], None], copied: str) -> None:
    fast.calls = 0  # type: ignore[attr-defined]
    model, twin = small().eval(), small().eval()
    way(schedule.create_schedule(model, ids()))
    if copied == "deepcopy":
        model = copy.deepcopy(model)
    elif copied == "pickle":
        model = pickle.loads(pickle.dumps(model))
    model.double(), twin.double()
    torch.testing.assert_close(model(**ids()), twin(**ids()))
    assert adaptations(model) == 2 and fallbacks(model) == 0
    if way not in (_fuse, _compile):
        calls = fast.calls  # type: ignore[attr-defined]
        model(**ids(3, 4))
        assert fast.calls == calls + 2, "the replacement runs"  # type: ignore[attr-defined]


def test_matches_picked_by_hand_are_not_guessed() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.b(F.gelu(self.a(x), approximate="tanh")), approximate="tanh")

    model = Two()
    sch = schedule.create_schedule(model, X)
    sch.replace(fast, sch.find(bias_gelu, expect=2)[:1])
    twin = Two().double()
    twin.load_state_dict(model.state_dict())
    model.double()
    with pytest.warns(FallbackWarning, match="1 of the 2 matches of bias_gelu were picked by hand"):
        got = model(X.double())
    torch.testing.assert_close(got, twin(X.double()))
    report = schedule.Report([], model)
    assert report.fallbacks == {"": 1} and "picked by hand" in report.declined[""][0]
    assert "were picked by hand" in " ".join(str(report).split())
    model(X.double())
    assert len(state_of(model).adaptations) == 1, "tried once"  # type: ignore[union-attr]


# -- what must never happen ---------------------------------------------------------------------------------


class Kinds(Mlp):
    """Takes a flag of any value."""

    def forward(self, hidden: torch.Tensor, kind: Any = 0) -> torch.Tensor:
        return super().forward(hidden) if kind != "broken" else self.by_data(hidden)

    def by_data(self, hidden: torch.Tensor) -> torch.Tensor:
        """Cannot be traced."""
        return super().forward(hidden) * (2 if float(hidden.sum()) > -1e9 else 3)


def kinds() -> tuple[nn.Module, nn.Module, schedule.Report]:
    torch.manual_seed(0)
    model = Kinds(16)
    twin = copy.deepcopy(model)
    return model, twin, schedule.optimize(model, X, cost_guard=False)


def test_as_many_kinds_as_are_worth_it() -> None:
    model, twin, report = kinds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in range(MAX_ADAPTATIONS + 3):
            torch.testing.assert_close(model(X, kind), twin(X, kind))
    assert adaptations(model) == MAX_ADAPTATIONS
    assert report.fallbacks == {"": 2}, "0 was recorded, 1 to 8 adapted to"


def test_what_cannot_be_traced_runs_the_original_and_is_tried_once() -> None:
    model, twin, report = kinds()
    with pytest.warns(FallbackWarning, match="No graph could be made for it: "):
        got = model(X, "broken")
    assert torch.equal(got, twin(X, "broken")) and torch.equal(model(X, "broken"), twin(X, "broken"))
    assert report.fallbacks == {"": 2} and adaptations(model) == 1 and report.declined.keys() == {""}
    model(X)
    assert report.fallbacks == {"": 2}


def test_a_graph_that_is_wrong_is_not_used() -> None:
    """The replacement is right for the recorded dtype only."""

    def wrong(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return bias_gelu(x, bias) * (1 if x.dtype == torch.float32 else 2)

    model, twin = small(), small().double()
    sch = schedule.create_schedule(model, ids())
    sch["blocks.*.mlp"].replace(wrong, sch["blocks.*.mlp"].find(bias_gelu))
    model.eval().double()
    with pytest.warns(FallbackWarning, match="its graph differs from the original forward: it is off by"):
        torch.testing.assert_close(model(**ids()), twin.eval()(**ids()))


def test_arguments_that_do_not_fit_raise_what_they_raised() -> None:
    model, _, _ = kinds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TypeError, match="nonsense"):
            model(X, nonsense=1)
    model(X, 1)
    assert [bool(each.specialisations) for each in state_of(model).adaptations] == [False, True]  # type: ignore[union-attr]


def test_a_hook_on_a_submodule_is_not_run_beside_the_call() -> None:
    model, twin, report = kinds()
    seen: list[Any] = []
    model.fc10.register_forward_hook(lambda module, args, output: seen.append(output))  # type: ignore[union-attr]
    with pytest.warns(FallbackWarning, match="fc10 has a hook"):
        torch.testing.assert_close(model(X, 1), twin(X, 1))
    assert len(seen) == 1 and report.declined[""] == ["fc10 has a hook"]


def test_nothing_around_the_call_changes() -> None:
    model, _, _ = kinds()
    model.register_buffer("steps", torch.zeros(1))
    model.train()
    model.fc1.eval()  # type: ignore[union-attr]
    state, flags = torch.get_rng_state(), [module.training for module in model.modules()]
    inside = {name: id(value) for module in model.modules() for name, value in vars(module).items()}
    model(X, 1)
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == flags
    assert {name: id(value) for module in model.modules() for name, value in vars(module).items()} == inside


def test_gradient_checkpointing() -> None:
    for reentrant in (True, False):
        model, twin, report = kinds()
        x = X.double().requires_grad_()
        grads = []
        for each in (model.double(), twin.double()):
            checkpoint(each, x, use_reentrant=reentrant).square().sum().backward()
            grads.append([x.grad.clone(), *(p.grad for p in each.parameters())])  # type: ignore[union-attr]
            x.grad = None
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert report.fallbacks == {} and adaptations(model) == 1


def test_not_while_tracing() -> None:
    model, twin, report = kinds()
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        assert model(mode.from_tensor(X), 1).shape == X.shape
    torch.testing.assert_close(torch.func.vmap(lambda x: model(x, 1))(X), twin(X, 1))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(X, 1), twin(X, 1))
    exported = torch.export.export(model, (X,), {"kind": 1}, strict=False)
    torch.testing.assert_close(exported.module()(X, kind=1), twin(X, 1))
    assert adaptations(model) == 0 and report.fallbacks == {}
    model(X, 1)
    assert adaptations(model) == 1


def test_undo_takes_adapted_graphs_away() -> None:
    model, twin = small().eval(), small().eval()
    sch = schedule.create_schedule(model, ids())
    _replace(sch)
    model.double(), twin.double()
    fast.calls = 0  # type: ignore[attr-defined]
    model(**ids())
    assert fast.calls > 0 and adaptations(model) == 2  # type: ignore[attr-defined]
    sch.undo()
    fast.calls = 0  # type: ignore[attr-defined]
    torch.testing.assert_close(model(**ids()), twin(**ids()))
    assert fast.calls == 0 and all(state_of(module) is None for module in model.modules())  # type: ignore[attr-defined]
    sch.redo()
    model(**ids())
    assert fast.calls > 0  # type: ignore[attr-defined]


def test_undo_of_one_rule_takes_it_from_adapted_graphs() -> None:
    class Late(Mlp):
        def forward(self, hidden: torch.Tensor, relu: bool = False) -> torch.Tensor:
            hidden = super().forward(hidden)
            return F.relu(self.fc1(hidden)) if relu else hidden

    model = nn.Sequential(Late(16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    sch = schedule.create_schedule(model, X)
    report = schedule.optimize(sch, cost_guard=False)
    assert report.applied == {"bias_gelu_tanh": 1, "bias_relu": 1}
    model[0](X, True)
    assert report.adapted["0"] == ["float32, True: bias_gelu_tanh × 1, bias_relu × 1"]
    sch.undo()
    model[0](X, True)
    assert report.adapted["0"] == ["float32, True: bias_gelu_tanh × 1"]


def test_threads_adapt_once() -> None:
    model, twin, report = kinds()
    found: list[torch.Tensor] = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        for kind in range(4):
            found.append(model(X, kind))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and all(torch.allclose(one, twin(X), atol=1e-6) for one in found)
    assert adaptations(model) == 3 and report.fallbacks == {}


def test_a_rule_that_is_not_registered_does_not_survive_pickling() -> None:
    rule = next(rule for rule in schedule.list_rules() if rule.name == "bias_gelu_tanh")
    copied = schedule.Rule("mine", "mine", rule.patterns, rule.build)
    torch.manual_seed(0)
    model = Mlp(16)
    schedule.optimize(model, X, rules=[copied], cost_guard=False)
    twin = copy.deepcopy(model)
    twin.double()(X.double())
    assert adaptations(twin) == 1
    loaded = pickle.loads(pickle.dumps(model))
    with pytest.warns(FallbackWarning, match="not registered"):
        loaded.double()(X.double())


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


def test_layers_alike_are_adapted_once() -> None:
    model = small(4).eval()
    sch = schedule.create_schedule(model, ids())
    _replace(sch)
    model.double()(**ids())
    made = [state_of(block.mlp).adaptations for block in model.blocks]  # type: ignore[union-attr]
    assert all(len(each) == 1 and each[0] is made[0][0] for each in made)
    model.blocks[0].mlp.act.approximate = "none"
    twin = small(4).double().eval()
    twin.blocks[0].mlp.act.approximate = "none"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model(**ids()), twin(**ids()))


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
