"""Twenty architectures of transformers, eager attention: rewritten wherever the construct exists, and the same model.

The fused ops run as plain torch, so that what is compared is the rewriting and not a compiler.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import nn

import fused
import schedule
from schedule.api.optimize import optimize
from schedule.api.schedule import Schedule
from schedule.report.report import Report
from schedule.runtime.scheduled import install, state_of
from tests.needs import IS_OLD
from tests.zoo import ARCHITECTURES, batch, build

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Expected:
    """In how many places each rule family is applied; two layers, or two encoder and two decoder layers.

    The numbers are those of every supported release of torch and of transformers.
    """

    attention_softmax: int
    bias_activation: int = 0
    gated_mlp: int = 0
    rms_norm: int = 0
    layer_norm: int = 0
    rotary_embedding: int = 0
    bias_dropout: int = 0
    loss: int = 1


# Of BERT's layer norms two in each layer follow a sum; one of GPT-2's does, since the other one's sum is made in the
# layer before. T5 has two or three sublayers with a norm and a dropout each, and two final norms.
EXPECTED = {
    "gpt2": Expected(2, 2, layer_norm=2, bias_dropout=4),
    "bert": Expected(2, 3, layer_norm=4, bias_dropout=4),  # two layers and the prediction head
    "roberta": Expected(2, 3, layer_norm=5, bias_dropout=4),
    "albert": Expected(1, 2, layer_norm=2),  # one layer, used twice, and the head; no dropout
    "distilbert": Expected(2, 3, layer_norm=4, bias_dropout=2),
    "electra": Expected(2, 3, layer_norm=4, bias_dropout=4),
    "opt": Expected(2, 2, bias_dropout=4),
    "bloom": Expected(2, 2),
    "gpt_neo": Expected(2, 2, layer_norm=2),
    "gpt_neox": Expected(2, 2, rotary_embedding=2),
    "gptj": Expected(2, 2, rotary_embedding=4),  # queries and keys have cos and sin each
    "t5": Expected(6, rms_norm=12, bias_dropout=10),  # ReLU without a bias
    "llama": Expected(2, gated_mlp=2, rms_norm=5, rotary_embedding=2),
    "mistral": Expected(2, gated_mlp=2, rms_norm=5, rotary_embedding=2),
    "qwen3": Expected(2, gated_mlp=2, rms_norm=9, rotary_embedding=2),  # of queries and keys too
    "gemma3": Expected(2, gated_mlp=2, rms_norm=13, rotary_embedding=2),
    "phi3": Expected(2, gated_mlp=2, rms_norm=5, rotary_embedding=2),
    "falcon": Expected(2, rotary_embedding=2),  # GELU without a bias
    "vit": Expected(2, 2, layer_norm=0 if IS_OLD else 2),  # in 5.0 a submodule takes the sum before the norm, too
    "whisper": Expected(6, 4, layer_norm=6),
}
GENERATIVE = [name for name in EXPECTED if name not in ("bert", "roberta", "albert", "distilbert", "electra", "vit")]
every_architecture = pytest.mark.parametrize("name", EXPECTED)
KINDS = ("gpt2", "bert", "t5", "llama", "vit", "whisper")
"""One architecture of each kind: what hardly depends on the architecture is tested on the rest in the long sweep."""
one_of_each_kind = pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]
)


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with fused.backend("reference"):
        yield


def scheduled(name: str, rows: int = 2) -> tuple[nn.Module, Schedule, Report]:
    """A rewritten model, its schedule and the report."""
    model = build(name)
    sch = schedule.create_schedule(model, batch(name, rows))
    return model, sch, optimize(sch, cost_guard=False)


def places(report: Report) -> dict[str, int]:
    """Family → places that its rules were applied in."""
    counts = Counter[str]()
    for rule in schedule.list_rules():
        counts[rule.family] += report.count(rule.name)
    return {family: count for family, count in counts.items() if count}


def outputs(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits in eval mode."""
    model.eval()
    with torch.no_grad():
        return model(**inputs).logits


