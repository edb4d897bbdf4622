"""The names that users of Megatron-LM, Slapo and Liger look for import from `fused`, with their documentation."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from typing import Any

import pytest
import torch

import fused
import schedule

OPS = [
    "recomputed_input",
    "BiasGeLUFunction",
    "GeLUFunction",
    "bias_gelu_impl",
    "bias_gelu",
    "new_gelu",
    "gelu",
    "mish",
    "masked_softmax",
    "causal_softmax",
    "bias_new_gelu",
    "bias_activation",
    "weighted_squared_relu",
    "token_log_probs",
    "sequence_log_probs",
    "distillation_loss",
    "linear_distillation_loss",
    "dpo_loss",
    "simpo_loss",
    "orpo_loss",
    "kto_loss",
    "grpo_loss",
    "swiglu",
    "geglu",
    "reglu",
    "quick_geglu",
    "bias_swiglu",
    "bias_geglu",
    "bias_reglu",
    "bias_quick_geglu",
    "weighted_swiglu",
    "weighted_geglu",
    "weighted_reglu",
    "weighted_quick_geglu",
    "gated_activation",
    "bias_dropout",
    "bias_dropout_add",
    "get_bias_dropout_add",
    "ScaledSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "scaled_masked_softmax",
    "FusedScaleMaskSoftmax",
    "rms_norm",
    "layer_norm",
    "group_norm",
    "batch_norm",
    "conv_batch_norm",
    "linear_batch_norm",
    "adaptive_layer_norm",
    "gated_residual",
    "star_relu",
    "add_rms_norm",
    "add_layer_norm",
    "rotary_embedding",
    "cross_entropy",
    "cross_entropy_with_metrics",
    "CrossEntropyOutput",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
    "vocab_parallel_cross_entropy",
    "MakeViewlessTensor",
    "make_viewless_tensor",
    "assert_viewless_tensor",
    "safely_set_viewless_tensor_data",
    "deallocate_output",
    "backward_from_deallocated",
    "MLP",
    "MLPSubmodules",
    "apply_swiglu_sharded_factory",
]
PROTOCOLS = [
    "LinearFc1Builder",
    "LinearFc1Interface",
    "LinearFc2Builder",
    "LinearFc2Interface",
    "TEActivationFunctionBuilder",
]
MODULES = ["RMSNorm", "LayerNorm", "SwiGLU", "GEGLU", "CrossEntropyLoss", "LinearCrossEntropyLoss"]
FOR_NEW_OPS = ["Op", "Recomputation", "compute_dtype", "requested", "saved_tensors", "transformed"]
SWITCHES = ["backend", "backends"]


@pytest.mark.parametrize("name", [*OPS, *PROTOCOLS, *MODULES, *FOR_NEW_OPS, *SWITCHES])
def test_a_public_name_has_a_docstring(name: str) -> None:
    assert name in fused.__all__
    assert len(inspect.getdoc(getattr(fused, name)) or "") > 40


@pytest.mark.parametrize("name", [*OPS, *MODULES])
def test_an_op_tells_its_shapes_dtypes_errors_and_source(name: str) -> None:
    value = getattr(fused, name)
    text, around = inspect.getdoc(value) or "", sys.modules[value.__module__].__doc__ or ""
    parts = {
        "shapes": "[" in text or "any shape" in text,
        "errors": "Raises" in text,
        "source": "Source" in text or "Source" in around,
    }
    elsewhere = any(f"`{other}`" in text for other in OPS if other != name)
    assert all(parts.values()) or elsewhere, f"neither {parts} nor the name of the op that tells them"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_are_protocols(name: str) -> None:
    assert typing.Protocol in getattr(fused, name).__mro__


def test_megatrons_functions_are_applied() -> None:
    for name in OPS:
        value = getattr(fused, name)
        if name.endswith("Function") or name in ("ScaledSoftmax", "ScaledMaskedSoftmax", "MakeViewlessTensor"):
            assert isinstance(value, type) and callable(value.apply)
        assert value.__module__.split(".")[0] == "fused"


def test_nothing_is_public_by_accident() -> None:
    assert sorted(fused.__all__) == sorted(set(fused.__all__))
    for name in fused.__all__:
        assert getattr(fused, name) is not None


@pytest.mark.parametrize("owner", ["schedule", "group", "module"])
def test_a_name_that_is_nearly_right_is_suggested(owner: str) -> None:
    sch = schedule.create_schedule(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.randn(1, 2))
    of: Any = {"schedule": sch, "group": sch["*"], "module": schedule}[owner]
    wrong, right = ("optimise", "optimize") if owner == "module" else ("fues", "fuse")
    with pytest.raises(AttributeError, match=rf"{wrong}'; did you mean '{right}'\?"):
        getattr(of, wrong)


def test_dir_shows_the_public_names_alone() -> None:
    assert dir(schedule) == sorted(schedule.__all__) and dir(fused) == sorted(fused.__all__)


def test_an_import_loads_little_more_than_torch() -> None:
    code = """
import sys
import torch
before = set(sys.modules)
import fused
import schedule
new = sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in ("fused", "schedule", "rich"))
assert "schedule.api" not in sys.modules
assert not {"sympy", "networkx", "torch.distributed.tensor", "torch._dynamo", "transformers"} & set(new), new
assert schedule.optimize.__module__ == "schedule.api.optimize"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_of_the_package_do_not_load_the_public_names() -> None:
    code = """
import sys
from schedule import rules, patterns
import schedule.core.matching, schedule.report.report, schedule.verify, schedule.recipes.replaying, schedule.tuning
assert "schedule.api" not in sys.modules
import schedule
assert schedule.recipes is sys.modules["schedule.recipes"]
assert "schedule.api" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "first",
    ["import schedule.verify", "from schedule.verify import observe", "from schedule import *", "import schedule"],
)
def test_verify_is_the_function_whatever_is_imported_first(first: str) -> None:
    code = f"{first}\nimport schedule, types\nassert isinstance(schedule.verify, types.FunctionType)\nschedule.rules"
    subprocess.run([sys.executable, "-c", code], check=True)
