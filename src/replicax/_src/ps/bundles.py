"""Bundles: small messages that travel as one head, each as it would stand alone. Pure.

What a head costs on its way is about the same for one message and for twenty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from replicax._src.ps.errors import MessageError
from replicax._src.ps.layouts import INLINE_BYTES
from replicax._src.ps.messages import PREFIX, Decoder, Encoded, Message

MOST_MESSAGES: Final = 256


def bundled(messages: Sequence[Encoded]) -> Iterator[Encoded]:
    """Messages as what is sent, in order: those without pieces together, the others each alone."""
    heads: list[bytes] = []
    num_bytes = 0
    for message in messages:
        is_small = not message.outside and len(message.head) <= INLINE_BYTES
        is_full = num_bytes + len(message.head) > INLINE_BYTES or len(heads) == MOST_MESSAGES
        if heads and (is_full or not is_small):
            yield Encoded(b"".join(heads), (), num_bytes)
            heads, num_bytes = [], 0
        if is_small:
            heads.append(message.head)
            num_bytes += len(message.head)
        else:
            yield message
    if heads:
        yield Encoded(b"".join(heads), (), num_bytes)


def unbundled(decoder: Decoder, head: memoryview | bytes | None, piece: np.ndarray | None) -> list[Message]:
    """The messages that are complete with what has come, as ``Decoder.feed``; none, while pieces are missing.

    Raises:
      MessageError: One of them is no message, or there are too many.
    """
    if head is None:
        message = decoder.feed(None, piece)
        return [] if message is None else [message]
    messages: list[Message] = []
    for each, is_last in _heads(head):
        if len(messages) == MOST_MESSAGES:
            raise MessageError(
                f"A head has more than {MOST_MESSAGES} messages, the most that travel together."
            )
        message = decoder.feed(each, piece if is_last else None)
        if message is not None:
            messages.append(message)
    return messages


def _heads(head: memoryview | bytes) -> Iterator[tuple[memoryview | bytes, bool]]:
    """Each message of a head, and whether it is the last one. What is wrong with one its decoder says."""
    at = 0
    while len(head) - at >= PREFIX.size:
        _, _, header_size, arrays_size, num_bytes = PREFIX.unpack_from(head, at)
        after = at + PREFIX.size + header_size + arrays_size + num_bytes
        if after >= len(head):
            break
        yield head[at:after], False
        at = after
    yield (head[at:] if at else head), True
