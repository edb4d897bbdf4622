"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

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
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # what a file gets that is opened the usual way
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
