"""Versions of dicts, kept by the interpreter or by torch: another one whenever an entry has changed."""

from __future__ import annotations

from torch._C._dynamo.guards import dict_version

__all__ = ["HAS_DICT_VERSIONS", "dict_version"]


def _versions_work() -> bool:
    """Check whether each kind of change of a dict gives it a version it never had."""
    entries: dict[str, object] = {"kept": 1, "removed": 2}
    try:
        seen = [dict_version(entries)]
        for change in (
            lambda: entries.update(kept=2),
            lambda: entries.update(added=3),
            lambda: entries.pop("removed"),
            lambda: entries.__setitem__("kept", 1),
            entries.clear,
        ):
            change()
            seen.append(dict_version(entries))
    except (RuntimeError, TypeError):
        return False
    return len(set(seen)) == len(seen)


HAS_DICT_VERSIONS = _versions_work()
"""Whether :func:`dict_version` tells of every change in this interpreter."""
