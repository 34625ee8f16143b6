"""Frames become bytes and back; all damage is detected, and sizes over the limit are rejected."""

import itertools
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._src.wire.errors import DamagedFrameError, ForeignPeerError, WireError
from replicax._src.wire.frames import (
    HEADER_BYTES,
    LARGEST_BODY,
    LARGEST_HEAD,
    SUM_BYTES,
    Header,
    Kind,
    check_body,
    check_head,
    frame_parts,
    parsed_header,
)

kinds = st.sampled_from(list(Kind))


def parsed(data, is_checked):
    """The result of reading the bytes of one frame: its kind, head and body."""
    header = parsed_header(data[:HEADER_BYTES])
    after_head = HEADER_BYTES + header.head_bytes
    after_body = after_head + header.body_bytes
    head, body = data[HEADER_BYTES:after_head], data[after_head:after_body]
    check_head(header, head)
    if is_checked and header.body_bytes:
        check_body(body, data[after_body : after_body + SUM_BYTES])
        after_body += SUM_BYTES
    assert len(data) == after_body
    return header.kind, head, body


@given(kinds, st.binary(max_size=300), st.lists(st.binary(max_size=300), max_size=4), st.booleans())
def test_frames_round_trip(kind, head, body, is_checked):
    data = b"".join(frame_parts(kind, head, body, is_checked=is_checked))
    assert parsed(data, is_checked) == (kind, head, b"".join(body))


def test_a_body_is_not_copied():
    body = np.arange(1000)
    parts = frame_parts(Kind.MESSAGE, b"head", [body.data.cast("B")], is_checked=True)
    assert [np.shares_memory(np.frombuffer(part, np.uint8), body) for part in parts] == [False, True, False]


def test_checksum_does_not_depend_on_the_parts_of_a_body():
    data = bytes(range(256)) * 20
    whole = frame_parts(Kind.MESSAGE, b"", [data], is_checked=True)
    cut = frame_parts(
        Kind.MESSAGE,
        b"",
        [data[:1], data[1:1], bytearray(data[1:999]), memoryview(data)[999:]],
        is_checked=True,
    )
    assert b"".join(whole) == b"".join(cut)


@pytest.mark.parametrize("body", [[], [b""]])
def test_a_frame_without_a_body_has_no_checksum_of_it(body):
    assert len(b"".join(frame_parts(Kind.MESSAGE, b"head", body, is_checked=True))) == HEADER_BYTES + 4


# --- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", bytes(range(100))])
def test_any_changed_byte_is_detected(body):
    data = b"".join(frame_parts(Kind.MESSAGE, b"a head", [body], is_checked=True))
    changed = bytearray(data)
    for at, change in itertools.product(range(len(data)), range(1, 256)):
        changed[at] ^= change
        with pytest.raises(DamagedFrameError):
            parsed(bytes(changed), is_checked=True)
        changed[at] ^= change


@settings(max_examples=300)
@given(kinds, st.binary(max_size=100), st.binary(max_size=100), st.data())
def test_no_damage_makes_another_frame(kind, head, body, data):
    """Two to five bytes, anywhere."""
    sent = bytearray(b"".join(frame_parts(kind, head, [body], is_checked=True)))
    places = st.lists(st.integers(0, len(sent) - 1), min_size=2, max_size=5, unique=True)
    for at in data.draw(places):
        sent[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError):
        parsed(bytes(sent), is_checked=True)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_not_a_header(data):
    with pytest.raises(WireError):
        parsed_header(data)


# --- complete headers with wrong values ---------------------------------------------------------------


def header_of(magic=b"RX", kind=1, head_bytes=0, body_bytes=0):
    """A header with a good checksum."""
    header = struct.pack("<2sBxIQI", magic, kind, head_bytes, body_bytes, zlib.crc32(b""))
    return header + struct.pack("<I", zlib.crc32(header))


def test_largest_lengths_are_accepted():
    got = parsed_header(header_of(head_bytes=LARGEST_HEAD, body_bytes=LARGEST_BODY))
    assert got == Header(Kind.MESSAGE, LARGEST_HEAD, LARGEST_BODY, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"head_bytes": LARGEST_HEAD + 1},
        {"head_bytes": 2**32 - 1},
        {"body_bytes": LARGEST_BODY + 1},
        {"body_bytes": 2**64 - 1},
        {"kind": 0},
        {"kind": 5},
        {"kind": 255},
        {"magic": b"HT"},
    ],
    ids=str,
)
def test_complete_header_with_invalid_values_is_rejected(wrong):
    with pytest.raises(ForeignPeerError):
        parsed_header(header_of(**wrong))
