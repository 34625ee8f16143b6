"""Messages become bytes and back; invalid messages are rejected before memory is allocated for them."""

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
from replicax._ps.transport import messages
from replicax._ps.transport.messages import Decoder, Message, encode
from replicax._src.wire.buffers import ALIGNMENT, Buffers
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
    if not encoded.body:
        return decoder.decode(memoryview(encoded.head))
    body = b"".join(encoded.body)
    decoder.room(memoryview(encoded.head), len(body))[:] = body
    return decoder.filled()


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
    assert_same(decoded(encode(sent)), sent)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([0, 1, 63, 1000, 300_000, 2**20, 2**20 + 1, 5_000_001]), min_size=1, max_size=6)
)
def test_messages_with_a_body_come_back(sizes):
    sent = Message(
        {"op": "x"}, [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    )
    assert_same(decoded(encode(sent)), sent)


def test_one_decoder_takes_messages_after_each_other():
    decoder = Decoder(Buffers())
    for size in (0, 10, 10**6, 20, 10**7, 10**7):
        sent = Message({"n": size}, [np.full(size, size % 251, np.uint8)])
        assert_same(decoded(encode(sent), decoder), sent)


def test_small_messages_are_only_a_head_of_at_most_64_kb():
    sizes = [0, 1, 1000, 60_000, 61_440, 61_441, 70_000]
    encoded = [encode(Message({}, [np.zeros(size, np.uint8)])) for size in sizes]
    assert [not e.body for e in encoded] == [True, True, True, True, True, False, False]
    assert all(len(e.head) <= 64 * 1024 for e in encoded)


def test_large_arrays_are_not_copied_and_lie_in_the_body_in_order():
    large = [np.full(10**6 + extra, extra, np.uint8) for extra in (0, 1, 64)]
    body = encode(Message({}, large)).body
    arrays = [part for part in body if len(part) >= 10**6]
    assert [np.shares_memory(part, array) for part, array in zip(arrays, large, strict=True)] == [True] * 3
    assert [len(part) for part in body if len(part) < 10**6] == [63]  # so that the next one is aligned


def test_small_arrays_beside_a_large_one_lie_in_the_head():
    sent = Message({}, [np.full(1000, 1.0), np.full(10**6, 2.0), np.full(100, 3.0)])
    encoded = encode(sent)
    assert [np.shares_memory(part, sent.arrays[1]) for part in encoded.body] == [True]
    assert len(encoded.head) <= 64 * 1024
    assert_same(decoded(encoded), sent)
    full = encode(Message({}, [np.zeros(30_000, np.uint8) for _ in range(4)]))
    assert sum(map(len, full.body)) == 2 * 30_016


def test_scalars_stay_scalars():
    sent = Message({}, [np.float32(3), np.array(2, np.int64), np.zeros((), ml_dtypes.bfloat16)])
    assert [array.shape for array in decoded(encode(sent)).arrays] == [(), (), ()]


def test_non_contiguous_and_byte_swapped_arrays_are_sent():
    strided = np.arange(12.0).reshape(3, 4).T
    foreign = np.arange(5, dtype=">i4")
    ours, theirs = decoded(encode(Message({}, [strided, foreign]))).arrays
    np.testing.assert_array_equal(ours, strided)
    np.testing.assert_array_equal(theirs, foreign)


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([{}]), np.zeros(2, "M8[s]"), np.zeros(1, "i4,f4")]
)
def test_unsupported_values_raise(array):
    message(MessageError, lambda: encode(Message({}, [array])), "cannot be sent", "float32")


@pytest.mark.parametrize("header", [{"a": np.float32(1)}, {"a": {1, 2}}, {(1, 2): 3}])
def test_header_that_is_not_json_raises(header):
    message(MessageError, lambda: encode(Message(header)), "not JSON")


# --- from unauthenticated peers -------------------------------------------------------------------------


class NoMemory:
    """Buffers from which nothing is taken."""

    def take(self, num_bytes):
        raise AssertionError(f"{num_bytes} bytes were allocated")


def head(header=b"{}", arrays=b"[]", *, sizes=None, behind=b""):
    """A head as bytes; ``sizes`` are the two lengths in it."""
    header, arrays = (
        given if isinstance(given, bytes) else json.dumps(given).encode() for given in (header, arrays)
    )
    return struct.pack("<II", *(sizes or (len(header), len(arrays)))) + header + arrays + behind


def refused(data, *says, body_bytes=0):
    """Checks that a frame with this head, and a body of this size, is rejected before memory is allocated for it."""
    decoder = Decoder(NoMemory())
    if body_bytes:
        message(MessageError, lambda: decoder.room(data, body_bytes), *says)
    else:
        message(MessageError, lambda: decoder.decode(data), *says)


def test_heads_that_are_wrong():
    good = head()
    assert Decoder(NoMemory()).decode(good) == Message({}, [])
    refused(b"", "0 bytes are not a message")
    refused(good[:7], "not a message")
    for sizes in ((2**31, 2), (2, 2**32 - 1), (2**24 + 1, 2)):
        refused(head(sizes=sizes), f"{max(sizes)} bytes was announced")
    refused(head(sizes=(1, 2)), "not JSON")
    refused(head(sizes=(5000, 2)), "at least 5010")
    refused(good[:-1])
    refused(good + b"x", "1 came in the head")
    refused(good, "64 follow it", body_bytes=64)


