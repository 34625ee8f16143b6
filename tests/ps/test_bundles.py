"""Small messages travel together, and come back as they were; what is wrong is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import message
from replicax._src.ps.buffers import Buffers
from replicax._src.ps.bundles import MOST_MESSAGES, bundled, unbundled
from replicax._src.ps.messages import INLINE_BYTES, Decoder, Message, encode
from replicax.errors import MessageError


def sent(number, size):
    return Message({"op": "x", "n": number}, [np.full(size, number % 251, np.uint8)] if size else [])


def received(decoder, encoded):
    """What comes of one head and its pieces."""
    first, *others = encoded.pieces or [None]
    got = unbundled(decoder, memoryview(encoded.head), first)
    for piece in others:
        got += unbundled(decoder, None, piece)
    return got


@settings(max_examples=60)
@given(st.lists(st.sampled_from([0, 1, 64, 5000, 40_000, 65_000, 70_000, 5_000_000]), max_size=12))
def test_messages_come_back_in_order_together_if_they_are_small(sizes):
    messages = [encode(sent(number, size)) for number, size in enumerate(sizes)]
    frames = list(bundled(messages))
    assert all(len(frame.head) <= INLINE_BYTES for frame in frames)
    assert sum(frame.num_bytes for frame in frames) == sum(each.num_bytes for each in messages)
    decoder = Decoder(Buffers())
    by_frame = [received(decoder, frame) for frame in frames]
    got = [each for each_frame in by_frame for each in each_frame]
    assert [each.header["n"] for each in got] == list(range(len(sizes)))
    for each, size in zip(got, sizes, strict=True):
        assert sum(array.nbytes for array in each.arrays) == size
        assert all((np.frombuffer(array, np.uint8) == each.header["n"] % 251).all() for array in each.arrays)
    assert all(len(each) == 1 or not frame.pieces for each, frame in zip(by_frame, frames, strict=True))


def test_many_small_ones_are_one_head():
    messages = [encode(sent(number, 8)) for number in range(MOST_MESSAGES + 10)]
    assert [len(received(Decoder(Buffers()), frame)) for frame in bundled(messages)] == [MOST_MESSAGES, 10]


def test_what_is_wrong_with_one_of_several_is_refused():
    heads = [encode(sent(number, 8)).head for number in range(3)]
    for damaged in (
        b"".join(heads)[:-1],
        b"".join(heads) + b"x",
        heads[0] + b"GET" + heads[1][3:],
        heads[0] + heads[1][:-1] + heads[2],
        heads[0] * (MOST_MESSAGES + 1),
    ):
        message(MessageError, lambda head=damaged: unbundled(Decoder(Buffers()), head, None))
    large = encode(sent(1, 5_000_000))
    with pytest.raises(MessageError, match="Bytes follow a message"):
        unbundled(Decoder(Buffers()), heads[0] + heads[1], large.pieces[0])


@settings(max_examples=200)
@given(st.data())
def test_damaged_bundles_are_refused_or_are_other_messages(data):
    head = bytearray(b"".join(encode(sent(number, 8)).head for number in range(3)))
    for _ in range(data.draw(st.integers(1, 4))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    del head[data.draw(st.integers(0, len(head))) :]
    try:
        got = unbundled(Decoder(Buffers(), most_bytes=2**20), bytes(head), None)
    except MessageError:
        return
    assert sum(array.nbytes for each in got for array in each.arrays) <= len(head)
