"""One member gives arrays to another one: every dtype, in chunks, with progress, and one error when the world ends."""

import contextlib
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from crowds import Crowd, bits
from replicax._src.collectives.host_sums import gifts
from replicax._src.collectives.host_sums.errors import EpochEnded

pytestmark = pytest.mark.timeout(120)
SOON_S = 40.0  # what takes milliseconds on a quiet machine


@pytest.fixture
def crowd():
    """Three members of their own."""
    crowd = Crowd(3)
    with contextlib.closing(crowd):
        yield crowd


def give_and_take(crowd, worlds, content, arrays):
    def act(place):
        if place == 0:
            worlds[0].give(2, content, arrays)
        return worlds[2].take(0) if place == 2 else None

    return crowd.each(act)[2]


ARRAYS = [
    np.arange(10_000, dtype=np.float32),
    np.array(3.5),
    np.array([], np.int64),
    np.ones((2, 0, 3), np.int8),
    np.array([[True, False]]),
    np.arange(12, dtype=np.int32).reshape(3, 4).T,
    np.array([1.5, np.nan, -0.0], ml_dtypes.bfloat16),
    np.array([1, 2], ml_dtypes.float8_e4m3fn),
    np.array([1 + 2j], np.complex64),
]


@pytest.mark.parametrize("chunk_bytes", [64, gifts.CHUNK_BYTES])
def test_arrays_arrive_bit_for_bit_and_exchanges_follow(crowd, monkeypatch, chunk_bytes):
    monkeypatch.setattr(gifts, "CHUNK_BYTES", chunk_bytes)
    worlds = crowd.meet()
    for content in ({"kind": "sums", "version": 3}, {}):
        gift = give_and_take(crowd, worlds, content, ARRAYS)
        assert gift.content == content
        for array, expected in zip(gift.arrays, ARRAYS, strict=True):
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert bits(array) == bits(expected)
            assert not array.flags.writeable
            assert not array.size or array.ctypes.data % 64 == 0
    results = crowd.each(lambda place: worlds[place].all_reduce("sum", [np.ones(5)], step=0))
    assert all((result == 3).all() for result in results)


def test_a_transfer_of_nothing_arrives(crowd):
    assert list(give_and_take(crowd, crowd.meet(), {"version": 0}, []).arrays) == []


def test_a_slow_transfer_takes_longer_than_the_limit_while_it_makes_progress(crowd, monkeypatch):
    monkeypatch.setattr(gifts, "CHUNK_BYTES", 1000)
    worlds = crowd.meet()
    for world in worlds:
        world._timeout_s = 1.0
    chunks = gifts._chunks

    def slow(memories):
        for chunk in chunks(memories):
            time.sleep(0.02)
            yield chunk

    monkeypatch.setattr(gifts, "_chunks", slow)
    start = time.monotonic()
    gift = give_and_take(crowd, worlds, {}, [np.arange(20_000, dtype=np.float32)])
    assert time.monotonic() - start > 1.5
    assert gift.arrays[0][-1] == 19_999


def test_a_transfer_that_does_not_come_ends_in_time_and_blames_the_giver(crowd):
    worlds = crowd.meet()
    worlds[2]._timeout_s = 0.3
    with pytest.raises(EpochEnded, match="worker 0") as caught:
        worlds[2].take(0)
    assert caught.value.lost == caught.value.blamed == 0


