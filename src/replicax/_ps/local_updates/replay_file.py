"""The replay log of a group: what a run of groups needs to be repeated bit for bit. Pure, except for the file.

A group appends to one file. Each process of it begins with a *header*: the line ``RXLU replay 2``, the length of a JSON
text in 4 bytes, and the text. Then come records in the order of their events; the first byte says the kind, and all
numbers are little-endian. A killed process may leave a part of a record, which ends its part of the file.

==========  ======================================================================================================
kind        fields
==========  ======================================================================================================
``TAKEN``   fragment, step, number of the push, its tokens: ``base - w`` became a push, and base is w
``LANDED``  fragment, number of the push, version that has it, instance of the server's store, CRC-32 of the push
``KEPT``    fragment, number: the next adoption keeps this push, which a later version has
``GIVEN``   fragment, number: the next adoption counts this push as not pushed, because the server lost it
``ADOPTED`` fragment, step, version, instance, 1 if unpushed work was dropped, CRC-32 of the outer parameters
``CLOSED``  fragment, version, instance, 1 if the round was a flush, members with rows as bits, rows of all members
``CALLED``  step, 1 for ``wait`` and 2 for ``finish``: the next records are those of this call
``CREATED`` fragment, instance, CRC-32: the process has created the outer parameters from its own
==========  ======================================================================================================

``step`` is the number of steps that the process had counted. ``CLOSED`` of each round is in the log of every group that
fetched it or a later one. A push of a process that was killed before its answer came has no ``LANDED``: it is in the
round whose members have the group, and no other push of it.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, final

import numpy as np

from replicax._src.program_kit.errors import MessageError

_MAGIC: Final = b"RXLU replay 2\n"
_LENGTH: Final = struct.Struct("<I")
MOST_MEMBERS: Final = 64
"""``CLOSED`` has a bit for each member up to here."""


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
      instance: A number for the instance of the server's store.
      tokens: The rows of a push, or of a round.
      is_special: True for an adoption that dropped work, and for a round that was a flush. In ``CALLED`` the method.
      members: The members with rows in a round, as bits.
      checksum: The CRC-32 of outer parameters, or of a push.
    """

    kind: ReplayKind
    fragment: int = 0
    step: int = 0
    number: int = 0
    version: int = 0
    instance: int = 0
    tokens: int = 0
    is_special: int = 0
    members: int = 0
    checksum: int = 0


_FIELDS: Final[Mapping[ReplayKind, tuple[struct.Struct, tuple[str, ...]]]] = {
    ReplayKind.TAKEN: (struct.Struct("<HIII"), ("fragment", "step", "number", "tokens")),
    ReplayKind.LANDED: (
        struct.Struct("<HIIII"),
        ("fragment", "number", "version", "instance", "checksum"),
    ),
    ReplayKind.KEPT: (struct.Struct("<HI"), ("fragment", "number")),
    ReplayKind.GIVEN: (struct.Struct("<HI"), ("fragment", "number")),
    ReplayKind.ADOPTED: (
        struct.Struct("<HIIIBI"),
        ("fragment", "step", "version", "instance", "is_special", "checksum"),
    ),
    ReplayKind.CLOSED: (
        struct.Struct("<HIIBQQ"),
        ("fragment", "version", "instance", "is_special", "members", "tokens"),
    ),
    ReplayKind.CALLED: (struct.Struct("<IB"), ("step", "is_special")),
    ReplayKind.CREATED: (struct.Struct("<HII"), ("fragment", "instance", "checksum")),
}


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

    def created(self, fragment: int, instance: str, checksum: int) -> None:
        self._write(ReplayKind.CREATED, fragment, instance_number(instance), checksum)

    def taken(self, fragment: int, number: int, tokens: int) -> None:
        self._write(ReplayKind.TAKEN, fragment, self.step, number, min(tokens, 2**32 - 1))

    def landed(self, fragment: int, number: int, version: int, instance: str, checksum: int) -> None:
        self._write(ReplayKind.LANDED, fragment, number, version, instance_number(instance), checksum)

    def adopted(
        self,
        fragment: int,
        version: int,
        instance: str,
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
        number = instance_number(instance)
        self._write(ReplayKind.ADOPTED, fragment, self.step, version, number, int(drops), checksum)

    def closed(self, fragment: int, instance: str, row: Sequence[int]) -> None:
        """Notes a row of the shard ``history``."""
        version, is_flush, *tokens = row
        members = sum(1 << member for member, rows in enumerate(tokens[:MOST_MEMBERS]) if rows)
        number = instance_number(instance)
        self._write(ReplayKind.CLOSED, fragment, version, number, int(is_flush != 0), members, sum(tokens))

    def close(self) -> None:
        """Closes the file. May be called again."""
        self._file.close()

    def _write(self, kind: ReplayKind, *fields: int) -> None:
        if not self._file.closed:
            self._file.write(bytes([kind]) + _FIELDS[kind][0].pack(*fields))


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
        header = json.loads(part[at : at + length])
    except (ValueError, struct.error):
        raise MessageError(f"{path} is a damaged replay log: a header cannot be read.") from None
    records: list[ReplayRecord] = []
    at += length
    while at < len(part):
        if part[at] not in _FIELDS:
            raise MessageError(
                f"{path} is a damaged replay log: byte {at} of a process is no kind of record."
            )
        kind = ReplayKind(part[at])
        form, names = _FIELDS[kind]
        if at + 1 + form.size > len(part):
            break  # the process was killed
        fields = dict(zip(names, form.unpack_from(part, at + 1), strict=True))
        records.append(ReplayRecord(kind, **fields))
        at += 1 + form.size
    return ReplayOfProcess(header, records)
