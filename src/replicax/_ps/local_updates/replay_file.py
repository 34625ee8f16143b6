"""The replay log of a group: what a run of groups needs to be repeated bit for bit. Pure, except for the file.

A group appends to one file. Each process of it begins with a *header*: the line ``RXLU replay 4``, the length of a JSON
text in 4 bytes, and the text. Then come records in the order of their events: a byte that says the kind, and numbers of
7 bits in a byte, the lowest first, whose last byte is below 128. Checksums have 4 bytes. A killed process may leave a
part of a record, which ends its part of the file.

==========  ======================================================================================================
kind        fields
==========  ======================================================================================================
``TAKEN``   fragment, step, number of the push, its tokens: ``base - w`` became a push, and base is w
``LANDED``  fragment, number of the push, version that has it, CRC-32 of the push
``KEPT``    fragment, number: the next adoption keeps this push, which a later version has
``GIVEN``   fragment, number: the next adoption counts this push as not pushed, because the server lost it
``ADOPTED`` fragment, step, version, 1 if unpushed work was dropped, CRC-32 of the outer parameters
``CLOSED``  fragment, version, 1 if the round was a flush, number of members, rows of each
``CALLED``  step, 1 for ``wait`` and 2 for ``finish``: the next records are those of this call
``CREATED`` fragment, CRC-32: the process has created the outer parameters from its own
``CLAIMED`` fragment, instance of the server's store, last push of the process that it has, birth of the fragment: the
            process has its slot there, and the next records of the fragment are of this instance. Then what the
            slot had before: the owner, its last push, the version that has this push
==========  ======================================================================================================

``step`` is the number of steps that the process had counted. ``CLOSED`` of each round is in the log of every group
that fetched it or a later one. A push of a process that was killed before its answer came has no ``LANDED``: the next
process of its group says in ``CLAIMED`` if the server had it, or else it is in the round whose rows of its group no
other pushes have. A server that was restarted has another instance, and the pushes up to those of ``CLAIMED``.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, final

import numpy as np

from replicax._ps.local_updates.round_state import MemberState
from replicax._src.program_kit.errors import MessageError
from replicax._src.program_kit.texts import read_json

_MAGIC: Final = b"RXLU replay 4\n"
_LENGTH: Final = struct.Struct("<I")
_CHECKSUM: Final = struct.Struct("<I")


class ReplayKind(IntEnum):
    """The first byte of a record."""

    TAKEN = 1
    LANDED = 2
    KEPT = 3
    GIVEN = 4
    ADOPTED = 5
    CLOSED = 6
    CALLED = 7
    CREATED = 8
    CLAIMED = 9


class GroupCall(IntEnum):
    """The method of ``LocalUpdates`` in which a group exchanges."""

    STEP = 0
    WAIT = 1
    FINISH = 2


class ReplayRecord(NamedTuple):
    """An event. Fields that a kind does not have are 0.

    Attributes:
      fragment: The number of the fragment.
      step: The steps that the process had counted.
      number: The number of a push of this process.
      version: The version of the outer parameters.
      instance: A number for the instance of the server's store: that of the last ``CLAIMED`` of the fragment.
      tokens: The rows of a push.
      is_special: True for an adoption that dropped work, and for a round that was a flush. In ``CALLED`` the method.
      rows: The rows of a round by member.
      checksum: The CRC-32 of outer parameters, or of a push.
      birth: The birth of the fragment in ``CLAIMED``: see ``RoundState``.
      before: The owner of the slot before, in ``CLAIMED``; 0 if there was none, or it is this process.
      before_number: The number of its last push.
      before_version: The version that has this push; 0 if none has it.
    """

    kind: ReplayKind
    fragment: int = 0
    step: int = 0
    number: int = 0
    version: int = 0
    instance: int = 0
    tokens: int = 0
    is_special: int = 0
    rows: tuple[int, ...] = ()
    checksum: int = 0
    birth: int = 0
    before: int = 0
    before_number: int = 0
    before_version: int = 0


_FIELDS: Final[Mapping[ReplayKind, tuple[str, ...]]] = {
    ReplayKind.TAKEN: ("fragment", "step", "number", "tokens"),
    ReplayKind.LANDED: ("fragment", "number", "version", "checksum"),
    ReplayKind.KEPT: ("fragment", "number"),
    ReplayKind.GIVEN: ("fragment", "number"),
    ReplayKind.ADOPTED: ("fragment", "step", "version", "is_special", "checksum"),
    ReplayKind.CLOSED: ("fragment", "version", "is_special", "rows"),
    ReplayKind.CALLED: ("step", "is_special"),
    ReplayKind.CREATED: ("fragment", "checksum"),
    ReplayKind.CLAIMED: (
        "fragment",
        "instance",
        "number",
        "birth",
        "before",
        "before_number",
        "before_version",
    ),
}
_OF_INSTANCE: Final = (ReplayKind.LANDED, ReplayKind.ADOPTED, ReplayKind.CLOSED)


@final
@dataclass(frozen=True)
class ReplayOfProcess:
    """What one process of a group has logged.

    Attributes:
      header: What ``ReplayWriter`` got.
      records: The events, in order.
    """

    header: Mapping[str, Any]
    records: Sequence[ReplayRecord]


@final
class ReplayWriter:
    """Appends to the log of a group. Each record is one write, so that a killed process leaves all but the last.

    Args:
      path: The file, which is made if it is absent.
      header: What the reader must know of the process, as JSON can hold it.

    Attributes:
      step: The steps that the process has counted, for the next records.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]):
        self.step = 0
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - `close` closes it
        text = json.dumps(header).encode()
        self._file.write(_MAGIC + _LENGTH.pack(len(text)) + text)

    def called(self, step: int, call: GroupCall) -> None:
        """Notes that the group exchanges now, after so many steps."""
        self.step = step
        if call is not GroupCall.STEP:
            self._write(ReplayKind.CALLED, step, call)

    def claimed(self, fragment: int, instance: str, number: int, birth: int, before: MemberState) -> None:
        """Notes that the process has its slot; ``before`` is what it was when the process took it."""
        has = before.owner, before.pushed, before.landed + 1
        self._write(ReplayKind.CLAIMED, fragment, instance_number(instance), number, birth, *has)

    def created(self, fragment: int, checksum: int) -> None:
        self._write(ReplayKind.CREATED, fragment, checksum)

    def taken(self, fragment: int, number: int, tokens: int) -> None:
        self._write(ReplayKind.TAKEN, fragment, self.step, number, tokens)

    def landed(self, fragment: int, number: int, version: int, checksum: int) -> None:
        self._write(ReplayKind.LANDED, fragment, number, version, checksum)

    def adopted(
        self,
        fragment: int,
        version: int,
        checksum: int,
        *,
        keeps: Sequence[int],
        returns: Sequence[int],
        drops: bool,
    ) -> None:
        for number in keeps:
            self._write(ReplayKind.KEPT, fragment, number)
        for number in returns:
            self._write(ReplayKind.GIVEN, fragment, number)
        self._write(ReplayKind.ADOPTED, fragment, self.step, version, int(drops), checksum)

    def closed(self, fragment: int, row: Sequence[int]) -> None:
        """Notes a row of the shard ``history``."""
        version, is_flush, *rows = row
        self._write(ReplayKind.CLOSED, fragment, version, int(is_flush != 0), rows)

    def close(self) -> None:
        """Closes the file. May be called again."""
        self._file.close()

    def _write(self, kind: ReplayKind, *values: int | Sequence[int]) -> None:
        if self._file.closed:
            return
        record = bytearray([kind])
        for name, value in zip(_FIELDS[kind], values, strict=True):
            if name == "checksum":
                record += _CHECKSUM.pack(value)
            elif isinstance(value, int):
                _append_number(record, value)
            else:
                for each in (len(value), *value):
                    _append_number(record, each)
        self._file.write(record)


