"""The handshake: which peers get a connection, what is read from an unauthenticated peer, and the effect of damage."""

import contextlib
import socket
import struct
import threading
import time
import zlib

import pytest

from replicax._src.wire.errors import (
    DamagedFrameError,
    ForeignPeerError,
    PeerEndedError,
    TokenError,
    WireError,
)
from replicax._src.wire.handshake import PROTOCOL, greet_client, greet_server
from replicax._src.wire.streams import PlainStream

pytestmark = pytest.mark.timeout(60)
TOKEN = b"a secret that nobody guesses"
OF_STRANGER = 96
SOON_S = 20.0  # what takes milliseconds on a quiet machine


class Recorded:
    """A stream that records what it sent and received, and may damage one received byte."""

    def __init__(self, connection, flip=None):
        self.connection, self.flip = connection, flip
        self.stream = PlainStream(connection)
        self.sent, self.received = b"", b""

    def write(self, parts, deadline):
        self.stream.write(parts, deadline)
        self.sent += b"".join(parts)

    def read(self, memory, deadline, *, fill):
        count = self.stream.read(memory, deadline, fill=fill)
        if self.flip is not None and 0 <= self.flip[0] - len(self.received) < count:
            memory[self.flip[0] - len(self.received)] ^= self.flip[1]
        self.received += bytes(memory[:count])
        return count


def outcome(call, connection):
    """The result or error of ``call``. The connection is closed if it raises, as a listener and ``connect`` do."""
    try:
        return call()
    except OSError as error:
        connection.connection.close()
        return error


def shaken(
    of_client=TOKEN, of_server=TOKEN, *, flip_at_client=None, flip_at_server=None, wants=(False, False)
):
    """The results of both ends of a handshake, and their recorded sockets: the client's first."""
    client, server = map(Recorded, socket.socketpair(), (flip_at_client, flip_at_server))
    deadline, outcomes = time.monotonic() + 10, []
    serving = threading.Thread(
        target=lambda: outcomes.append(
            outcome(lambda: greet_client(server, of_server, deadline, wants_checksums=wants[1]), server)
        )
    )
    serving.start()
    with client.connection, server.connection:
        got = outcome(lambda: greet_server(client, of_client, deadline, wants_checksums=wants[0]), client)
        serving.join()
    return got, outcomes[0], client, server


# --- with the token and without -----------------------------------------------------------------------


@pytest.mark.parametrize("token", [b"", TOKEN])
@pytest.mark.parametrize("wants", [(False, False), (True, False), (False, True), (True, True)])
def test_two_ends_with_one_token_agree(token, wants):
    of_client, of_server, client, server = shaken(token, token, wants=wants)
    assert of_client is of_server is any(wants)
    assert len(client.sent) == len(server.sent) == OF_STRANGER


@pytest.mark.parametrize(
    ("of_client", "says"),
    [
        (b"", "it was shown no token"),
        (b"wrong", "it was shown a wrong token"),
        (TOKEN[:-1], "it was shown a wrong token"),
    ],
)
def test_client_without_the_token_is_told(of_client, says):
    got, at_server, client, _ = shaken(of_client)
    assert type(got) is type(at_server) is TokenError
    assert says in str(got)
    assert client.received[60:-4].rstrip() == says.encode()  # and gets no proof to guess the token from


def test_server_without_a_token_rejects_one():
    got, at_server, _, _ = shaken(TOKEN, b"")
    assert type(got) is type(at_server) is TokenError


def test_token_is_never_sent():
    for of_client in (TOKEN, b"wrong"):
        _, _, client, server = shaken(of_client)
        for sent in (client.sent, server.sent):
            assert len(sent) == OF_STRANGER
            assert not any(part in sent for part in (TOKEN[:8], TOKEN[-8:], TOKEN.hex()[:16].encode()))


def test_handshakes_differ():
    """No recorded part can be replayed."""
    (_, _, first, first_server), (_, _, second, second_server) = shaken(), shaken()
    assert first.sent[24:56] != second.sent[24:56]
    assert first.sent[60:92] != second.sent[60:92]
    assert first_server.sent[60:92] != second_server.sent[60:92]


# --- unauthenticated peers at a server ------------------------------------------------------------------


def at_server(say, *, seconds=10.0):
    """The server's result for a peer driven by ``say``, its socket, and its answer."""
    theirs, ours = socket.socketpair()
    server = Recorded(ours)
    speaking = threading.Thread(target=say, args=(theirs,))
    speaking.start()
    with theirs, ours:
        got = outcome(
            lambda: greet_client(server, TOKEN, time.monotonic() + seconds, wants_checksums=False), server
        )
        speaking.join()
    return got, server


def hello_of(protocol=PROTOCOL, magic=b"RPLX"):
    hello = struct.pack("<4sHH16x32s", magic, protocol, 0, bytes(32))
    return hello + struct.pack("<I", zlib.crc32(hello))


