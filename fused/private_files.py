"""Files that no other account can have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any


def is_private(path: Path) -> bool:
    """Check whether a file or folder belongs to this account, and no other account can write to it.

    The group may, if it is the account's own and has no other members. What does not exist is not private. Systems
    without owners of files have nothing to check.
    """
    if not hasattr(os, "getuid"):
        return True
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        return False
    return not found.st_mode & stat.S_IWGRP or _is_own_group(found.st_gid)


def _is_own_group(group: int) -> bool:
    import grp
    import pwd

    try:
        account: Any = pwd.getpwuid(os.getuid())
        members = grp.getgrgid(group).gr_mem
    except KeyError:
        return False
    return group == account.pw_gid and set(members) <= {account.pw_name}
