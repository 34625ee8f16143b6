"""Messages become bytes and come back; what is no message is refused, before memory is allocated for it."""

import gc
import itertools
import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks import message
from replicax._src.ps import messages
from replicax._src.ps.buffers import ALIGNMENT, Buffers
from replicax._src.ps.messages import Decoder, Message, encode
from replicax.errors import MessageError

DTYPES = [
    *map(
        np.dtype, ("bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64")
    ),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4)),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)
headers = st.dictionaries(st.text(), json_values, max_size=4)


@st.composite
def arrays(draw, most=12):
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, most), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(draw(st.integers(0, 99))).bytes(size), dtype, shape


def made(drawn):
    data, dtype, shape = drawn
    if dtype.name == "bool":
        return (np.frombuffer(data, np.uint8) % 2).astype(bool).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def decoded(encoded, decoder=None):
    decoder = decoder or Decoder(Buffers())
    if not encoded.pieces:
        return decoder.feed(memoryview(encoded.head), None)
    first, *others = encoded.pieces
    got = decoder.feed(encoded.head, first)
    for piece in others:
        assert got is None
        got = decoder.feed(None, piece)
    return got


def assert_same(got, sent):
    assert dict(got.header) == dict(sent.header)
    for ours, theirs in zip(got.arrays, sent.arrays, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()
        assert not ours.flags.writeable
        assert ours.flags.c_contiguous
        assert ours.size == 0 or ours.ctypes.data % ALIGNMENT == 0


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(headers, st.lists(arrays(), max_size=4))
def test_messages_come_back(header, drawn):
    sent = Message(header, [made(array) for array in drawn])
    encoded = encode(sent)
    assert_same(decoded(encoded), sent)
    assert encoded.num_bytes == len(encoded.head) + sum(len(piece) for piece in encoded.pieces)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([0, 1, 63, 1000, 300_000, 2**20, 2**20 + 1, 5_000_001]), min_size=1, max_size=6)
)
def test_messages_in_pieces_come_back(sizes):
    sent = Message(
        {"op": "x"}, [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    )
    encoded = encode(sent)
    assert all(0 < len(piece) <= messages.PIECE_BYTES for piece in encoded.pieces)
    assert_same(decoded(encoded), sent)


def test_one_decoder_takes_messages_after_each_other():
    decoder = Decoder(Buffers())
    for size in (0, 10, 10**6, 20, 10**7, 10**7):
        sent = Message({"n": size}, [np.full(size, size % 251, np.uint8)])
        assert_same(decoded(encode(sent), decoder), sent)


def test_small_messages_are_a_head_alone_and_no_longer_than_64_kb():
    sizes = [0, 1, 1000, 60_000, 65_000, 65_536, 70_000]
    encoded = [encode(Message({}, [np.zeros(size, np.uint8)])) for size in sizes]
    assert [not e.pieces for e in encoded] == [True, True, True, True, False, False, False]
    assert all(e.pieces or len(e.head) <= 64 * 1024 for e in encoded)


def test_large_arrays_are_not_copied_and_smaller_ones_share_a_piece():
    large = np.zeros(10 * 2**20, np.float32)
    smaller = [np.full(20_000, n, np.int32) for n in range(3)]
    pieces = encode(Message({}, [*smaller, large, *smaller])).pieces
    assert [np.shares_memory(piece, large) for piece in pieces] == [False] + [True] * 10 + [False]


def test_what_is_small_beside_a_large_array_stands_in_the_head():
    sent = Message({}, [np.full(1000, 1.0), np.full(10**6, 2.0), np.full(100, 3.0)])
    encoded = encode(sent)
    assert [np.shares_memory(piece, sent.arrays[1]) for piece in encoded.pieces] == [True, True]
    assert len(encoded.head) <= 64 * 1024
    assert_same(decoded(encoded), sent)
    full = encode(Message({}, [np.zeros(30_000, np.uint8) for _ in range(4)]))
    assert sum(map(len, full.pieces)) == 2 * 30_016


def test_scalars_stay_scalars():
    sent = Message({}, [np.float32(3), np.array(2, np.int64), np.zeros((), ml_dtypes.bfloat16)])
    assert [array.shape for array in decoded(encode(sent)).arrays] == [(), (), ()]


def test_arrays_that_are_not_contiguous_and_of_another_byte_order_travel():
    strided = np.arange(12.0).reshape(3, 4).T
    foreign = np.arange(5, dtype=">i4")
    ours, theirs = decoded(encode(Message({}, [strided, foreign]))).arrays
    np.testing.assert_array_equal(ours, strided)
    np.testing.assert_array_equal(theirs, foreign)


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([{}]), np.zeros(2, "M8[s]"), np.zeros(1, "i4,f4")]
)
def test_what_does_not_travel_is_refused(array):
    message(MessageError, lambda: encode(Message({}, [array])), "does not travel", "float32")


