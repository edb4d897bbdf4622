"""The runner of other projects' tests counts what it should, on tests of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.runs import Comparison, Run, lost, run
from tests.peers.sources import Sources

pytestmark = pytest.mark.slow  # it starts processes that import torch and transformers

TESTS = """
import os, pytest, torch, transformers

@pytest.fixture
def model():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_layer=1, n_embd=8, n_head=2))

def test_calls_a_model(model):
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 32)

def test_asks_for_the_class_of_a_layer(model):
    layer = type(model.transformer.h[0])
    model(torch.tensor([[1, 2, 3]]))
    assert type(model.transformer.h[0]) is layer  # not once it is scheduled

def test_fails_either_way(model):
    assert not model(torch.tensor([[1, 2, 3]])).logits.shape

def test_kills_its_process():
    os._exit(3)

def test_comes_after(record_property):
    record_property("noted", 3)

@pytest.mark.skip(reason="not today")
def test_is_skipped():
    pass
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Both runs of the tests above."""
    folder: Path = tmp_path_factory.mktemp("checkout")
    (folder / "test_models.py").write_text(TESTS)
    sources = Sources(folder, folder, "", True)
    return {rules: run(sources, ["test_models.py"], rules) for rules in ("untouched", "default")}


def named(outcomes: dict[str, str]) -> dict[str, str]:
    """Outcomes by the name of the test alone."""
    return {name.rpartition("::test_")[2]: outcome for name, outcome in outcomes.items()}


def test_every_test_has_an_outcome_though_one_kills_its_process(runs: dict[str, Run]) -> None:
    expected = dict.fromkeys(["calls_a_model", "asks_for_the_class_of_a_layer", "comes_after"], "passed")
    assert named(runs["untouched"].outcomes) == expected | {
        "fails_either_way": "failed",
        "kills_its_process": "died",
        "is_skipped": "skipped",
    }


def test_reasons_and_properties_are_read(runs: dict[str, Run]) -> None:
    assert named(runs["untouched"].skipped) == {"is_skipped": "Skipped: not today"}
    assert [noted for noted in runs["untouched"].properties.values() if noted] == [{"noted": 3}]


def test_what_passes_untouched_alone_is_lost(runs: dict[str, Run]) -> None:
    missing = lost(runs["untouched"], runs["default"])
    assert [name.rpartition("::test_")[2] for name in missing] == ["asks_for_the_class_of_a_layer"]
    (failure,) = runs["default"].failures[missing[0]]
    assert "AssertionError" in failure["message"] or "assert" in failure["message"]


def test_a_run_without_a_rewritten_model_is_told_apart(runs: dict[str, Run]) -> None:
    untouched, scheduled = runs["untouched"], runs["default"]
    assert not untouched.counts
    assert Comparison("gpt2", untouched, untouched, [], []).vacuous
    assert not Comparison("gpt2", untouched, scheduled, [], []).vacuous
