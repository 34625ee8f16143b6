"""The format of a frame: a header of 24 bytes, a head, and a body. Pure.

The header has the number of bytes that follow, and a checksum of itself, so that a damaged length is found at once.
It also has a checksum of the head. If the handshake has agreed on it, a checksum of the body follows the body, so
that the sender need not read the body before it sends the first byte.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple
from zlib import crc32

from replicax._src.wire.errors import DamagedFrameError, ForeignPeerError

Part = bytes | bytearray | memoryview

HEADER_BYTES: Final = 24
SUM_BYTES: Final = 8
LARGEST_HEAD: Final = 64 * 2**20
LARGEST_BODY: Final = 16 * 2**30

_MAGIC: Final = b"RX"
_HEADER: Final = struct.Struct("<2sBxIQII")
_SUMMED_HEADER: Final = struct.Struct("<2sBxIQI")
_SUMMED_BYTES: Final = _SUMMED_HEADER.size


class Kind(IntEnum):
    """The kind of a frame.

    MESSAGE carries data of the two ends. END has the reason why a connection ends. REFUSAL is the same for a peer
    that sent
    data that is not allowed.
    """

    MESSAGE = 1
    END = 2
    REFUSAL = 3


_KINDS: Final = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """The fields of a header."""

    kind: Kind
    head_bytes: int
    body_bytes: int
    head_sum: int


def frame_parts(
    kind: Kind, head: bytes, body: Sequence[Part] = (), *, is_checked: bool = False
) -> list[Part]:
    """Returns the bytes of a frame, in parts that are sent in order. The body is not copied."""
    body_bytes = sum(map(len, body)) if body else 0
    header = _SUMMED_HEADER.pack(_MAGIC, kind, len(head), body_bytes, crc32(head))
    start = header + crc32(header).to_bytes(4, "little") + head
    if not body_bytes:
        return [start]
    return [start, *body, body_sum(body)] if is_checked else [start, *body]


def parsed_header(data: Part, at: int = 0) -> Header:
    """Reads the 24 bytes of a header from ``at`` on.

    Raises:
      DamagedFrameError: They were damaged in transit.
      ForeignPeerError: They are not a header, or announce more than a frame may have.
    """
    magic, number, head_bytes, body_bytes, head_sum, own_sum = _HEADER.unpack_from(data, at)
    if crc32(data[at : at + _SUMMED_BYTES]) != own_sum:  # before the magic bytes, which may be damaged, too
        raise DamagedFrameError("the header of a frame was damaged in transit")
    if magic != _MAGIC:
        raise ForeignPeerError(f"bytes that begin with {bytes(data[at : at + 8])!r} are not a frame")
    kind = _KINDS.get(number)
    if kind is None or head_bytes > LARGEST_HEAD or body_bytes > LARGEST_BODY:
        raise ForeignPeerError(
            f"a frame of kind {number} with {head_bytes} and {body_bytes} bytes was announced; the kinds are 1 to "
            f"{len(_KINDS)}, and the most bytes are {LARGEST_HEAD} and {LARGEST_BODY}"
        )
    return Header(kind, head_bytes, body_bytes, head_sum)


def check_head(header: Header, head: Part) -> None:
    """Compares a head with its checksum.

    Raises:
      DamagedFrameError: It was damaged in transit.
    """
    if crc32(head) != header.head_sum:
        raise DamagedFrameError("the head of a frame was damaged in transit")


def check_body(body: Part, received_sum: Part) -> None:
    """Compares a body with its checksum.

    Raises:
      DamagedFrameError: It was damaged in transit.
    """
    if body_sum((body,)) != bytes(received_sum):
        raise DamagedFrameError("the body of a frame was damaged in transit")


def body_sum(body: Iterable[Part]) -> bytes:
    """Returns the checksum of a body, 8 bytes. Its parts may have any size."""
    total = _xxh3()()
    for part in body:
        total.update(part)
    return total.digest()


@functools.cache
def _xxh3() -> Callable[[], Any]:
    # Imported late: the control channel sends no bodies, and xxhash belongs to the extra of parameter servers.
    from xxhash import xxh3_64

    return xxh3_64