@pytest.mark.parametrize("header", [{"a": np.float32(1)}, {"a": {1, 2}}, {(1, 2): 3}])
def test_a_header_that_is_not_json_is_refused(header):
    message(MessageError, lambda: encode(Message(header)), "not JSON")


# --- from strangers -----------------------------------------------------------------------------------


class NoMemory:
    """Buffers of which nothing is taken."""

    def take(self, num_bytes):
        raise AssertionError(f"{num_bytes} bytes were allocated")


def head(fields, num_bytes=0, magic=b"RPX", version=3, behind=b"", header_size=None):
    text, arrays = (json.dumps(fields[name]).encode() for name in ("header", "arrays"))
    return raw_head(text, arrays, num_bytes, magic, version, header_size) + behind


def raw_head(text, arrays=b"[]", num_bytes=0, magic=b"RPX", version=3, header_size=None):
    size = len(text) if header_size is None else header_size
    return struct.pack("<3sBIIQ", magic, version, size, len(arrays), num_bytes) + text + arrays


def refused(data, *says, piece=None, most_bytes=2**40):
    message(MessageError, lambda: Decoder(NoMemory(), most_bytes).feed(data, piece), *says)


GOOD = {"header": {}, "arrays": []}


def one(dtype, shape):
    return {"header": {}, "arrays": [[dtype, shape]]}


def test_heads_that_are_wrong():
    refused(b"", "0 bytes are no message")
    refused(b"RPX\x01", "no message")
    refused(head(GOOD, magic=b"GET"), "b'GET'")
    refused(head(GOOD, version=1), "version 1 came, this is version 3")
    refused(head(GOOD, header_size=2**31), "2147483648 bytes was announced")
    refused(head(GOOD, header_size=1), "not JSON")
    refused(head(GOOD, header_size=5000), "cut off or damaged")
    refused(head(GOOD)[:-1], "cut off or damaged")
    refused(head(GOOD) + b"x", "cut off or damaged")
    refused(head(GOOD, num_bytes=64), "Arrays of 0 bytes were announced in a message of 64")


NO_JSON = [b"", b"\xff", b"{", b"[" * 100_000, b"1" * 5000]


@pytest.mark.parametrize("text", [*NO_JSON, b"[]", b"3", b"null"])
def test_headers_that_are_wrong(text):
    refused(raw_head(text))


@pytest.mark.parametrize("text", [*NO_JSON, b"{}", b"3", b"null"])
def test_lists_of_arrays_that_are_wrong(text):
    refused(raw_head(b"{}", text))


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (3, "by its dtype and shape"),
        (["float32"], "by its dtype and shape"),
        ([1, []], "by its dtype and shape"),
        (["object", [1]], "dtype 'object'"),
        ([">f4", [1]], "dtype '>f4'"),
        (["float32", 3], "shape 3"),
        (["float32", [-1]], "shape [-1]"),
        (["float32", [True]], "shape [True]"),
        (["float32", [1.0]], "shape [1.0]"),
        (["float32", [2**62]], "shape [4611686018427387904]"),
        (["float32", [1] * 65], "at most 64"),
        (["float32", [0, 2**61, 2**61]], "cannot be"),
    ],
)
def test_arrays_that_are_wrong(array, says):
    refused(head({"header": {}, "arrays": [array]}), says)


def test_what_is_announced_is_checked_before_memory_is_allocated():
    refused(
        head(one("uint8", [2**40 + 64]), 2**40 + 64), "at most 1099511627776 are taken", "max_message_bytes"
    )
    refused(
        head(one("float32", [100]), 2**39), "Arrays of 448 bytes were announced in a message of 549755813888"
    )
    refused(head(one("float32", [2**40, 2**40]), 2**30), "Arrays of")


def test_a_message_for_which_there_is_no_memory_is_refused(monkeypatch):
    def take(self, num_bytes):
        raise MemoryError

    monkeypatch.setattr(Buffers, "take", take)
    head = encode(Message({}, [np.zeros(10**6, np.uint8)])).head
    message(MessageError, lambda: Decoder(Buffers()).feed(head, None), "no memory", "1000000")


