"""What holds for every test: offline, seeded, one thread, and nothing in the process is left patched."""

from __future__ import annotations

import os

# Before torch and transformers are imported: both read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# An error of our own code fails the test that meets it, wherever it would be contained.
os.environ["FXSCHEDULE_INTERNAL_ERRORS"] = "raise"
# Which library multiplies faster differs between machines, and what is tested is not to; tests of it set it to 1.
os.environ["FUSED_ONEDNN"] = "0"
# What is printed is as wide as if there were no terminal; pytest-xdist tells its workers the width of its own.
os.environ.pop("COLUMNS", None)

import builtins
import itertools
import math
import operator
import random
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)

# The same examples at every run, so that a change is judged by itself; the long tests draw new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Triton reads this when it is imported: without CUDA its kernels run on CPU tensors, as Python.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Every schedule that a test makes is taken around; imported once the above is set.
pytest_plugins = ["tests.recipes.watching", "pytester"]

# Where a tracer is tempted to patch. A patch left behind changes every other model in the process.
_PATCHABLE: tuple[Any, ...] = (builtins, math, operator, torch, torch.Tensor, functional, nn.Module)

# torch.compile itself wraps these, for good, when it is first used; the latter two of nn.Module.
_BY_TORCH = {"manual_seed", "__init__", "__setstate__"}


