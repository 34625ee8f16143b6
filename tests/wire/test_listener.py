"""The listener: unauthenticated peers cost little and block no other; peers with the token are served."""

import contextlib
import errno
import os
import socket
import threading
import time

import pytest

from replicax._src.wire import listener as listeners
from replicax._src.wire.acceptor import MOST_UNAUTHENTICATED
from replicax._src.wire.client import connect
from replicax._src.wire.connection import FOREVER
from replicax._src.wire.errors import PeerEndedError, TokenError, WireError
from replicax._src.wire.frames import Kind
from replicax._src.wire.listener import Listener
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import listen

pytestmark = pytest.mark.timeout(120)
TOKEN = Security(b"secret")
MB = 2**20
SOON_S = 30.0  # what takes milliseconds on a quiet machine


def soon(seconds=SOON_S):
    return time.monotonic() + seconds


def wait_until(condition, limit_s=SOON_S):
    deadline = soon(limit_s)
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {limit_s} s"
        time.sleep(0.005)


class Echo:
    """A listener that echoes, with the number of the connection in front."""

    def __init__(self, security=TOKEN, host="127.0.0.1"):
        self.num_rejected, self.num_served = 0, 0
        self.listener = Listener(listen(host, 0, 512), security, self.serve, self.rejected)
        self.host = host

    def serve(self, connection):
        number = self.num_served = self.num_served + 1
        while True:
            head = connection.receive(FOREVER)
            connection.send([(Kind.MESSAGE, b"%d " % number + bytes(head), ())], soon())

    def rejected(self):
        self.num_rejected += 1

    def connect(self, security=TOKEN, seconds=2 * SOON_S):
        return connect(self.host, self.listener.port, security, soon(seconds))

    def raw(self):
        """An unauthenticated peer."""
        return socket.create_connection((self.host, self.listener.port))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()


@pytest.fixture
def echo():
    with Echo() as echo:
        yield echo


@pytest.fixture
def patient(monkeypatch):
    """A peer may take longer to authenticate than anything else here: what is cut before is not cut for its time."""
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 3 * SOON_S)


def said(connection, text=b"hello"):
    connection.send([(Kind.MESSAGE, text, ())], soon())
    return bytes(connection.receive(soon()))


def assert_serves(echo, security=TOKEN):
    started = time.monotonic()
    friend = echo.connect(security)
    assert said(friend).endswith(b" hello")
    friend.close()
    assert time.monotonic() - started < SOON_S


def is_cut(stranger):
    """True if the listener has ended this connection."""
    stranger.setblocking(False)
    try:
        return stranger.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def num_threads():
    return sum(thread.name == "replicax peer" for thread in threading.enumerate())


# --- peers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_peers_are_served_independently(is_encrypted, tls):
    security = tls if is_encrypted else TOKEN
    with Echo(security) as echo:
        friends = []
        for n in range(1, 6):
            friends.append(echo.connect(security))
            assert said(friends[-1]) == b"%d hello" % n
        for n, friend in reversed(list(enumerate(friends))):
            assert said(friend, b"x" * n) == b"%d " % (n + 1) + b"x" * n
        friends[2].close()
        assert said(friends[3]) == b"4 hello"
        for friend in friends:
            friend.close()
        assert echo.num_served == 5
        assert echo.num_rejected == 0
    wait_until(lambda: not num_threads())


def test_handshakes_do_not_wait_for_each_other(tls):
    """A system delays small packets for 40 ms, unless it is told not to."""
    with Echo(tls) as echo:
        took = [1.0]
        while min(took) > 0.03 and len(took) < 100:  # on a busy machine most take longer
            started = time.monotonic()
            friend = echo.connect(tls)
            took.append(time.monotonic() - started)
            friend.close()
    assert min(took) <= 0.03


def test_the_connection_is_closed_when_its_peer_is_served(echo, monkeypatch):
    served = []
    monkeypatch.setattr(echo.listener, "_serve", lambda connection: served.append(connection))
    friend = echo.connect()
    with pytest.raises(PeerEndedError):
        friend.receive(soon())
    wait_until(lambda: served and served[0]._socket.fileno() == -1)
    friend.close()


