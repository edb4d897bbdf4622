"""Files that are whole or not there."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fused.whole_files import write_whole
from schedule.util.errors import NotApplicable


def refuse_unwritable(path: Path, what: str) -> None:
    """Find out, before any work, whether ``path`` can be written.

    Raises:
        NotApplicable: it is a folder, or its folder is missing or takes no files.
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
    """Write ``text`` to ``path`` as UTF-8; whatever interrupts that, the file is the old one or the new one.

    Raises:
        NotApplicable: it cannot be written.
    """
    refuse_unwritable(path, "file")
    write_whole(path, text)
