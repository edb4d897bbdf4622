"""Module paths with wildcards: ``*`` within one component, ``**`` over any number of components."""

from __future__ import annotations

import re

from torch import nn


def is_glob(path: str) -> bool:
    """Check whether ``path`` has wildcards."""
    return any(mark in path for mark in "*?[")


def matcher(glob: str) -> re.Pattern[str]:
    """Return the regular expression of ``glob`` for whole paths, each component followed by a dot."""
    text = "".join(f"{_component(part)}\\." if part != "**" else r"(?:[^.]+\.)*" for part in glob.split("."))
    return re.compile(text)


def _component(part: str) -> str:
    pieces = re.split(r"(\*|\?|\[[^\]]+\])", part)
    return "".join(
        "[^.]*" if p == "*" else "[^.]" if p == "?" else _characters(p) if p.startswith("[") else re.escape(p)
        for p in pieces
    )


def _characters(brackets: str) -> str:
    """Return a set of characters as a regular expression, ``[!ab]`` being all but these."""
    return f"[^.{brackets[2:]}" if brackets[1] == "!" else brackets


def select(root: nn.Module, glob: str) -> list[nn.Module]:
    """Return the modules under ``root`` with a matching path, in order and without duplicates."""
    pattern = matcher(glob)
    found = {
        m: None for path, m in root.named_modules(remove_duplicate=False) if path and pattern.fullmatch(path + ".")
    }
    return list(found)
