"""The page of errors: what the tests compare the messages with."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "util" / "errors"


def error_reference() -> str:
    """Every message that a golden file holds, under the file's name."""
    parts: list[str] = []
    for file in sorted(GOLDEN.glob("*.txt")):
        title = file.stem.replace("_", " ").capitalize()
        parts += [f"## {title}\n", "```text", file.read_text(encoding="utf-8").rstrip(), "```\n"]
    return "\n".join(parts)
