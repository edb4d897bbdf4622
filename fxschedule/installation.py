"""Check that ``import schedule`` finds the package of this distribution.

PyPI has another package of this name, a scheduler of jobs, and users have files called ``schedule.py``.
"""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

_PACKAGE = Path(__file__).parents[1] / "schedule"
_OURS = "from schedule.api"  # an import that the file of the other package does not have


def problem() -> str | None:
    """Return what ``import schedule`` finds in place of this package, and what to do; None if all is well."""
    spec = _spec()
    if spec is None or spec.origin is None:
        return f"there is no package `schedule` beside {__package__}.\n  fix: {_reinstall(other=False)}"
    found = Path(spec.origin)
    if found.exists() and _OURS in found.read_text(encoding="utf-8", errors="replace"):
        return None
    if found.parent.resolve() == _PACKAGE.resolve():
        return (
            f"{found} belongs to another distribution, {_other()}, which was installed over this one: both have a "
            f"package `schedule`.\n  fix: {_reinstall(other=True)}"
        )
    return (
        f"`import schedule` finds {found} in place of {_PACKAGE}.\n"
        "  fix: rename that file or folder, or take its folder off sys.path (the working directory and PYTHONPATH come "
        "first)"
    )


def _spec() -> ModuleSpec | None:
    """Return what ``import schedule`` would find, by an editable install's own finder too, and import nothing."""
    for finder in sys.meta_path:
        spec = finder.find_spec("schedule", None)
        if spec is not None:
            return spec
    return None


def refuse_other_package() -> None:
    """Raise unless ``import schedule`` finds this package.

    Raises:
        ImportError: it finds another one; the message says which, and what to do.
    """
    if (why := problem()) is not None:
        raise ImportError(why)


def _other() -> str:
    try:
        return f"schedule {metadata.version('schedule')}"
    except metadata.PackageNotFoundError:
        return "perhaps PyPI's `schedule`"


def _reinstall(other: bool) -> str:
    again = f"{sys.executable} -m pip install --force-reinstall --no-deps fxschedule (or `-e .` in its checkout)"
    return f"{sys.executable} -m pip uninstall schedule, then {again}" if other else again
