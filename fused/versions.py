"""Releases that this package runs on and was tested with."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator

import torch

VERSION = "0.1.0"
"""The release of this package."""

TESTED = {"torch": ("2.11", "2.15"), "transformers": ("5.0", "5.24"), "Python": ("3.11", "3.14")}
"""First and last release of each that the test suite passes on: docs/versions.md."""


def untested_releases() -> list[str]:
    """Return a sentence for each library in use, and for Python, whose release is not among the tested ones."""
    found = []
    for name, version in _in_use():
        last = TESTED[name][1]
        if _numbers(version) > _numbers(last):
            found.append(f"{name} {version} is newer than {last}, the newest tested release")
        elif is_too_old(name, version):
            found.append(f"{name} {version} is older than {oldest(name)}, the oldest supported release")
    return found


def oldest(name: str) -> str:
    """Return the oldest supported release of a library or of Python."""
    return TESTED[name][0]


def is_too_old(name: str, version: str) -> bool:
    """Check whether a release is older than the oldest supported one."""
    return _numbers(version) < _numbers(oldest(name))


def versions_text() -> str:
    """Return the versions of this package, torch, transformers (if loaded) and Python."""
    return ", ".join(f"{name} {version}" for name, version in [*_in_use(), ("fxschedule", VERSION)])


def refuse_old_torch(version: str) -> None:
    """Raise ImportError if ``version`` of torch is older than the oldest supported release.

    It is called when this file is imported.
    """
    if is_too_old("torch", version):
        raise ImportError(
            f"fxschedule needs torch {oldest('torch')} or newer, and this is torch {version} for {sys.executable}.\n"
            f"  fix: {sys.executable} -m pip install --upgrade 'torch>={oldest('torch')}'"
        )


def _in_use() -> Iterator[tuple[str, str]]:
    for name in ("torch", "transformers"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            yield name, version
    yield "Python", platform.python_version()


def _numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it does not begin with two."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


refuse_old_torch(torch.__version__)
