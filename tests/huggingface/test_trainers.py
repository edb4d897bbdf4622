"""Trainers of other packages train a scheduled model as they train an untouched one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as hf
from torch import nn

import fused
import schedule.huggingface  # noqa: F401  makes the callback known by name
from schedule.huggingface import OptimizeCallback
from schedule.runtime.scheduled import state_of
from tests.zoo import batch, build

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "use_cpu": True, "seed": 3}
STEPS |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
TEXTS = ["the cat sat", "on a mat and ate", "some cheese with its friends", "a cat and its cheese"] * 4
WORDS = ["<pad>", "<s>", "</s>", *dict.fromkeys(" ".join(TEXTS).split())]


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with fused.backend("reference"):
        yield


def tokenizer() -> Any:
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<s>"
    )


def curves(train: Callable[[nn.Module, list[Any]], Any], name: str = "llama") -> tuple[list[float], list[float]]:
    """Return the losses of an untouched and of a scheduled model."""
    found = []
    for callback in (None, OptimizeCallback(rules="all", cost_guard=False)):
        model = build(name)
        trainer = train(model, [callback] if callback else [])
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if callback is not None:
            assert callback.report is not None and callback.report.applied
            assert any(state_of(module) is not None for module in model.modules())
    assert len(found[0]) == STEPS["max_steps"] and found[0][0] != found[0][-1]
    return found[0], found[1]


def test_the_callback_is_known_by_name(tmp_path: Path) -> None:
    rows = [{k: v[i] for k, v in batch("gpt2", 16, 6).items()} for i in range(16)]
    losses = {}
    for names in ([], ["fxschedule"]):
        arguments = hf.TrainingArguments(str(tmp_path), report_to=names, **STEPS)
        trainer = hf.Trainer(build("gpt2"), arguments, train_dataset=rows)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert all(("fxschedule/fallbacks" in entry) == bool(names) for entry in logged)
        losses[bool(names)] = [entry["loss"] for entry in logged]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


class Contrasting(hf.Trainer):
    """A trainer whose loss calls the model with each half of a batch, one argument by position."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids, mask = inputs["pairs"], torch.ones_like(inputs["pairs"][:, 0])
        one, other = (model(ids[:, i], attention_mask=mask).logits.mean(1) for i in (0, 1))
        return torch.nn.functional.cross_entropy(one @ other.t(), torch.arange(len(one)))


def test_a_model_that_does_not_take_the_batch_is_rewritten_at_its_first_call(tmp_path: Path) -> None:
    rows = [{"pairs": torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(i))} for i in range(16)]

    def train(model: nn.Module, callbacks: list[Any]) -> Any:
        arguments = hf.TrainingArguments(str(tmp_path), report_to=[], remove_unused_columns=False, **STEPS)
        trainer = Contrasting(model, arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train()
        assert not model._forward_pre_hooks
        return trainer

    expected, ours = curves(train)
    assert ours == pytest.approx(expected, rel=1e-3)


CHOICES = {"prompt": TEXTS, "chosen": [" a cat"] * len(TEXTS), "rejected": [" some cheese"] * len(TEXTS)}


@pytest.mark.parametrize("kind, columns", [("SFT", {"text": TEXTS}), ("DPO", CHOICES)])
def test_trl(kind: str, columns: dict[str, list[str]], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="pip install trl")
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    trainer_class, arguments_class = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")

    def train(model: nn.Module, callbacks: list[Any]) -> Any:
        arguments = arguments_class(str(tmp_path), report_to=[], max_length=16, **STEPS)
        given = {"ref_model": build("llama")} if kind == "DPO" else {}
        rows = datasets.Dataset.from_dict(columns)
        given |= {"train_dataset": rows, "processing_class": tokenizer(), "callbacks": callbacks}
        trainer = trainer_class(model, args=arguments, **given)
        trainer.train()
        return trainer

    expected, ours = curves(train)
    assert ours == pytest.approx(expected, rel=1e-3)


def test_sentence_transformers(tmp_path: Path) -> None:
    sentences = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    losses = pytest.importorskip("sentence_transformers.losses", reason="pip install sentence-transformers")
    datasets = pytest.importorskip("datasets", reason="pip install datasets")

    def train(model: Any, callbacks: list[Any]) -> Any:
        folder = tmp_path / "encoder"
        model.base_model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        encoder = sentences.SentenceTransformer(str(folder), device="cpu")
        arguments = sentences.SentenceTransformerTrainingArguments(str(tmp_path), report_to=[], **STEPS)
        rows = datasets.Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[1:] + TEXTS[:1]})
        loss = losses.MultipleNegativesRankingLoss(encoder)
        trainer = sentences.SentenceTransformerTrainer(
            encoder, arguments, train_dataset=rows, loss=loss, callbacks=callbacks
        )
        trainer.train()
        model.trained = encoder  # where a scheduled module is looked for
        return trainer

    expected, ours = curves(train, "bert")
    assert ours == pytest.approx(expected, rel=1e-3)
