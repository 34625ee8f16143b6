"""The file of a replay log: what is written is read, also after a process was killed in the middle of a record."""

import pytest

from replicax._ps.local_updates.replay_file import (
    GroupCall,
    ReplayKind,
    ReplayRecord,
    ReplayWriter,
    instance_number,
    read_replay_file,
)
from replicax.errors import MessageError


def test_records_of_two_processes_are_read_though_the_first_was_killed_in_one(tmp_path):
    path = tmp_path / "group-0" / "replay.log"
    one = ReplayWriter(path, {"owner": 5})
    one.step = 30
    one.taken(1, 7, 240)
    one.created(1, "a", 98)
    one.landed(1, 7, 4, "a", 97)
    one.closed(1, "a", [4, 1, 240, 0, 2**29])
    one.called(31, GroupCall.STEP)
    one.called(31, GroupCall.FINISH)
    one.adopted(1, 4, "a", 99, keeps=(8,), returns=(6,), drops=True)
    one.close()
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes([ReplayKind.TAKEN, 1]))
    ReplayWriter(path, {"owner": 6}).close()
    first, second = read_replay_file(path)
    assert (first.header, second.header, second.records) == ({"owner": 5}, {"owner": 6}, [])
    a = instance_number("a")
    assert first.records == [
        ReplayRecord(ReplayKind.TAKEN, 1, step=30, number=7, tokens=240),
        ReplayRecord(ReplayKind.CREATED, 1, instance=a, checksum=98),
        ReplayRecord(ReplayKind.LANDED, 1, number=7, version=4, instance=a, checksum=97),
        ReplayRecord(
            ReplayKind.CLOSED, 1, version=4, instance=a, is_special=1, members=0b101, tokens=240 + 2**29
        ),
        ReplayRecord(ReplayKind.CALLED, step=31, is_special=GroupCall.FINISH),
        ReplayRecord(ReplayKind.KEPT, 1, number=8),
        ReplayRecord(ReplayKind.GIVEN, 1, number=6),
        ReplayRecord(ReplayKind.ADOPTED, 1, step=31, version=4, instance=a, is_special=1, checksum=99),
    ]
    assert size < 180


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "replay.log"
    path.write_bytes(b"something else")
    with pytest.raises(MessageError, match="no replay log"):
        read_replay_file(path)
    ReplayWriter(path.with_suffix(".new"), {}).close()
    damaged = path.with_suffix(".new").read_bytes() + bytes([99])
    path.write_bytes(damaged)
    with pytest.raises(MessageError, match="no kind of record"):
        read_replay_file(path)
