"""Tiny configs keep the relations between their fields."""

from __future__ import annotations

import pytest
import transformers as hf

from fxschedule.cli.tiny.small_configs import HEADS, LAYERS, VOCABULARY, WIDTH, shrink
from schedule.report.entries import Entry
from schedule.util.errors import VerificationError
from tests.needs import needs_architectures, needs_default_qwen2_vl
from tests.sweep.coverage import COVERAGE, counted, summary
from tests.sweep.models import NotBuilt, architectures, model_class
from tests.sweep.one import Result, _counts_of, _reasons


def test_sizes() -> None:
    small = shrink(hf.LlamaConfig().to_dict())
    assert (small["hidden_size"], small["num_attention_heads"], small["num_hidden_layers"]) == (WIDTH, HEADS, LAYERS)
    assert small["vocab_size"] == VOCABULARY and small["num_key_value_heads"] == HEADS
    assert shrink(hf.MistralConfig().to_dict())["num_key_value_heads"] == HEADS // 2
    assert shrink(hf.LlamaConfig(hidden_size=32).to_dict())["hidden_size"] == 32, "nothing grows"


def test_categories_that_are_kept() -> None:
    small = shrink(hf.LlamaConfig().to_dict(), frozenset({"dims"}))
    assert small["hidden_size"] == 4096 and small["num_hidden_layers"] == LAYERS


def test_every_kind_of_layer_stays() -> None:
    small = shrink(hf.Gemma3TextConfig().to_dict())
    assert sorted(small["layer_types"]) == ["full_attention", "sliding_attention"]
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 2


def test_a_token_is_one_token_in_all_configs() -> None:
    config = hf.LlavaConfig()
    config.text_config.eos_token_id = config.image_token_index
    small = shrink(config.to_dict())
    assert small["image_token_index"] == small["text_config"]["eos_token_id"] < VOCABULARY


def test_the_width_of_the_first_stage() -> None:
    small = shrink({"hidden_size": 96, "embed_dim_per_stage": [96, 192, 384]})
    assert small == {"hidden_size": 32, "embed_dim_per_stage": [32, 64, 128]}


def test_codes_are_in_the_vocabulary() -> None:
    assert shrink({"decoder_fixing_codes": [83, 248]})["decoder_fixing_codes"] == [83, 120]


def test_stages_keep_their_ratios() -> None:
    small = shrink(hf.ConvNextConfig().to_dict())
    assert [size / small["hidden_sizes"][0] for size in small["hidden_sizes"]] == [1, 2, 4, 8]
    assert len(small["depths"]) == 4


@needs_default_qwen2_vl
def test_sections_of_positions_fill_half_a_head() -> None:
    small = shrink(hf.Qwen2VLConfig().to_dict())["text_config"]
    assert sum(small["rope_parameters"]["mrope_section"]) == WIDTH // HEADS // 2


def test_architectures() -> None:
    names = architectures()
    assert len(names) > 300 and {"bert", "gpt2", "llava", "mamba"} <= set(names) and names == sorted(names)
    assert model_class("bert") is hf.BertForMaskedLM and model_class("whisper") is hf.WhisperForConditionalGeneration


@needs_architectures("sam3_geometry_encoder")
def test_a_part_has_no_model_of_its_own() -> None:
    with pytest.raises(NotBuilt, match="no model of its own"):
        model_class("sam3_geometry_encoder")


def test_the_page(tmp_path) -> None:  # type: ignore[no-untyped-def]
    fine = vars(
        Result(
            "bert",
            "BertModel",
            built=True,
            rules={"bias_gelu": 2},
            equal=True,
            traced="whole",
            every_rule={"bias_gelu": 2},
            every_equal=True,
        )
    )
    bad = vars(
        Result(
            "gpt2",
            built=True,
            rules={"bias_gelu": 2},
            untraced={"layer_norm: why": 1},
            equal=False,
            reasons={"WRONG, rewritten": "a | b"},
        )
    )
    none = vars(Result("x", reasons={"not shrunk": "/usr/lib/site-packages/torch/a.py: no"}))
    results = {result["name"]: result for result in (none, bad, fine)}
    line = COVERAGE.write(results, 4, 2, tmp_path / "page.md", tmp_path / "data.json")
    assert line == f"{summary(counted(results))} 1 have no result yet. 2 of the results are of earlier code."
    assert line.startswith(
        "3 config classes, 2 built: 1 traced whole (50.0 %), 1 of them right at other shapes (50.0 %) and 1 at every "
        "shape that was tried, in both modes (50.0 %), 0 of these with further graphs for other numbers of rows or "
        "lengths; every attention, MLP, norm and other innermost module that a rule is about traced in 1 (50.0 %), "
        "those around them too in 1 (50.0 %); 2 rewritten, of those "
        "with a construct 1 everywhere (50.0 %); 1 checked and equal, 1 of 1 rewritten by all rules are equal, 1 wrong"
    )
    lines = (tmp_path / "page.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| architecture")]
    assert [row.split(" | ")[0] for row in rows] == ["| bert", "| gpt2", "| x"]
    assert "a \\| b" in rows[1] and "/usr" not in rows[2] and "| yes / – |" in rows[0] and "| NO / – |" in rows[1]


def test_how_a_trace_is_bound_is_counted() -> None:
    def traced(name: str, *kinds: str) -> dict[str, object]:
        return vars(Result(name, built=True, traced="whole", trace_equal=True, reasons=dict.fromkeys(kinds, "why")))

    several = (
        traced("free") | {"trace_further": 2},
        traced("images", "traced for one number of rows"),
        traced("layer_drop", "traced for eval only"),
        traced("tokens", "traced for one shape"),
        traced("nan", "original not finite"),
    )
    assert summary(counted({str(result["name"]): result for result in several})).startswith(
        "5 config classes, 4 built: 4 traced whole (100.0 %), 3 of them right at other shapes (75.0 %) and 1 at every "
        "shape that was tried, in both modes (25.0 %), 1 of these with further graphs for other numbers of rows"
    )


def test_modules_around_others_count_apart() -> None:
    entries = [
        Entry("layer_norm", "encoder", "skipped", reason="why"),
        Entry("layer_norm", "encoder.layers.0.norm", "applied"),
        Entry("bias_gelu", "head", "skipped", reason="why"),
        Entry("bias_gelu", "headless", "near miss", reason="why"),
    ]
    result = Result("several")
    found = [_counts_of(entry, entries, result, entry.status == "skipped") for entry in entries]
    assert found[1] is None
    assert found[0] is result.untraced_around and found[2] is result.untraced and found[3] is result.left
    assert _counts_of(entries[2], entries, result) is result.left, "traced, but a rule cannot rewrite it"


@pytest.mark.parametrize(
    ("why", "kind", "equal"),
    [
        (
            "call: raises RuntimeError, the original does not: can't allocate memory: you tried 8 bytes",
            "too large",
            None,
        ),
        ("the original model is not finite on this batch", "original not finite", None),
        ("optimize(bias_relu) changed what the model computes", "WRONG, rewritten", False),
    ],
)
def test_what_cannot_be_compared_is_not_wrong(why: str, kind: str, equal: bool | None) -> None:
    result = Result("a")
    with _reasons(result, "rewritten"):
        raise VerificationError(why)
    assert list(result.reasons) == [kind] and result.equal is equal