# Families of many cases that are much alike: one in so many cases is in every run, all are in the sweep.
_ONE_IN = {
    "tests/adversary": {
        "test_a_change_after_compiling_is_seen": 5,
        "test_a_change_before_a_module_makes_it_run_its_original_forward": 2,
        "test_a_change_behind_the_check_of_the_call_is_seen": 3,
        "test_a_checkpointing_function_that_remembers_sees_the_live_layers_alone": 2,
        "test_a_disturbed_model_is_right_or_says_that_it_is_not": 10,
        "test_a_match_takes_the_case_that_it_takes_in_python": 5,
        "test_a_replaced_forward_of_a_class": 3,
        "test_a_replaced_function": 3,
        "test_a_submodule_is_called_once": 2,
        "test_a_value_of_another_class": 5,
        "test_a_wrong_constant_shows": 3,
        "test_an_answer_about_sizes_is_not_baked_in": 2,
        "test_another_answer_is_noticed": 5,
        "test_biases_that_appear_count_in_the_loss_too": 2,
        "test_compiled_code_notices_too": 3,
        "test_derivatives_of_a_model": 2,
        "test_derivatives_of_every_rule": 5,
        "test_fully_sharded_training_is_that_of_the_original": 2,
        "test_nothing_is_left": 3,
        "test_rows_hidden_whole": 3,
        "test_storages_are_those_of_the_original": 2,
        "test_the_sign_is_guarded": 3,
        "test_training_steps_with_checkpointing_switched_on_afterwards": 2,
        "test_training_steps_with_checkpointing_switched_on_before": 2,
        "test_trains_alike": 6,
        "test_verify_leaves_nothing": 2,
        "test_what_an_argument_holds_is_read_and_changed_as_by_the_original": 4,
        "test_what_an_operator_reads_is_guarded": 3,
        "test_what_was_recorded_with_one_row_holds_where_any_operand_has_more": 6,
        "test_what_was_recorded_with_one_row_is_rewritten_and_runs_with_three": 6,
    },
    "tests/capture": {
        "test_other_kinds": 3,
    },
    "tests/core": {
        "test_rewrites_are_made_again": 3,
        "test_training_under_autocast": 2,
        "test_what_runs_is_what_the_model_is_now": 4,
    },
    "tests/distributed": {
        "test_collectives_are_at_the_minimum": 3,
        "test_halves_of_the_collectives": 3,
        "test_models": 2,
        "test_plans_compute_the_same": 2,
        "test_two_ranks": 2,
    },
    "tests/fused": {
        "test_a_drawn_mask_is_that_of_the_stream": 3,
        "test_backward": 3,
        "test_compiles_without_graph_break_at_any_size": 10,
        "test_empty_and_single": 3,
        "test_every_gate": 3,
        "test_every_part": 2,
        "test_every_width": 4,
        "test_exports": 3,
        "test_fp8_input_store": 2,
        "test_gradients_of_both_orders": 10,
        "test_half_precision_is_no_worse_than_eager": 3,
        "test_inplace_backward_writes_over_the_logits": 2,
        "test_inputs_are_never_changed": 14,
        "test_logits_far_from_zero_lose_no_digits": 3,
        "test_not_a_number_and_infinity_propagate_as_in_eager": 14,
        "test_options": 2,
        "test_results_have_the_strides_of_eager_torch": 14,
        "test_rows_longer_than_a_block": 3,
        "test_strides_do_not_matter": 12,
        "test_sums_over_many_rows": 2,
        "test_sums_over_many_rows_and_columns": 2,
        "test_the_column_of_the_highest_logit_and_token_scaling": 4,
        "test_the_loss_curve_is_that_of_eager": 3,
        "test_windows": 2,
        "test_within_the_tolerances_on_every_backend": 12,
        "test_without_float32_two_bytes_each_are_saved_and_gradients_are_as_in_native_softmax": 4,
    },
    "tests/huggingface": {
        "test_an_adapter_is_never_bypassed": 2,
        "test_cast_after_scheduling": 2,
        "test_exported": 2,
        "test_generate": 3,
        "test_gradient_checkpointing_on_and_off": 2,
        "test_recorders_of_attentions_and_hidden_states": 2,
        "test_save_and_load": 2,
        "test_scheduled_in_the_middle_of_training": 2,
        "test_several_models_in_one_process_do_not_meet": 2,
        "test_threads_in_inference": 2,
    },
    "tests/recipes": {
        "test_it_replays": 4,
        "test_on_a_fresh_model_and_on_a_deeper_one": 3,
    },
    "tests/report": {
        "test_a_module_is_clicked_and_its_graphs_are_seen": 2,
        "test_the_first_screen_tells_the_result": 4,
    },
    "tests/rules": {
        "test_attention_of_transformers_is_merged": 4,
        "test_attention_of_transformers_is_rewritten": 2,
        "test_every_layer_is_rewritten": 2,
        "test_every_linear_of_a_model_is_one_call": 3,
        "test_rule_holds_for_every_form_shape_and_dtype": 8,
        "test_the_losses_of_transformers_are_rewritten": 2,
        "test_verify_catches_and_names_the_step": 3,
    },
    "tests/testing": {
        "test_the_changed_node_is_marked": 3,
    },
    "tests/verify": {
        "test_a_mutation_of_a_real_architecture_is_caught": 3,
        "test_every_mutation_is_caught_and_its_step_named": 3,
    },
    "tests": {
        "test_a_fault_at_any_step_changes_nothing": 9,
        "test_copies_and_pickles": 2,
        "test_every_rule_there_is_at_once": 10,
        "test_generates_the_same_tokens": 4,
        "test_notebook_runs_and_shows_what_the_committed_one_shows": 4,
        "test_rewritten_and_equal": 4,
        "test_root_traces_whole_and_runs_at_other_shapes": 3,
        "test_rules_apply_wherever_the_construct_exists": 2,
        "test_same_outputs_gradients_and_updates_at_other_shapes": 7,
        "test_state_dict_goes_both_ways": 2,
        "test_the_code_of_a_page_runs": 4,
        "test_the_installed_package_runs_from_any_folder": 2,
        "test_torchs_own_modules_are_roots": 2,
        "test_undone_to_the_bit": 2,
        "test_verify_is_the_function_whatever_is_imported_first": 4,
        "test_what_held_still_holds": 5,
        "test_without_gradients": 3,
    },
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--card", default="cuda", help="device of the tests marked cuda; cpu to try what runs without one")


@pytest.hookimpl(tryfirst=True)  # before the slow ones are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each family, mark what is left for the sweep; tests marked `cuda` are collected everywhere, and skipped."""
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    for test, family in itertools.groupby(quick, lambda item: item.nodeid.partition("[")[0]):
        cases = sorted(family, key=lambda item: zlib.crc32(item.name.encode()))
        for item in cases[math.ceil(len(cases) / _one_in(*test.split("::"))) :]:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--card") == "cuda" and not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _one_in(path: str, *names: str) -> int:
    """Return of how many cases of a test one is in every run."""
    counts = [
        tests[names[-1]] for folder, tests in _ONE_IN.items() if path.startswith(f"{folder}/") and names[-1] in tests
    ]
    return counts[0] if counts else 1


@pytest.fixture
def card(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; the CPU with ``--card cpu``, which tries the tests without a card."""
    return torch.device(request.config.getoption("--card"))


@pytest.fixture
def real_card(card: torch.device) -> torch.device:
    """A card, for what the CPU does not have: graphs, streams, its allocator."""
    if card.type != "cuda":
        pytest.skip("needs a CUDA device")
    return card


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)
    random.seed(0)


def _globals() -> list[dict[str, Any]]:
    """What each namespace holds that can be called; lazily imported submodules may come and go."""
    return [{name: value for name, value in vars(owner).items() if callable(value)} for owner in _PATCHABLE]


def _modes() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def _no_global_patches() -> Iterator[None]:
    """Fail a test that leaves a torch, operator, math or builtin function replaced, or a mode switched."""
    before, modes = _globals(), _modes()
    yield
    for owner, old, new in zip(_PATCHABLE, before, _globals(), strict=True):
        changed = [n for n, value in old.items() if new.get(n) is not value and n not in _BY_TORCH]
        assert not changed, f"left patched in {owner.__name__}: {', '.join(changed)}"
    assert _modes() == modes, "left switched"
