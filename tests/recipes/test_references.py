"""Names in recipes lead to what was made to be named, and nowhere else."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused
import schedule
from fxschedule.cli.output import CommandError
from fxschedule.cli.recipes import read
from schedule.recipes.recipe_values import Made, Reference
from schedule.util.errors import RecipeError
from tests.small import Mlp, bias_gelu

NAMED = {
    "torch.nn:Linear": nn.Linear,
    "torch.nn.functional:gelu": F.gelu,
    "torch:relu": torch.relu,
    "fused:bias_gelu": fused.bias_gelu,
    "tests.small:bias_gelu": bias_gelu,
    "builtins:max": max,
    "operator:add": __import__("operator").add,
}
REFUSED = [
    "fused.backends.kernel_store:os.system",
    "fused.backends.kernel_store:os",
    "torch.nn.functional:torch.os.system",
    "torch:os.system",
    "schedule.recipes.recipe_files:json.loads",
    "fused.backends.kernel_store:hashlib.sha256",
    "fused.backends.kernel_store:Path",
    "torch.nn.modules.module:OrderedDict",
    "schedule.recipes.recipe_values:json.dumps",
    "torch:nn.Identity",
    "os:system",
    "builtins:exec",
    "builtins:eval",
    "builtins:open",
    "builtins:__import__",
    "torch:float32",
    "schedule.recipes.recipe_values:C_MODULES",
    "no.such.module:name",
]


@pytest.mark.parametrize("name", NAMED)
def test_a_name_leads_to_its_function_or_class(name: str) -> None:
    assert Reference(name).live({}) is NAMED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_does_not_lead_through_modules(name: str) -> None:
    with pytest.raises(RecipeError, match=r"is not what a recipe may name|cannot be imported"):
        Reference(name).live({})


@pytest.mark.parametrize("name", ["builtins:list", "fused:bias_gelu", "torch:Tensor", "tests.small:bias_gelu"])
def test_only_modules_are_made(name: str) -> None:
    with pytest.raises(RecipeError, match="is no class of modules"):
        Made(Reference(name), ()).live({})
    assert isinstance(Made(Reference("torch.nn:Identity"), ()).live({}), nn.Identity)


@pytest.mark.parametrize("name", [*REFUSED, "fused.backends.kernel_store:write", "torch:load", "torch.hub:load"])
def test_a_strangers_recipe_runs_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the command line, which refuses the file, nor by a replay, whatever the step is."""
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(f"ran {command}"))
    data = json.loads(schedule.create_schedule(Mlp(16), torch.zeros(2, 16)).recipe().to_json())
    make = {"make": name, "arguments": {"command": f"touch {tmp_path / 'ran'}"}}
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**data, "steps": [{"call": "replace", "at": ["act"], "arguments": {"new": make}}]}))
    recipe = schedule.load_recipe(path)
    assert recipe.references == (name,)
    with pytest.raises(CommandError, match=name):
        read(path, trusted=False)
    with pytest.raises(RecipeError, match=f"would import and call {re.escape(name)}"):
        schedule.replay(Mlp(16), recipe, torch.zeros(2, 16))
    with pytest.raises(RecipeError, match=r"no class of modules|is not what a recipe may name|cannot be imported"):
        schedule.replay(Mlp(16), recipe, torch.zeros(2, 16), trust=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("trust", [True, "tests", "tests.small", ("numpy", "tests.small:bias_gelu")])
def test_what_is_trusted_is_replayed(trust: Any, tmp_path: Path) -> None:
    sch = schedule.create_schedule(Mlp(16), torch.zeros(2, 16))
    sch.fuse(sch.find(bias_gelu, expect=1))
    path = schedule.save_recipe(sch, tmp_path)
    new = schedule.create_schedule(Mlp(16), torch.zeros(2, 16))
    assert schedule.load_recipe(path, new, trust=trust).recipe().references == ("tests.small:bias_gelu",)
    for other in (False, (), "test", "tests.small.bias_gelu", "tests.small:bias"):
        with pytest.raises(RecipeError, match=r"would import and call tests.small:bias_gelu[\s\S]*trust="):
            schedule.load_recipe(path, Mlp(16), trust=other)
    assert schedule.replay(Mlp(16), sch.recipe(), torch.zeros(2, 16)).history  # made here
