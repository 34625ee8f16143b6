"""The watch: waits for one connection, and notices the end of another one at once."""

import contextlib
import socket
import threading
import time

import pytest

from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import PeerEndedError
from replicax._src.wire.streams import PlainStream
from replicax._src.wire.watch import Watch

pytestmark = pytest.mark.timeout(60)


def soon(seconds=30.0):
    return time.monotonic() + seconds


@pytest.fixture
def pairs():
    """Two connections, each with its other end."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as listening:
                ends = [socket.create_connection(listening.getsockname()), listening.accept()[0]]
            made.append([Connection(end, PlainStream(end), "a peer", is_checked=False) for end in ends])
            for connection in made[-1]:
                stack.callback(connection.close)
        yield made


def later(act):
    threading.Timer(0.1, act).start()


def test_a_watch_waits_for_the_connection_that_is_asked_for(pairs):
    (first, first_peer), (second, second_peer) = pairs
    watch = Watch([first, second])
    second_peer.send_messages([(b"early", ())], soon())
    with pytest.raises(TimeoutError):
        watch.wait(0, soon(0.2))
    later(lambda: first_peer.send_messages([(b"one", ()), (b"two", ())], soon()))
    assert watch.wait(0, soon()) is None
    assert bytes(first.receive(soon())) == b"one"
    assert watch.wait(0, soon()) is None  # the second message came with the first
    assert watch.wait(1, soon()) is None
    assert bytes(second.receive(soon())) == b"early"


def test_the_end_of_another_connection_ends_the_wait_at_once(pairs):
    (first, first_peer), (second, second_peer) = pairs
    watch = Watch([first, second])
    second_peer.send_messages([(b"last words", ())], soon())
    later(second_peer.cancel)
    assert watch.wait(0, soon()) == 1
    assert bytes(second.receive(soon())) == b"last words"
    first_peer.send_messages([(b"data come first", ())], soon())
    assert first.wait(30.0)
    assert watch.wait(0, soon()) is None


@pytest.mark.parametrize("place", [0, 1])
def test_the_end_of_the_awaited_connection_is_for_its_reader_to_see(pairs, place):
    ends = [pair[0] for pair in pairs]
    watch = Watch(ends)
    later(pairs[place][1].cancel)
    assert watch.wait(place, soon()) is None
    with pytest.raises(PeerEndedError):
        ends[place].receive(soon())


def test_a_wait_ends_when_a_connection_is_cancelled_here(pairs):
    (first, _), (second, _) = pairs
    watch = Watch([first, second])
    later(second.cancel)
    assert watch.wait(0, soon()) == 1
    first.cancel()
    assert watch.wait(0, soon()) is None