NO_JSON = [b"", b"\xff", b"{", b"[" * 100_000, b"1" * 5000]


@pytest.mark.parametrize("text", [*NO_JSON, b"[]", b"3", b"null"])
def test_headers_that_are_wrong(text):
    refused(head(text))


@pytest.mark.parametrize("text", [*NO_JSON, b"{}", b"3", b"null"])
def test_lists_of_arrays_that_are_wrong(text):
    refused(head(b"{}", text))


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
        (["float32", [0, 2**61, 2**61]], "are not possible"),
    ],
)
def test_arrays_that_are_wrong(array, says):
    refused(head(arrays=[array]), says)


def test_announced_sizes_are_checked_before_allocation():
    refused(head(arrays=[["float32", [100]]]), "Arrays of 448 and 0 bytes", body_bytes=2**39)
    refused(head(arrays=[["float32", [2**37, 2**37]]]), "bytes were announced", body_bytes=2**30)
    for shape in ([2**20], [2**28]):
        refused(head(arrays=[["float32", shape]]), f"Arrays of 0 and {4 * shape[0]} bytes", body_bytes=64)


def test_arrays_in_the_head_are_as_many_bytes_as_were_announced():
    one = [["float32", [100]]]
    assert len(Decoder(Buffers()).decode(head(arrays=one, behind=bytes(448))).arrays[0]) == 100
    for num_bytes in (0, 400, 447, 449, 10**6):
        refused(head(arrays=one, behind=bytes(num_bytes)), f"{num_bytes} came in the head")


def test_a_body_is_as_many_bytes_as_were_announced():
    announced = head(arrays=[["uint8", [100_000]]])
    assert len(Decoder(Buffers()).room(announced, 100_032)) == 100_032
    for num_bytes in (1, 100_000, 100_031, 100_033, 2**39):
        refused(announced, f"{num_bytes} follow it", body_bytes=num_bytes)
    refused(announced, "0 follow it")


def test_message_without_memory_for_it_is_rejected(monkeypatch):
    def take(self, num_bytes):
        raise MemoryError

    monkeypatch.setattr(Buffers, "take", take)
    sent = encode(Message({}, [np.zeros(10**6, np.uint8)]))
    message(MessageError, lambda: Decoder(Buffers()).room(sent.head, 10**6), "not enough memory", "1000000")


SMALL_HEAD = encode(Message({"op": "step", "n": 3}, [np.arange(6, dtype=np.int32), np.float32(1)])).head
LARGE_HEAD = encode(Message({"op": "step"}, [np.zeros(100_000, np.uint8), np.float32(1)])).head


@settings(max_examples=300)
@given(
    st.binary(max_size=200),
    st.sampled_from([b"", struct.pack("<II", 2, 2), head(), SMALL_HEAD[:20]]),
    st.integers(0, 2**21),
)
def test_random_bytes_are_rejected(data, start, body_bytes):
    decoder = Decoder(Buffers())
    try:
        decoder.room(start + data, body_bytes) if body_bytes else decoder.decode(start + data)
    except MessageError:
        return
    assert not body_bytes
    assert start + data in (head(), head() + bytes(len(data)))


@settings(max_examples=200)
@given(st.sampled_from([(SMALL_HEAD, 0), (LARGE_HEAD, 100_032)]), st.data())
def test_damaged_messages_are_rejected_or_are_other_messages(whole, data):
    sent, body_bytes = bytearray(whole[0]), whole[1]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(sent) - 1))
        sent[at] = data.draw(st.integers(0, 255))
    del sent[data.draw(st.integers(0, len(sent))) :]
    decoder = Decoder(Buffers())
    try:
        if body_bytes:
            assert len(decoder.room(bytes(sent), body_bytes)) == body_bytes
            got = decoder.filled()
        else:
            got = decoder.decode(bytes(sent))
    except MessageError:
        return
    assert sum(array.nbytes for array in got.arrays) <= len(sent) + body_bytes


def test_arrays_that_are_too_large_are_not_sent(monkeypatch):
    monkeypatch.setattr(messages, "LARGEST_BODY", 1000)
    message(
        MessageError,
        lambda: encode(Message({}, [np.zeros(1001, np.uint8)])),
        "at most 1000 can be sent",
        "shards",
    )


def test_headers_that_are_too_large_are_not_sent(monkeypatch):
    monkeypatch.setattr(messages, "LARGEST_HEADER", 100)
    message(MessageError, lambda: encode(Message({"a": "x" * 100})), "at most 100 can be sent", "as arrays")


# --- memory -------------------------------------------------------------------------------------------


def received(decoder, value, size=10**6):
    return decoded(encode(Message({}, [np.full(size, value, np.uint8)])), decoder).arrays[0]


def test_memory_is_reused_when_no_array_uses_it():
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
def test_memory_is_not_reused_while_a_part_is_held(kept):
    decoder = Decoder(Buffers())
    keeps = [kept(received(decoder, value)) for value in range(6)]
    for value, keep in enumerate(keeps):
        assert set(np.asarray(keep).tobytes()) == {value}


def test_memory_adopted_by_jax_is_not_reused_before_jax_releases_it():
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
