"""Errors of usage come before torch, which takes seconds, is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fxschedule.cli.rule_names import FAMILIES, SETS
from schedule.rules import list_rules
from schedule.rules.rule import SETS as SETS_OF_RULES

WRONG = {
    "no model": (["optimize"], 2),
    "no such command": (["optimise", "gpt2"], 2),
    "no such option": (["verify", "gpt2", "--nonsense"], 2),
    "no number": (["bench", "gpt2", "--batch-size", "many"], 2),
    "no such rule": (["explain", "gpt2", ".", "--rule", "bias_gelu_tahn"], 2),
    "several rules, one wrong": (["optimize", "gpt2", "--rules", "memory,nonsense"], 2),
    "a report of another kind": (["optimize", "gpt2", "--report", "out.txt"], 2),
    "a profile in no folder": (["profile", "gpt2", "--out", "none/out.json"], 2),
    "no such file": (["optimize", "none.py:make"], 3),
    "a file without a function": (["optimize", "made.py"], 3),
    "help": (["optimize", "--help"], 0),
    "version": (["--version"], 0),
}


@pytest.mark.parametrize("what", WRONG)
def test_torch_is_not_imported(what: str, tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("import torch\ndef make(): ...\n")
    arguments, code = WRONG[what]
    run = f"""
import sys
sys.argv = ["fxschedule", *{arguments!r}]
from fxschedule.__main__ import main
try:
    main()
except SystemExit as stopped:
    print(stopped.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] == f"{code} False", done.stdout + done.stderr


def test_a_file_lists_its_functions(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("def make(): ...\ndef _hidden(): ...\ndef other(): ...\n")
    command = [sys.executable, "-m", "fxschedule", "optimize", "made.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "made.py:make or made.py:other" in done.stderr and "_hidden" not in done.stderr


def test_the_names_of_rules_are_those_of_the_rules() -> None:
    families: dict[str, tuple[str, ...]] = {}
    for rule in list_rules():
        families[rule.family] = (*families.get(rule.family, ()), rule.name)
    assert families == FAMILIES
    assert ("all", *SETS_OF_RULES) == SETS
