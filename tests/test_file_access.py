"""Which other users may write or read a file."""

import os
import types

import pytest

from replicax._src.untrusted import file_access
from replicax._src.untrusted.file_access import readers_of, writers_of


def about(mode, uid=None, gid=0):
    return types.SimpleNamespace(st_mode=mode, st_uid=os.geteuid() if uid is None else uid, st_gid=gid)


@pytest.fixture
def groups(monkeypatch):
    """Group 10 has only this user, group 20 also others."""
    monkeypatch.setattr(file_access, "_is_private_group", lambda gid: gid == 10)


@pytest.mark.parametrize(
    ("mode", "gid", "writers", "readers"),
    [
        (0o600, 20, "", ""),
        (0o660, 10, "", ""),
        (0o640, 20, "", "the group 20 may read it (mode 0640)"),
        (0o660, 20, "the group 20 may write it (mode 0660)", "the group 20 may read it (mode 0660)"),
        (0o644, 10, "", "all users may read it (mode 0644)"),
        (0o602, 10, "all users may write it (mode 0602)", ""),
    ],
)
def test_mode_says_who_may_write_and_read(groups, mode, gid, writers, readers):
    assert (writers_of(about(mode, gid=gid)), readers_of(about(mode, gid=gid))) == (writers, readers)


def test_owner_may_write_and_root_is_no_other_user(groups):
    assert writers_of(about(0o600, uid=0)) == ""
    assert (
        writers_of(about(0o600, uid=os.geteuid() + 1)) == f"it belongs to another user ({os.geteuid() + 1})"
    )


def test_group_of_which_this_process_is_no_member_is_not_private():
    mine = {os.getegid(), *os.getgroups()}
    assert not file_access._is_private_group(max(mine) + 1)