@pytest.mark.parametrize("of_peer", [b"wrong", b""])
def test_peer_without_the_token_is_told_and_counted(echo, of_peer):
    for number in range(1, 4):
        with pytest.raises(TokenError):
            echo.connect(Security(of_peer))
        wait_until(lambda number=number: echo.num_rejected == number)
    assert echo.num_served == 0
    assert_serves(echo)
    assert echo.num_rejected == 3


def test_checksums_are_used_if_one_end_wants_them(echo):
    """On loopback there are none, unless one end requests them."""
    for of_client in (False, True):
        friend = echo.connect(Security(b"secret", always_checks=of_client))
        assert friend._is_checked is of_client
        friend.close()


def test_closed_listener_accepts_no_peer_and_served_peers_continue(echo, patient):
    friend = echo.connect()
    assert said(friend).endswith(b" hello")  # it is served, and no stranger any more
    stranger = echo.raw()
    wait_until(lambda: echo.listener._acceptor.num_unauthenticated)
    echo.listener.close()
    wait_until(lambda: is_cut(stranger))
    with pytest.raises(OSError) as refused:
        echo.connect()
    assert not isinstance(refused.value, TimeoutError)
    assert said(friend).endswith(b" hello")
    friend.close()
    stranger.close()
    wait_until(lambda: not num_threads())


# --- unauthenticated peers ------------------------------------------------------------------------------


def memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


@pytest.mark.parametrize("is_encrypted", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_300_idle_unauthenticated_peers_block_no_other(is_encrypted, tls, patient, monkeypatch):
    security = tls if is_encrypted else TOKEN
    with Echo(security) as echo, contextlib.ExitStack() as strangers:
        assert_serves(echo, security)
        before = memory()
        idle = [strangers.enter_context(echo.raw()) for _ in range(300)]
        assert_serves(echo, security)
        wait_until(lambda: echo.listener._acceptor.num_unauthenticated <= MOST_UNAUTHENTICATED)
        wait_until(lambda: num_threads() <= MOST_UNAUTHENTICATED + 10)  # those of the oldest end
        num_cut = sum(map(is_cut, idle))
        assert num_cut == 301 - MOST_UNAUTHENTICATED  # the friend takes a place for a moment
        assert all(map(is_cut, idle[:num_cut]))  # the oldest ones
        assert memory() < before + 30 * MB
        for stranger in idle:
            stranger.close()
        wait_until(lambda: not echo.listener._acceptor.num_unauthenticated and not num_threads())
        assert echo.num_rejected == 300
        monkeypatch.setattr(listeners, "HANDSHAKE_S", 1.0)
        started = time.monotonic()
        idle = [strangers.enter_context(echo.raw()) for _ in range(300)]
        wait_until(lambda: all(map(is_cut, idle)))
        assert time.monotonic() - started > 0.9
        wait_until(lambda: not echo.listener._acceptor.num_unauthenticated and not num_threads())
        assert echo.num_rejected == 600
        assert_serves(echo, security)


def test_flood_of_unauthenticated_peers_is_bounded(echo, patient):
    most = 0
    with contextlib.ExitStack() as strangers:
        for _ in range(600):
            strangers.enter_context(echo.raw())
            most = max(most, echo.listener._acceptor.num_unauthenticated)
        assert most <= MOST_UNAUTHENTICATED
        assert_serves(echo)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_unauthenticated_peer_that_sends_slowly_is_cut_in_time(is_encrypted, tls, monkeypatch):
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 0.4)
    first = b"\x16\x03\x01\x02\x00" if is_encrypted else b"RPLX"
    with Echo(tls if is_encrypted else TOKEN) as echo, echo.raw() as slow:
        started = time.monotonic()
        for byte in first + bytes(1000):
            if is_cut(slow):
                break
            with contextlib.suppress(OSError):
                slow.send(bytes([byte]))
            time.sleep(0.05)
        assert 0.35 < time.monotonic() - started < SOON_S
        wait_until(lambda: echo.num_rejected == 1)