def step(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Loss and gradients in training mode, under one seed."""
    model.train().zero_grad()
    torch.manual_seed(1)
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_the_zoo_is_covered() -> None:
    assert EXPECTED.keys() == ARCHITECTURES.keys()


@pytest.mark.one_in(2)
@every_architecture
def test_rules_apply_wherever_the_construct_exists(name: str) -> None:
    model, _, report = scheduled(name)
    assert places(report) == {family: count for family, count in asdict(EXPECTED[name]).items() if count}, report
    assert not report.select(status="skipped") and not report.select(status="near miss"), report
    again = optimize(model, batch(name), cost_guard=False)
    assert not again.applied, "a second run found more"


@pytest.mark.one_in(7)
@every_architecture
def test_same_outputs_gradients_and_updates_at_other_shapes(name: str) -> None:
    model, _, _ = scheduled(name)
    report = schedule.equivalent(build(name), model, batch(name))
    assert report.equal, report
    assert len({case.shapes for case in report.cases}) >= (2 if name == "vit" else 4)
    assert {case.mode for case in report.cases} == {"train", "eval"}


@pytest.mark.one_in(10)
@every_architecture
def test_every_rule_there_is_at_once(name: str) -> None:
    model, twin = build(name), build(name)
    report = schedule.optimize(model, batch(name), rules="all", cost_guard=False)
    for rows in (2, 3):
        inputs = batch(name, rows)
        torch.testing.assert_close(outputs(model, inputs), outputs(twin, inputs), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(step(model, inputs), step(twin, inputs), atol=1e-4, rtol=1e-3)
    assert report.fallbacks == {}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param(name, cache, marks=() if name in KINDS else pytest.mark.slow)
        for name in GENERATIVE
        for cache in (True, False)
    ],
)
def test_generates_the_same_tokens(name: str, cache: bool) -> None:
    model, _, _ = scheduled(name)
    inputs = {k: v for k, v in batch(name).items() if k in ("input_ids", "attention_mask", "input_features")}
    settings = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=cache)
    twin = build(name).eval()
    torch.testing.assert_close(
        model.eval().generate(**inputs, **settings), twin.generate(**inputs, **settings), rtol=0, atol=0
    )


@pytest.mark.one_in(2)
@one_of_each_kind
def test_state_dict_goes_both_ways(name: str) -> None:
    model, _, _ = scheduled(name)
    other = build(name, seed=1)
    assert model.state_dict().keys() == other.state_dict().keys()
    model.load_state_dict(other.state_dict())
    inputs = batch(name, 3, 5)
    torch.testing.assert_close(outputs(model, inputs), outputs(other, inputs), rtol=1e-5, atol=1e-5)
    back = build(name, seed=2)
    back.load_state_dict(model.state_dict())
    assert torch.equal(outputs(back, inputs), outputs(other, inputs))


@pytest.mark.one_in(2)
@one_of_each_kind
def test_undone_to_the_bit(name: str) -> None:
    model, sch, _ = scheduled(name)
    assert sch.history
    while sch.history:
        sch.undo()
    twin, inputs = build(name), batch(name, 3, 5)
    for (path, module), other in zip(model.named_modules(), twin.modules(), strict=True):
        assert type(module) is type(other) and state_of(module) is None, path
        assert vars(module).keys() == vars(other).keys(), path
    for ours, theirs in zip(step(model, inputs), step(twin, inputs), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.one_in(2)
@one_of_each_kind
def test_copies_and_pickles(name: str) -> None:
    model, _, report = scheduled(name)
    inputs = batch(name, 3, 5)
    step(model, inputs)  # a first call may set state of the model, such as the kind of the loss in the config of ViT
    expected = step(model, inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin, type(build(name)))
        changed = [path for path, module in twin.named_modules() if state_of(module) is not None]
        assert len(changed) == len({entry.path for entry in report.select(status="applied")})
        for ours, theirs in zip(step(twin, inputs), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.one_in(3)
@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@every_architecture
def test_root_traces_whole_and_runs_at_other_shapes(name: str) -> None:
    model = build(name)
    sch = schedule.create_schedule(model, batch(name))
    sch.trace(flatten=True)
    install(model, sch.specializations)
    state, twin = state_of(model), build(name)
    assert state is not None
    opaque = [n for n in sch.graph.nodes if n.op == "call_module" and any(model.get_submodule(n.target).children())]
    assert not opaque, f"left as calls: {opaque}"
    for rows, length in ((3, 5), (4, 9)):
        inputs = batch(name, rows, length)
        torch.testing.assert_close(outputs(model, inputs), outputs(twin, inputs), rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(step(model, inputs), step(twin, inputs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert state.fallbacks == 0, state.last_miss
