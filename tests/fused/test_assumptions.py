"""The table of assumptions: each holds here, and a failing one turns off its own feature alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fused import assumptions
from fused.assumptions import TABLE, failing, holds

ROOT = Path(__file__).parents[2]
LACKING = {"versions of dicts"} if sys.version_info[:3] == (3, 13, 0) else set()
"""What a supported release lacks: CPython 3.13.0 does not tell dicts of new values of attributes."""

SCRIPT = """
import copy, json, warnings
warnings.simplefilter("error", ImportWarning)
import torch, transformers as hf
import schedule
from fused.assumptions import failing

config = hf.GPT2Config(vocab_size=64, n_layer=2, n_embd=32, n_head=4, n_positions=64, attn_implementation="eager")
model = hf.GPT2LMHeadModel(config)
ids = torch.randint(64, (2, 12))
batch = {"input_ids": ids, "labels": ids}
report = schedule.optimize(model, batch, rules="all", cost_guard=False)
equal = report.verify(steps=1).equal
while report.schedule.history:
    report.schedule.undo()
print(json.dumps({
    "off": [each.name for each in failing()], "applied": report.applied, "equal": equal,
    "internal": report.internal_errors,
}))
"""


def test_every_assumption_holds_here() -> None:
    assert {each.name for each in failing()} == LACKING
    assert len({each.name for each in TABLE}) == len(TABLE)


def test_the_self_tests_take_little_time() -> None:
    code = "import time, torch, fused.assumptions as a; t = time.time(); list(a.failing()); print(time.time() - t)"
    seconds = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout) for _ in "ab"]
    assert min(seconds) < 30  # with transformers and the compiler imported


@pytest.fixture(scope="module")
def with_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run("")


@pytest.mark.parametrize("name", [each.name for each in TABLE])
def test_without_one_only_its_feature_is_off(name: str, with_all: dict[str, Any]) -> None:
    found = _run(name)
    assert found.pop("off") == [each.name for each in TABLE if each.name in {name, *with_all["off"]}]
    assert found == {key: value for key, value in with_all.items() if key != "off"}


def _run(without: str) -> dict[str, Any]:
    environment = {**os.environ, "FXSCHEDULE_WITHOUT": without, "FUSED_BACKEND": "reference"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert found["equal"] and not found["internal"] and found["applied"]
    return found


def test_a_private_name_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = assumptions.Assumption("gone", ("torch._C._no_such_name", "torch.no_such_module.name"), "nothing is off")
    monkeypatch.setitem(assumptions._BY_NAME, "gone", gone)
    assert not holds("gone") and assumptions.private("gone", "torch._C._no_such_name", 1) == 1
    with pytest.raises(NotImplementedError, match=r"gone cannot be used with torch .*: nothing is off"):
        assumptions.unavailable("gone")()
    assumptions.holds.cache_clear()


def test_a_name_that_no_feature_has_is_told() -> None:
    environment = {**os.environ, assumptions.ENVIRONMENT_VARIABLE: "version of dicts"}
    ran = subprocess.run(
        [sys.executable, "-c", "import fused.assumptions"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert "FXSCHEDULE_WITHOUT: no feature is called 'version of dicts'" in ran.stderr