def test_unauthenticated_peer_with_an_endless_tls_handshake_is_cut_early(tls, patient):
    """OpenSSL alone would read 128 KB of a first message, and wait for its end."""
    hello = b"\x01" + (100_000).to_bytes(3, "big") + bytes(60_000)
    records = [hello[start : start + 10_000] for start in range(0, len(hello), 10_000)]
    with Echo(tls) as echo, echo.raw() as stranger:
        with contextlib.suppress(OSError):  # it is cut while it says this
            for record in records:
                stranger.sendall(b"\x16\x03\x01" + len(record).to_bytes(2, "big") + record)
        wait_until(lambda: is_cut(stranger))
        assert_serves(echo, tls)


def test_data_of_an_unauthenticated_peer_cost_no_memory(echo):
    before = memory()
    for _ in range(20):
        with echo.raw() as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(b"RPLX" + bytes(MB))
    wait_until(lambda: echo.num_rejected == 20)
    assert memory() < before + 10 * MB
    assert_serves(echo)


@pytest.mark.parametrize("direction", ["plain to TLS", "TLS to plain"])
def test_one_end_with_tls_and_one_without_fail_at_once(direction, tls, patient):
    plain = Security()
    of_server, of_client = (tls, plain) if direction == "plain to TLS" else (plain, tls)
    with Echo(of_server) as echo:
        started = time.monotonic()
        with pytest.raises(OSError) as failed:
            echo.connect(of_client)
        assert time.monotonic() - started < SOON_S
        assert not isinstance(failed.value, TimeoutError | TokenError)
        wait_until(lambda: echo.num_rejected == 1)
        assert_serves(echo, of_server)


def test_a_connection_that_fails_leaves_no_descriptor(tls):
    with Echo() as plain, Echo(tls) as encrypted:

        def fail() -> None:
            for echo, of_client in ((plain, Security(b"wrong")), (plain, tls), (encrypted, TOKEN)):
                for _ in range(5):
                    with pytest.raises(OSError):
                        echo.connect(of_client)
            with pytest.raises(OSError):
                connect("127.0.0.1", 1, TOKEN, soon())
            with plain.raw(), encrypted.raw():  # and one that says nothing
                pass

        fail()
        wait_until(lambda: not num_threads())
        held = len(os.listdir("/proc/self/fd"))
        fail()
        # Wait for this, too: a listener may accept a connection after its client has gone.
        wait_until(lambda: not num_threads() and len(os.listdir("/proc/self/fd")) <= held)


# --- when the process has nothing left ----------------------------------------------------------------


class OutOfDescriptors:
    """A listening socket that cannot accept for a while."""

    def __init__(self, listening):
        self.listening, self.is_out, self.num_failed = listening, True, 0

    def accept(self):
        if self.is_out:
            self.num_failed += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listening.accept()

    def __getattr__(self, name):
        return getattr(self.listening, name)


def test_listener_without_descriptors_waits_and_continues(echo):
    out = echo.listener._acceptor._listening = OutOfDescriptors(echo.listener._acceptor._listening)
    assert_serves(echo)  # by the call that waits already
    wait_until(lambda: out.num_failed)
    before, started = out.num_failed, time.monotonic()
    time.sleep(0.5)
    num_failed = out.num_failed - before
    assert num_failed <= (time.monotonic() - started) / 0.1 + 2  # not as fast as it can
    out.is_out = False
    assert_serves(echo)
    echo.listener._acceptor._listening = out.listening


def test_listener_without_threads_rejects_a_peer_and_continues(echo, monkeypatch):
    start = threading.Thread.start

    def fails(thread):
        if thread.name == "replicax peer":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        started = time.monotonic()
        with pytest.raises((WireError, ConnectionError)):
            echo.connect()
        assert time.monotonic() - started < SOON_S
    assert not echo.listener._acceptor.num_unauthenticated
    assert_serves(echo)


def test_name_not_resolved_in_time_raises(echo, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: may_end.wait(2 * SOON_S))
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        echo.connect(seconds=0.2)
    may_end.set()
    assert time.monotonic() - started < SOON_S
