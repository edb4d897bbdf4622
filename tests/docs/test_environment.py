"""docs/environment.md names every environment variable that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ = re.compile(r'os\.environ(?:\.get\(|\.setdefault\(|\[)\s*("?\w+"?)|("\w+") (?:not )?in os\.environ')
ASSIGNED = re.compile(r'^(\w+) = ("\w+")$', re.MULTILINE)
NOT_FOR_USERS = {"KINETO_LOG_LEVEL", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}


def _read(text: str) -> set[str]:
    """The variables that a file reads, by name or by a constant of the same file."""
    constants = dict(ASSIGNED.findall(text))
    return {constants.get(found, found).strip('"') for names in READ.findall(text) for found in names if found}


def test_every_variable_is_on_the_page() -> None:
    files = [path for package in ("fused", "schedule", "fxschedule") for path in (ROOT / package).rglob("*.py")]
    names = set[str]().union(*(_read(path.read_text()) for path in files)) - NOT_FOR_USERS
    assert {"FUSED_BACKEND", "FUSED_ONEDNN", "SCHEDULE_AGREEMENT_SECONDS", "COLUMNS"} <= names
    page = (ROOT / "docs" / "environment.md").read_text()
    assert [name for name in names if not name.startswith("TORCHINDUCTOR_") and f"`{name}`" not in page] == []
