"""Names the other users who may write or read a file that this process must trust. Root does not count."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

_WRITE_GROUP, _WRITE_ALL = stat.S_IWGRP, stat.S_IWOTH
_READ_GROUP, _READ_ALL = stat.S_IRGRP, stat.S_IROTH


def writers_of(about: os.stat_result) -> str:
    """Returns which other users may write a file or folder: "all users may write it (mode 0777)"; "" for none."""
    if os.name != "posix":
        return ""
    if not is_own(about):
        return f"it belongs to another user ({about.st_uid})"
    return _allowed_by_mode(about, _WRITE_GROUP, _WRITE_ALL, "write")


def readers_of(about: os.stat_result) -> str:
    """Returns which other users may read a file; "" for none."""
    return _allowed_by_mode(about, _READ_GROUP, _READ_ALL, "read") if os.name == "posix" else ""


def writers_above(path: str | os.PathLike[str]) -> str:
    """Returns a folder above ``path`` in which all users may replace what is below; "" if there is none."""
    for folder in Path(path).resolve().parents if os.name == "posix" else ():
        about = folder.stat()
        if about.st_mode & _WRITE_ALL and not about.st_mode & stat.S_ISVTX:
            return f"all users may write {str(folder)!r} (mode {_mode(about)})"
    return ""


def is_own(about: os.stat_result) -> bool:
    """Returns True if a file belongs to this process's user or to root."""
    return os.name != "posix" or about.st_uid in (0, os.geteuid())


def _allowed_by_mode(about: os.stat_result, group: int, everybody: int, what: str) -> str:
    if about.st_mode & everybody:
        return f"all users may {what} it (mode {_mode(about)})"
    if about.st_mode & group and not _is_private_group(about.st_gid):
        return f"the group {about.st_gid} may {what} it (mode {_mode(about)})"
    return ""


def _mode(about: os.stat_result) -> str:
    return f"{stat.S_IMODE(about.st_mode):04o}"


@functools.cache
def _is_private_group(gid: int) -> bool:
    """Returns True if this process is in the group, and no other user of this machine is known to be: a group of one
    user, or the ``fsGroup`` of a pod.
    """
    import grp
    import pwd

    if gid not in {os.getegid(), *os.getgroups()}:
        return False
    uid = os.geteuid()
    users = pwd.getpwall()
    mine = {user.pw_name for user in users if user.pw_uid in (0, uid)}
    if any(user.pw_gid == gid and user.pw_name not in mine for user in users):
        return False
    try:
        return mine.issuperset(grp.getgrgid(gid).gr_mem)
    except KeyError:
        return True