def _append_number(record: bytearray, value: int) -> None:
    while value > 127:
        record.append(value & 127 | 128)
        value >>= 7
    record.append(value)


def instance_number(instance: str) -> int:
    """Returns the number by which records name an instance of a store."""
    return zlib.crc32(instance.encode())


def checksum_of(values: np.ndarray) -> int:
    """Returns the CRC-32 of outer parameters or of a push, float32 [n]."""
    return zlib.crc32(np.ascontiguousarray(values, np.float32).view(np.uint8).data)


def read_replay_file(path: str | os.PathLike[str]) -> list[ReplayOfProcess]:
    """Reads the log of a group: one part for each process, in the order of their starts.

    Raises:
      MessageError: It is not a replay log.
    """
    with open(path, "rb") as file:
        content = file.read()
    if not content.startswith(_MAGIC):
        raise MessageError(f"{path} is no replay log of a group: it does not begin with {_MAGIC!r}.")
    return [_read_process(path, part) for part in content.split(_MAGIC)[1:]]


def _read_process(path: str | os.PathLike[str], part: bytes) -> ReplayOfProcess:
    at = _LENGTH.size
    try:
        (length,) = _LENGTH.unpack(part[:at])
        header = read_json(part[at : at + length])
    except (ValueError, struct.error):
        raise MessageError(f"{path} is a damaged replay log: a header cannot be read.") from None
    if not isinstance(header, dict):
        raise MessageError(
            f"{path} is a damaged replay log: a header is {header!r}, and should be an object."
        )
    return ReplayOfProcess(header, _records(path, part, at + length))


def _records(path: str | os.PathLike[str], part: bytes, at: int) -> list[ReplayRecord]:
    records: list[ReplayRecord] = []
    instances: dict[int, int] = {}
    while at < len(part):
        if part[at] not in _FIELDS:
            raise MessageError(
                f"{path} is a damaged replay log: byte {at} of a process is no kind of record."
            )
        kind = ReplayKind(part[at])
        fields: dict[str, Any] = {}
        at += 1
        try:
            for name in _FIELDS[kind]:
                fields[name], at = _READERS.get(name, _number)(part, at)
        except (IndexError, struct.error):
            break  # the process was killed
        record = ReplayRecord(kind, **fields)
        if kind is ReplayKind.CLAIMED:
            instances[record.fragment] = record.instance
        elif kind in _OF_INSTANCE:
            record = record._replace(instance=instances.get(record.fragment, 0))
        records.append(record)
    return records


def _number(part: bytes, at: int) -> tuple[int, int]:
    """Reads a number. Returns it, and where the next one begins."""
    number = shift = 0
    while part[at] > 127:
        number |= (part[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return number | part[at] << shift, at + 1


def _numbers(part: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """Reads a number, and as many numbers as it says."""
    count, at = _number(part, at)
    numbers: list[int] = []
    for _ in range(count):
        number, at = _number(part, at)
        numbers.append(number)
    return tuple(numbers), at


def _checksum(part: bytes, at: int) -> tuple[int, int]:
    return _CHECKSUM.unpack_from(part, at)[0], at + _CHECKSUM.size


_READERS: Final[Mapping[str, Callable[[bytes, int], tuple[Any, int]]]] = {
    "checksum": _checksum,
    "rows": _numbers,
}