def test_pieces_that_are_wrong():
    piece = np.zeros(1000, np.uint8)
    announced = head(one("uint8", [100_000]), 100_032)

    def after(*fed):
        decoder = Decoder(Buffers())
        for each in fed[:-1]:
            assert decoder.feed(*each) is None
        message(MessageError, lambda: decoder.feed(*fed[-1]))

    after((None, piece))
    after((announced, piece), (announced, None))
    after((announced, piece), (None, piece[:0]))
    after((announced, piece), (None, np.zeros(100_000, np.uint8)))
    after((head(one("uint8", [2**24]), 2**24), np.zeros(messages.LARGEST_PIECE + 1, np.uint8)))
    after((head(GOOD), piece))


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([b"", b"RPX\x01", head(GOOD)[:20]]))
def test_random_bytes_are_refused_as_no_message(data, start):
    decoder = Decoder(Buffers(), most_bytes=2**20)
    try:
        decoder.feed(start + data, None)
    except MessageError:
        return
    assert start + data == head(GOOD)


@settings(max_examples=200)
@given(st.data())
def test_messages_that_are_damaged_are_refused_or_are_other_messages(data):
    sent = bytearray(
        encode(Message({"op": "step", "n": 3}, [np.arange(6, dtype=np.int32), np.float32(1)])).head
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(sent) - 1))
        sent[at] = data.draw(st.integers(0, 255))
    del sent[data.draw(st.integers(0, len(sent))) :]
    decoder = Decoder(Buffers(), most_bytes=2**20)
    try:
        got = decoder.feed(bytes(sent), None)
    except MessageError:
        return
    assert got is None or sum(array.nbytes for array in got.arrays) <= len(sent)


def test_headers_that_are_too_large_are_not_sent(monkeypatch):
    monkeypatch.setattr(messages, "LARGEST_HEADER", 100)
    message(MessageError, lambda: encode(Message({"a": "x" * 100})), "at most 100 travel", "as arrays")


# --- memory -------------------------------------------------------------------------------------------


def received(decoder, value, size=10**6):
    return decoded(encode(Message({}, [np.full(size, value, np.uint8)])), decoder).arrays[0]


def test_memory_is_used_again_when_nobody_has_an_array_in_it():
    decoder = Decoder(Buffers())
    addresses = set()
    for value in range(10):
        array = received(decoder, value)
        addresses.add(array.ctypes.data)
        del array
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "kept", [lambda a: a, lambda a: a[10:20], lambda a: memoryview(a), lambda a: a.view(np.int16)[::2]]
)
def test_memory_is_not_used_again_while_something_of_it_is_kept(kept):
    decoder = Decoder(Buffers())
    keeps = [kept(received(decoder, value)) for value in range(6)]
    for value, keep in enumerate(keeps):
        assert set(np.asarray(keep).tobytes()) == {value}


def test_memory_that_jax_adopted_is_not_used_again_before_jax_is_done_with_it():
    import jax

    decoder = Decoder(Buffers())
    first = received(decoder, 1)
    address = first.ctypes.data
    adopted = jax.device_put(first)
    assert adopted.unsafe_buffer_pointer() == address, "it was copied"
    del first
    assert received(decoder, 2).ctypes.data != address
    assert set(np.asarray(adopted).tobytes()) == {1}
    del adopted
    gc.collect()  # JAX gives up what it adopted at its next call, or here
    assert address in {array.ctypes.data for array in [received(decoder, 3), received(decoder, 4)]}


def test_no_more_than_three_blocks_are_kept_idle():
    buffers = Buffers()
    lent = [buffers.lend(buffers.take(10**6)) for _ in range(8)]
    addresses = {array.ctypes.data for array in lent}
    lent.clear()
    again = [buffers.take(10**6) for _ in range(3)]
    assert {block.ctypes.data for block in again} <= addresses
    assert not buffers._idle


def test_a_block_is_not_wasted_on_a_much_smaller_message():
    buffers = Buffers()
    buffers.lend(buffers.take(10**6))
    assert len(buffers.take(400_000)) == 400_000
    assert len(buffers.take(600_000)) == 10**6


@given(st.lists(st.integers(1, 10**6), max_size=12))
def test_blocks_that_are_in_use_never_overlap(sizes):
    buffers = Buffers()
    lent = []
    for turn, size in enumerate(sizes):
        block = buffers.take(size)
        assert len(block) >= size
        assert not any(np.shares_memory(block, other) for other in lent)
        lent.append(buffers.lend(block))
        if turn % 3 == 2:
            lent.pop(0)
    assert all(not np.shares_memory(a, b) for a, b in itertools.combinations(lent, 2))
