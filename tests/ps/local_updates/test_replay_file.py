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
from replicax._ps.local_updates.round_state import REFUSED, MemberState
from replicax.errors import MessageError


def test_records_of_two_processes_are_read_though_the_first_was_killed_in_one(tmp_path):
    path = tmp_path / "group-0" / "replay.log"
    one = ReplayWriter(path, {"owner": 5})
    one.step = 30
    one.created(1, 98)
    one.claimed(1, "a", 6, 2**31 - 1, MemberState(owner=4, pushed=300, landed=2))
    one.taken(1, 7, 240)
    one.landed(1, 7, 4, 97)
    one.closed(1, [4, 1, 240, 0, 2**29])
    one.called(31, GroupCall.STEP)
    one.called(31, GroupCall.FINISH)
    one.claimed(1, "b", 0, 3, MemberState(owner=4, pushed=300, landed=REFUSED))
    one.adopted(1, 4, 99, keeps=(8,), returns=(6,), drops=True)
    one.close()
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes([ReplayKind.TAKEN, 1, 200]))
    ReplayWriter(path, {"owner": 6}).close()
    first, second = read_replay_file(path)
    assert (first.header, second.header, second.records) == ({"owner": 5}, {"owner": 6}, [])
    a, b = map(instance_number, "ab")
    assert first.records == [
        ReplayRecord(ReplayKind.CREATED, 1, checksum=98),
        ReplayRecord(
            ReplayKind.CLAIMED,
            1,
            instance=a,
            number=6,
            birth=2**31 - 1,
            before=4,
            before_number=300,
            before_version=3,
        ),
        ReplayRecord(ReplayKind.TAKEN, 1, step=30, number=7, tokens=240),
        ReplayRecord(ReplayKind.LANDED, 1, number=7, version=4, instance=a, checksum=97),
        ReplayRecord(ReplayKind.CLOSED, 1, version=4, instance=a, is_special=1, rows=(240, 0, 2**29)),
        ReplayRecord(ReplayKind.CALLED, step=31, is_special=GroupCall.FINISH),
        ReplayRecord(ReplayKind.CLAIMED, 1, instance=b, birth=3, before=4, before_number=300),
        ReplayRecord(ReplayKind.KEPT, 1, number=8),
        ReplayRecord(ReplayKind.GIVEN, 1, number=6),
        ReplayRecord(ReplayKind.ADOPTED, 1, step=31, version=4, instance=b, is_special=1, checksum=99),
    ]
    assert size < 120


def test_push_costs_at_most_20_bytes_after_many_steps(tmp_path):
    path = tmp_path / "replay.log"
    writer = ReplayWriter(path, {})
    before = path.stat().st_size
    writer.step = 2**20
    writer.taken(4, 2**14 - 1, 2**14 - 1)
    writer.landed(4, 2**14 - 1, 2**14 - 1, 2**32 - 1)
    writer.close()
    assert path.stat().st_size - before <= 20


@pytest.mark.parametrize("number", [0, 127, 128, 2**14 - 1, 2**14, 2**32, 2**63])
def test_numbers_of_any_size_are_read_as_written(tmp_path, number):
    path = tmp_path / "replay.log"
    writer = ReplayWriter(path, {})
    writer.taken(0, number, 5)
    writer.taken(0, 5, number)
    writer.close()
    (part,) = read_replay_file(path)
    assert [(each.number, each.tokens) for each in part.records] == [(number, 5), (5, number)]


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
