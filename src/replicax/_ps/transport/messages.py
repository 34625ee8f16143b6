"""Messages between tasks: a header and arrays. Pure: encoding, decoding, and checks of data of unauthenticated peers.

A message is the head and the body of one frame (``wire/frames.py``). The head has two lengths; the header and a
description of the arrays, both as JSON; and the small arrays. The other arrays are the body. Each array starts at a
multiple of 64 bytes (``message_layout.py``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from replicax._ps.transport.message_layout import Layout, announced_layout, layout_of, sendable
from replicax._src.program_kit.errors import MessageError
from replicax._src.program_kit.task_connections import ALIGNMENT, LARGEST_BODY, Buffers, aligned_empty
from replicax._src.program_kit.texts import TextError, read_json

LARGEST_HEADER: Final = 16 * 2**20

_Bytes = bytes | bytearray | memoryview
_LENGTHS: Final = struct.Struct("<II")
_SMALL_BYTES: Final = 512
_BLOCK_BYTES: Final = 4096  # of the memory for small arrays; it lives as long as one of them
_JSON: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False)


class Message(NamedTuple):
    """A header of JSON values, and arrays of any dtype of JAX (bfloat16 and similar ones by ``ml_dtypes``).

    Attributes:
      header: The fields. ``op`` names the request. The answer of a failed request has ``error``: ``type``, ``text``
        and
        ``details``.
      arrays: To send, any NumPy arrays; they must not change before the answer has arrived. Received arrays are
        C-contiguous, read-only, at multiples of 64 bytes, and valid for as long as they exist.
    """

    header: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


class Encoded(NamedTuple):
    """A message as the head and the body of a frame. The body is the memory of its arrays: nothing is copied."""

    head: bytes
    body: Sequence[_Bytes]


# --- encoding -----------------------------------------------------------------------------------------


def encode(message: Message) -> Encoded:
    """Encodes a message.

    Raises:
      MessageError: A dtype is not allowed, the header is not JSON, or the header or the arrays are too large.
    """
    arrays = [sendable(array) for array in message.arrays]
    layout = layout_of(arrays)
    if layout.num_bytes > LARGEST_BODY:
        raise MessageError(
            f"The arrays of a message have {layout.num_bytes} bytes, but at most {LARGEST_BODY} can be sent. "
            "Split the variable into smaller shards."
        )
    header = header_bytes(message.header)
    head = [_LENGTHS.pack(len(header), len(layout.text)), header, layout.text]
    body: list[_Bytes] = []
    for array, at in zip(arrays, layout.offsets):
        if not array.nbytes:
            continue
        is_inline = at < layout.inline_bytes
        if is_inline:
            head.append(array.tobytes())
        else:
            body.append(array.reshape(-1).view(np.uint8).data)
        if padding := -array.nbytes % ALIGNMENT:
            (head if is_inline else body).append(bytes(padding))
    return Encoded(b"".join(head), body)


def header_bytes(fields: Mapping[str, Any]) -> bytes:
    """Encodes a header as JSON.

    Raises:
      MessageError: It has values that are not JSON, or is too large.
    """
    if not fields:  # many answers
        return b"{}"
    try:
        text = _JSON.encode(fields).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(
            f"A header of a message is not JSON: {error}. It may have strings, Python numbers, booleans, None, "
            f"lists, and dicts with strings as keys; arrays belong into `arrays`."
        ) from error
    if len(text) > LARGEST_HEADER:
        raise MessageError(
            f"A header of a message has {len(text)} bytes, but at most {LARGEST_HEADER} can be sent. Send "
            "large data as arrays."
        )
    return text


# --- decoding -----------------------------------------------------------------------------------------


class _Announced(NamedTuple):
    header: dict[str, Any]
    arrays: Layout


@final
class Decoder:
    """Makes messages of the heads and bodies of frames. Do not use it after an error.

    Args:
      buffers: The memory for bodies.
    """

    def __init__(self, buffers: Buffers):
        self._buffers = buffers
        self._announced: _Announced | None = None
        self._memory = np.empty(0, np.uint8)
        self._block = aligned_empty(_BLOCK_BYTES)
        self._num_used = 0  # bytes of the block

    def decode(self, head: _Bytes) -> Message:
        """Returns the message of a frame without a body.

        Raises:
          MessageError: The frame is not a message.
        """
        announced, inline = _decoded_head(head, 0)
        if not announced.arrays.specs:
            return Message(announced.header, [])
        memory = self._new_memory(announced.arrays.num_bytes)
        memory[:] = inline
        memory.flags.writeable = False
        return Message(announced.header, _views(announced, memory))

    def _new_memory(self, num_bytes: int) -> np.ndarray:
        """Returns memory for the arrays of one message; for small ones a part of a block, which costs less."""
        if num_bytes > _SMALL_BYTES:
            return aligned_empty(num_bytes)
        if self._num_used + num_bytes > _BLOCK_BYTES:
            self._block, self._num_used = aligned_empty(_BLOCK_BYTES), 0
        start, self._num_used = self._num_used, self._num_used + num_bytes
        return self._block[start : self._num_used]

    def room(self, head: _Bytes, num_bytes: int) -> memoryview:
        """Returns memory for the body of a frame. Write the body there, and call ``filled``.

        Raises:
          MessageError: The frame is not a message, or is too large.
        """
        self._announced, inline = _decoded_head(head, num_bytes)
        total = self._announced.arrays.num_bytes
        try:
            self._memory = self._buffers.take(total)
        except MemoryError:
            raise MessageError(
                f"A message of {total} bytes was announced, but there is not enough memory."
            ) from None
        self._memory[: len(inline)] = inline
        return self._memory[len(inline) : total].data

    def filled(self) -> Message:
        """Returns the message whose body has been written to ``room``."""
        announced, memory = self._announced, self._memory
        assert announced is not None
        self._announced, self._memory = None, np.empty(0, np.uint8)
        return Message(announced.header, _views(announced, self._buffers.lend(memory)))


def _decoded_head(head: _Bytes, body_bytes: int) -> tuple[_Announced, np.ndarray]:
    """Returns the announcement in a head, and the arrays in it.

    Raises:
      MessageError: The head is not valid, or announces too much.
    """
    if len(head) < _LENGTHS.size:
        raise MessageError(
            f"{len(head)} bytes are not a message: the first {_LENGTHS.size} bytes have the lengths of its parts."
        )
    header_bytes_, arrays_bytes = _LENGTHS.unpack_from(head)
    if max(header_bytes_, arrays_bytes) > LARGEST_HEADER:
        raise MessageError(
            f"A header of {max(header_bytes_, arrays_bytes)} bytes was announced, but at most "
            f"{LARGEST_HEADER} are allowed."
        )
    of_arrays = _LENGTHS.size + header_bytes_
    after = of_arrays + arrays_bytes
    if len(head) < after:
        raise MessageError(f"A head has {len(head)} bytes, but at least {after} were announced.")
    header = decoded_header(head[_LENGTHS.size : of_arrays])
    arrays = announced_layout(bytes(head[of_arrays:after]))
    if len(head) != after + arrays.inline_bytes or body_bytes != arrays.num_bytes - arrays.inline_bytes:
        raise MessageError(
            f"Arrays of {arrays.inline_bytes} and {arrays.num_bytes - arrays.inline_bytes} bytes were announced, but "
            f"{len(head) - after} came in the head, and {body_bytes} follow it."
        )
    return _Announced(header, arrays), np.frombuffer(head, np.uint8, offset=after)


def decoded_header(text: _Bytes) -> dict[str, Any]:
    """Returns the fields of a header that arrived as JSON.

    Raises:
      MessageError: It is not JSON, or not an object.
    """
    if text == b"{}":  # many answers
        return {}  # a new one: JobLoop finds answers by the identity of their headers
    try:
        fields = read_json(str(text, "utf-8"))
    except (TextError, UnicodeDecodeError) as error:
        raise MessageError(f"The header of a message is not JSON: {bytes(text[:40])!r}.") from error
    if not isinstance(fields, dict):
        raise MessageError(f"The header of a message is not a JSON object: {bytes(text[:40])!r}.")
    return fields


def _views(announced: _Announced, memory: np.ndarray) -> list[np.ndarray]:
    """Returns arrays in read-only memory. The arrays are read-only, too."""
    arrays = announced.arrays
    try:
        return [
            np.ndarray(shape, dtype, memory, at)
            for (dtype, shape), at in zip(arrays.specs, arrays.offsets, strict=True)
        ]
    except ValueError as error:  # the sizes of an empty array can be too large together
        raise MessageError(f"Arrays of {arrays.text[:80]!r} are not possible: {error}.") from error
