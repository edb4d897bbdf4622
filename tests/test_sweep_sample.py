"""Twenty-five architectures of the sweep, across families: what held of each still holds.

The whole sweep is ``python -m tests.sweep``. Where one of these does better than it says here, raise the mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import transformers
from torch import nn

import schedule
from tests.sweep.coverage import wrong
from tests.sweep.one import check

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Held:
    """What holds of one architecture.

    Attributes:
        rules: rule → places that it is applied in, at least.
        whole: the root is traced as one graph.
        known: kinds of reasons that are known to be in the way.
        fallbacks: calls at the recorded shape that are known to run the original forward.
        built: a tiny model of it can be made and called.
    """

    rules: Mapping[str, int] = field(default_factory=dict)
    whole: bool = True
    known: tuple[str, ...] = ()
    fallbacks: int = 0
    built: bool = True


NOT_IN_TRAINING = ("traced for eval only",)
A_NUMBER_OF_IMAGES = ("traced for one number of rows",)
A_LENGTH = Held({"gated_silu": 2, "cross_entropy": 1}, known=("traced for one length",), fallbacks=2)


def held(attention: int = 0, whole: bool = True, known: tuple[str, ...] = (), **rules: int) -> Held:
    """``rules`` and ``attention`` softmaxes."""
    return Held(dict(rules, attention_softmax=attention), whole, known)


SAMPLE: dict[str, Held] = {
    # text: decoders, encoders, both
    "gpt_neox": held(2, bias_gelu=2),
    "cohere": held(2),
    "olmo2": held(2),
    "starcoder2": held(2, bias_gelu_tanh=2),
    "stablelm": held(2),
    "roberta": held(2, bias_gelu=3),
    "deberta-v2": held(2, bias_gelu=3),
    "bart": held(6, bias_gelu=4),
    "t5": held(6),
    # images
    "dinov2": held(2, bias_gelu=2),
    "convnext": held(bias_gelu=8),
    "segformer": held(4),
    "beit": held(2, bias_gelu=2),
    "detr": held(6, bias_relu=6),
    # sound
    "wav2vec2": Held({"attention_softmax": 2, "bias_gelu": 2}, whole=False, known=NOT_IN_TRAINING, fallbacks=1),
    "whisper": held(6, bias_gelu=4),
    "audio-spectrogram-transformer": held(2, bias_gelu=2),
    # several of them
    "clip": held(4, bias_quick_gelu=4),
    "siglip": held(4, bias_gelu_tanh=5),
    "llava": held(4, True, A_NUMBER_OF_IMAGES, bias_quick_gelu=2, bias_gelu=1),
    "qwen2_vl": held(2, True, A_NUMBER_OF_IMAGES, bias_quick_gelu=2, bias_gelu=1),
    # experts, state spaces, series
    "mixtral": held(2, gated_silu=2),
    "mamba": A_LENGTH,
    "bamba": held(1, gated_silu=3),
    "patchtst": held(2, bias_gelu=2),
}

IN_5_0: dict[str, Held] = {
    "stablelm": Held(known=("not shrunk",), built=False),  # its config has no pad_token_id
    "detr": Held(known=("no example inputs",), built=False),  # an unbound variable in training
    "qwen2_vl": Held(known=("no example inputs",), built=False),  # no mrope_section in its config
    "llava": held(4, False, (*A_NUMBER_OF_IMAGES, "not traced"), bias_quick_gelu=2, bias_gelu=1),  # assigns `forward`
    "mamba": Held(
        {"rms_norm_llama": 3, "cross_entropy": 1}, False, ("traced for one length", "traced for training only"), 4
    ),
}
"""What differs in transformers 5.0, by errors of that release or of tiny configs of it."""
if transformers.__version__.startswith("5.0."):
    SAMPLE |= IN_5_0


SHORT = ("gpt_neox", "stablelm", "roberta", "t5", "dinov2", "wav2vec2", "clip", "llava", "mixtral", "patchtst")
"""Run at every change; the others, which take up to 20 s each, in the long sweep."""


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in SAMPLE])
def test_what_held_still_holds(name: str) -> None:
    expected, result = SAMPLE[name], check(name)
    assert result.built == expected.built, result.reasons
    assert set(result.reasons) <= set(expected.known), result.reasons
    if not expected.built:
        return
    found = result.rules or {}
    assert all(found.get(rule, 0) >= count for rule, count in expected.rules.items()), found
    if found:
        assert result.equal and result.undone and result.shapes >= 3, result
        assert result.fallbacks <= expected.fallbacks, result
    if expected.whole:
        assert (result.traced, result.trace_equal, result.trace_missed) == ("whole", True, []), result


def test_the_sample_is_of_twenty_five() -> None:
    assert len(SAMPLE) == 25


def _spoiled(sch: schedule.Schedule, **settings: Any) -> schedule.Report:
    report = schedule.optimizer.optimize(sch, **settings)
    sch.replace_all(nn.LayerNorm, lambda *_: nn.Identity())
    return report


@pytest.mark.unwritable("a lambda makes modules")
def test_a_wrong_rewrite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "optimize", _spoiled)
    result = check("gpt_neox")
    assert result.equal is False and "replace_all" in result.reasons["WRONG, rewritten"]
    assert wrong({"reasons": result.reasons})
