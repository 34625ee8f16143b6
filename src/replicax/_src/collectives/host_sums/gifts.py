"""A transfer of arrays from one member to another one, over their link: the sums of a step, or a state.

The first frame has a description of all arrays. Chunks follow, each with a deadline of its own, so that large arrays
have as much time as they need while the connection makes progress. Both ends know from the protocol that the transfer
comes, and all its frames begin with their epoch and index.

The others wait for the end of all transfers before they exchange. Meanwhile the giver tells them that it makes
progress, so that nobody blames it.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import ml_dtypes  # noqa: F401  (it names dtypes of half precision for NumPy)
import numpy as np

from replicax._src.collectives.host_sums.links import LinkLost, Links
from replicax._src.untrusted.strict_json import Form, JsonReader, TextError, read_json
from replicax._src.wire.buffers import aligned_empty
from replicax._src.wire.errors import ForeignPeerError
from replicax._src.wire.frames import Kind

CHUNK_BYTES: Final = 4 * 2**20
_MAGIC: Final = b"gift"
_HEAD: Final = struct.Struct("<4sQI")
_PROGRESS: Final = 2**32 - 1  # in place of an index, in a frame of its own
_END: Final = 2**32 - 2
_SAYS_EACH: Final = 0.25
"""The part of the timeout after which the giver tells of its progress."""
_DESCRIPTION: Final[Mapping[str, Form[Any]]] = {
    "content": lambda it: it.table(JsonReader.anything),
    "arrays": lambda it: it.items(
        lambda each: each.fixed(JsonReader.string, lambda shape: shape.items(JsonReader.count))
    ),
}


@final
@dataclass(frozen=True)
class Gift:
    """Arrays that a member has given to this one.

    Attributes:
      content: Its description of them.
      arrays: The arrays, read-only, at multiples of 64 bytes.
    """

    content: Mapping[str, Any]
    arrays: Sequence[np.ndarray]


def send_gift(
    links: Links,
    place: int,
    epoch: int,
    content: Mapping[str, Any],
    arrays: Sequence[Any],
    timeout_s: float,
) -> None:
    """Sends arrays to the member at ``place``. Each chunk may take ``timeout_s``. All others are told of the progress.

    Raises:
      LinkLost: The connection has ended, or made no progress.
    """
    said_at = time.monotonic()
    arrays = [np.asarray(array) for array in arrays]
    described = [[array.dtype.name, list(array.shape)] for array in arrays]
    text = json.dumps({"content": content, "arrays": described}).encode()
    connection = links[place].connection
    try:
        first = (Kind.MESSAGE, _HEAD.pack(_MAGIC, epoch, 0) + text, ())
        connection.send([first], time.monotonic() + timeout_s)
        for index, chunk in enumerate(_chunks([_bytes_of(array) for array in arrays]), 1):
            frame = (Kind.MESSAGE, _HEAD.pack(_MAGIC, epoch, index), (chunk,))
            now = time.monotonic()
            if now - said_at >= timeout_s * _SAYS_EACH:
                said_at = now
                _tell(
                    links, [each for each, _ in links.items() if each != place], epoch, _PROGRESS, timeout_s
                )
            connection.send([frame], time.monotonic() + timeout_s)
    except OSError as error:
        raise LinkLost(place, error) from error


def end_gifts(links: Links, epoch: int, timeout_s: float) -> None:
    """Tells all others that no transfer follows.

    Raises:
      LinkLost: A connection has ended.
    """
    _tell(links, [place for place, _ in links.items()], epoch, _END, timeout_s)


def await_gifts(links: Links, place: int, epoch: int, timeout_s: float) -> None:
    """Waits until the member at ``place`` has ended its transfers to others.

    Raises:
      LinkLost: This member, or another one, has ended the connection, made no progress, or sent something else.
    """

    def no_body(head: memoryview, num_bytes: int) -> memoryview:
        _check(head, epoch, _END)
        return memoryview(bytearray(num_bytes))

    _receive_first(links, place, no_body, epoch, timeout_s)


def _tell(links: Links, places: Sequence[int], epoch: int, index: int, timeout_s: float) -> None:
    for place in places:
        links.send(place, _HEAD.pack(_MAGIC, epoch, index), (), time.monotonic() + timeout_s)


def _receive_first(
    links: Links,
    place: int,
    room: Callable[[memoryview, int], memoryview],
    epoch: int,
    timeout_s: float,
) -> None:
    """Waits for the first frame from the member at ``place`` that does not only tell of progress. Each may take
    ``timeout_s``; after one of progress twice as long, because the giver itself waits that long for a chunk.
    """
    progress, is_progress, limit_s = _HEAD.pack(_MAGIC, epoch, _PROGRESS), True, timeout_s

    def room_or_progress(head: memoryview, num_bytes: int) -> memoryview:
        nonlocal is_progress
        is_progress = head == progress
        return memoryview(b"") if is_progress else room(head, num_bytes)

    while is_progress:
        links.receive_frame(place, room_or_progress, time.monotonic() + limit_s)
        limit_s = 2 * timeout_s


def receive_gift(links: Links, place: int, epoch: int, timeout_s: float) -> Gift:
    """Waits for the arrays of the member at ``place``. Each chunk may take ``timeout_s``.

    Raises:
      LinkLost: This member, or another one, has ended the connection, made no progress, or sent something else.
    """
    texts: list[bytes] = []

    def no_body(head: memoryview, num_bytes: int) -> memoryview:
        _check(head, epoch, 0)
        if num_bytes:
            raise ForeignPeerError(
                f"it sent {num_bytes} bytes with the description of a transfer, expected none"
            )
        texts.append(bytes(head[_HEAD.size :]))
        return memoryview(b"")

    _receive_first(links, place, no_body, epoch, timeout_s)
    try:
        content, memories, arrays = _described(texts[0])
    except (TextError, TypeError, ValueError) as error:
        lost = ForeignPeerError(f"it described a transfer that cannot be read: {error}")
        raise LinkLost(place, lost) from error
    for index, chunk in enumerate(_chunks(memories), 1):

        def room(
            head: memoryview, num_bytes: int, index: int = index, chunk: memoryview = chunk
        ) -> memoryview:
            _check(head, epoch, index)
            if num_bytes != len(chunk):
                raise ForeignPeerError(f"it sent {num_bytes} bytes, expected {len(chunk)}")
            return chunk

        links.receive_frame(place, room, time.monotonic() + timeout_s)
    return Gift(content, arrays)


def _described(text: bytes) -> tuple[Mapping[str, Any], list[memoryview], list[np.ndarray]]:
    """Returns the content of a description, and memory for the arrays, to write and to hand out."""
    description = JsonReader(read_json(text), "the description").record(_DESCRIPTION)
    memories, arrays = [], []
    for name, shape in description["arrays"]:
        dtype = np.dtype(name)
        if dtype.hasobject:
            raise ValueError(f"arrays of the dtype {name} are not sent")
        memory = aligned_empty(math.prod(shape) * dtype.itemsize)[: math.prod(shape) * dtype.itemsize]
        array = memory.view(dtype).reshape(tuple(shape))
        array.flags.writeable = False
        memories.append(memory.data)
        arrays.append(array)
    return description["content"], memories, arrays


def _check(head: memoryview, epoch: int, index: int) -> None:
    if head[: _HEAD.size] != _HEAD.pack(_MAGIC, epoch, index):
        raise ForeignPeerError(f"it sent another frame than number {index} of a transfer in epoch {epoch}")


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _chunks(memories: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yields the parts of some memory that travel as one frame each."""
    for memory in memories:
        for start in range(0, len(memory), CHUNK_BYTES):
            yield memory[start : start + CHUNK_BYTES]