def test_replayed_handshake_is_rejected():
    _, _, heard, _ = shaken()
    got, _ = at_server(lambda stranger: stranger.sendall(heard.sent))
    assert type(got) is TokenError


def test_another_program_connects():
    got, server = at_server(
        lambda stranger: stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
    )
    assert isinstance(got, ForeignPeerError)
    assert server.sent == b""


def test_another_version_connects_and_is_told_this_version():
    got, server = at_server(lambda stranger: stranger.sendall(hello_of(protocol=PROTOCOL + 1)))
    assert isinstance(got, ForeignPeerError)
    assert f"version {PROTOCOL + 1}" in str(got)
    assert struct.unpack_from("<4sH", server.sent) == (b"RPLX", PROTOCOL)


@pytest.mark.parametrize("said", [b"", b"R", hello_of()[:-1], hello_of(), hello_of() + bytes(35)], ids=len)
def test_unauthenticated_peer_that_closes_early(said):
    def say(stranger):
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)

    assert type(at_server(say)[0]) is PeerEndedError


def test_at_most_96_bytes_are_read_from_an_unauthenticated_peer():
    def say(stranger):
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            stranger.sendall(hello_of() + bytes(2**20))

    got, server = at_server(say)
    assert isinstance(got, WireError)
    assert len(server.received) == OF_STRANGER
    got, server = at_server(lambda stranger: stranger.sendall(bytes(2**10)))
    assert isinstance(got, ForeignPeerError)
    assert len(server.received) <= OF_STRANGER


@pytest.mark.parametrize("first", [b"", hello_of()], ids=["hello", "proof"])
def test_unauthenticated_peer_that_sends_slowly_is_cut_at_the_deadline(first):
    def say(stranger):
        try:
            stranger.sendall(first)
            for byte in hello_of():
                time.sleep(0.2)  # all of it would take 12 s
                stranger.sendall(bytes([byte]))
        except OSError:  # it was cut
            pass

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        raise at_server(say, seconds=0.3)[0]
    assert 0.25 < time.monotonic() - started < 10


# --- other programs that a client meets ---------------------------------------------------------------


def at_client(say, *, seconds=10.0):
    theirs, ours = socket.socketpair()
    client = Recorded(ours)
    speaking = threading.Thread(target=say, args=(theirs,))
    speaking.start()
    with theirs, ours:
        got = outcome(
            lambda: greet_server(client, TOKEN, time.monotonic() + seconds, wants_checksums=False), client
        )
        speaking.join()
    return got, client


def test_another_program_answers():
    got, client = at_client(lambda other: other.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(100)))
    assert isinstance(got, ForeignPeerError)
    assert len(client.sent) == 60  # no proof


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH\r\n", b"R", b"RPLY"])
def test_another_program_is_detected_at_its_first_wrong_byte(says):
    started = time.monotonic()
    got, _ = at_client(lambda other: other.sendall(says), seconds=1.0)
    assert time.monotonic() - started < SOON_S
    assert isinstance(got, TimeoutError if b"RPLX".startswith(says) else ForeignPeerError)


def test_another_version_answers():
    got, client = at_client(lambda other: other.sendall(hello_of(protocol=7)))
    assert isinstance(got, ForeignPeerError)
    assert "version 7" in str(got)
    assert len(client.sent) == 60


def test_a_mirror_does_not_prove_that_it_knows_the_token():
    """It repeats the client's bytes."""

    def say(mirror):
        mirror.sendall(mirror.recv(60, socket.MSG_WAITALL))
        mirror.sendall(mirror.recv(36, socket.MSG_WAITALL))

    assert type(at_client(say)[0]) is TokenError


def test_silent_server_is_given_up_at_the_deadline():
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        raise at_client(lambda other: None, seconds=0.2)[0]
    assert time.monotonic() - started < SOON_S


# --- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(OF_STRANGER))
def test_changed_byte_to_the_server_gives_no_connection(at):
    for got in (*shaken(flip_at_server=(at, 0x01))[:2], *shaken(flip_at_server=(at, 0x80))[:2]):
        assert isinstance(got, WireError | ConnectionError)
        assert not isinstance(got, TokenError)


@pytest.mark.parametrize("change", [0x01, 0x80])
@pytest.mark.parametrize("at", range(OF_STRANGER))
def test_changed_byte_to_the_client_gives_no_connection(at, change):
    at_client, at_server, _, _ = shaken(flip_at_client=(at, change))
    assert isinstance(at_client, WireError)
    assert not isinstance(at_client, TokenError)
    assert isinstance(at_server, WireError | bool)  # it has said its last byte before the client misreads it
    assert not isinstance(at_server, TokenError)


@pytest.mark.parametrize("at", range(60, OF_STRANGER, 5))
def test_changed_rejection_counts_as_damage(at):
    assert type(shaken(b"wrong", flip_at_client=(at, 0x01))[0]) is DamagedFrameError
