"""Types of the public surface: a user's script passes ``mypy --strict``, and each wrong call is an error."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mypy import api

import schedule
from schedule.primitives import list_primitives

FOLDER = Path(__file__).parent / "typed"
ROOT = Path(__file__).parents[2]


def _checked(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the errors in a script, and its text."""
    monkeypatch.chdir(ROOT)
    path = FOLDER / f"{name}.py"
    printed, failed, _ = api.run(["--hide-error-context", "--no-pretty", str(path.relative_to(ROOT))])
    assert not failed, failed
    return printed, path.read_text(encoding="utf-8")


def test_a_script_with_every_primitive_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, text = _checked("script", monkeypatch)
    assert printed.startswith("Success"), printed
    called = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    builtin = set(list_primitives()) & set(vars(schedule.Schedule))
    assert len(builtin) > 15
    assert builtin <= called, builtin - called


def test_each_wrong_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, text = _checked("wrong", monkeypatch)
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if "# wrong" in line}
    found = {int(line.split(":")[1]) for line in printed.splitlines() if ": error:" in line}
    assert len(wrong) >= 5
    assert found == wrong, printed
