"""Atomic writes of files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, or leave the old file if interrupted.

    Raises:
        OSError: the folder is missing or takes no files.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # the mode of a file that is opened the usual way
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
