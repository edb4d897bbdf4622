"""Atomic writing of files."""

from __future__ import annotations

import tempfile
from pathlib import Path

from schedule.util.errors import NotApplicable


def refuse_unwritable(path: Path, what: str) -> None:
    """Raise if ``path`` cannot be written, before any work is done.

    Raises:
        NotApplicable: ``path`` is a folder, or its parent folder is missing or not writable.
    """
    if path.is_dir():
        raise NotApplicable(f"{path} is a folder", fix="name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise NotApplicable(
            f"the {what} {path} cannot be written: {error.strerror}: {path.parent}",
            fix="create that folder, or name another",
        ) from error


def write(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically.

    After an interruption the file has either its old or its new content.

    Raises:
        NotApplicable: ``path`` cannot be written.
    """
    from fused.whole_files import write_whole  # imports torch

    refuse_unwritable(path, "file")
    write_whole(path, text)