@pytest.mark.parametrize("place", [0, 2])
def test_the_end_of_the_epoch_ends_a_transfer_at_once(crowd, monkeypatch, place):
    worlds = crowd.meet()
    chunks, has_begun, is_cancelled = gifts._chunks, threading.Event(), threading.Event()
    giver = []

    def held(memories):
        """The giver stops after a chunk, until the world has ended."""
        for index, chunk in enumerate(chunks(memories)):
            if index == 1 and giver == [threading.get_ident()]:
                has_begun.set()
                is_cancelled.wait(SOON_S)
            yield chunk

    monkeypatch.setattr(gifts, "CHUNK_BYTES", 1_000_000)
    monkeypatch.setattr(gifts, "_chunks", held)

    def act(each):
        if each == 0:
            giver.append(threading.get_ident())
            worlds[0].give(2, {}, [np.ones(10**6)])
        elif each == 2:
            worlds[2].take(0)
        else:
            assert has_begun.wait(SOON_S)
            worlds[place].cancel("it is enough")
            is_cancelled.set()
            worlds[2 - place].cancel("it is enough")  # the controller tells all

    start = time.monotonic()
    error = crowd.failures(act)[2]
    assert isinstance(error, EpochEnded)
    assert error.blamed is None
    assert time.monotonic() - start < SOON_S


def test_a_member_that_exchanges_while_another_one_takes_ends_the_epoch_of_both(crowd):
    worlds = crowd.meet()

    def act(place):
        if place == 2:
            return worlds[2].take(0)
        return worlds[place].all_reduce("sum", [np.ones(5)], step=0)

    for error in crowd.failures(act):
        assert isinstance(error, EpochEnded), repr(error)


def test_a_transfer_of_another_epoch_or_form_is_refused(crowd, monkeypatch):
    def sends(text):
        worlds = crowd.meet()

        def act(place):
            if place == 0:
                worlds[0]._links[2].connection.send(
                    [(1, text(worlds[0].epoch), ())], time.monotonic() + SOON_S
                )
            if place == 2:
                worlds[2].take(0)

        return crowd.failures(act)[2]

    head = gifts._HEAD
    for text in (
        lambda epoch: head.pack(b"gift", epoch + 1, 0) + b'{"content": {}, "arrays": []}',
        lambda epoch: head.pack(b"gift", epoch, 1) + b'{"content": {}, "arrays": []}',
        lambda epoch: head.pack(b"gift", epoch, 0) + b"[]",
        lambda epoch: head.pack(b"gift", epoch, 0) + b'{"content": {}, "arrays": [["object", [1]]]}',
        lambda epoch: head.pack(b"gift", epoch, 0) + b'{"content": {}, "arrays": [["no dtype", [1]]]}',
        lambda epoch: b"",
    ):
        assert isinstance(sends(text), EpochEnded)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_others_wait_for_transfers_that_take_longer_than_an_exchange_may(monkeypatch, shares_memory):
    chunks = gifts._chunks

    def slow_chunks(memories):
        for chunk in chunks(memories):
            time.sleep(0.3)
            yield chunk

    timeout_s, arrays = 0.8, [np.arange(100_000, dtype=np.float32)] * 7
    monkeypatch.setattr(gifts, "_chunks", slow_chunks)
    crowd = Crowd(4, shares_memory=shares_memory)
    with contextlib.closing(crowd):
        worlds = crowd.meet()
        started = time.monotonic()
        for world in worlds:
            world._timeout_s = timeout_s
        for place in (1, 2, 3):
            worlds[place].giver = 0

        def act(place):
            if place == 0:
                worlds[0].give(1, {}, arrays)
                worlds[0].give(2, {}, arrays)
                worlds[0].end_gifts()
            elif place < 3:
                worlds[place].take(0)
            return [
                worlds[place].all_reduce("sum", [np.full(100_000, place + 1.0)], step=step)
                for step in range(2)
            ]

        results = crowd.each(act)
        assert time.monotonic() - started > 4 * timeout_s
        for sums in results:
            assert all((each == 10.0).all() for each in sums)


def test_giver_that_stops_without_a_word_is_blamed_by_all(crowd, monkeypatch):
    worlds = crowd.meet()
    worlds[1]._timeout_s = worlds[2]._timeout_s = 0.5
    worlds[1].giver = worlds[2].giver = 0

    def act(place):
        if place == 2:
            worlds[2].take(0)
        if place == 1:
            worlds[1].all_reduce("sum", [np.ones(3)], step=0)

    failures = crowd.failures(act)
    assert all(isinstance(each, EpochEnded) for each in failures[1:])
    assert 0 in {each.blamed for each in failures[1:]}
