"""The relay in front of JAX's coordination service: what it passes, and how it behaves when the service has gone."""

import contextlib
import errno
import socket
import tempfile
import threading

import pytest

from checks import message
from replicax._src.cluster.relay import Relay
from replicax.errors import ClusterStartError


@contextlib.contextmanager
def echoing():
    """The address of an echo server, and the connections that it has accepted."""
    accepted = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                accepted.append(connection)
                threading.Thread(target=echo, args=(connection,)).start()

    def echo(connection):
        with contextlib.suppress(OSError):
            while piece := connection.recv(1 << 16):
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", accepted
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in accepted:
        connection.close()


@contextlib.contextmanager
def connected(relay):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(relay.address.removeprefix("unix:"))
        yield connection


def test_bytes_pass_both_ways_also_after_the_block():
    with echoing() as (address, _):
        with contextlib.ExitStack() as stack:
            with Relay(address) as relay:
                connection = stack.enter_context(connected(relay))
            sent = bytes(range(256)) * 10_000
            threading.Thread(target=connection.sendall, args=(sent,)).start()
            with connection.makefile("rb") as file:
                assert file.read(len(sent)) == sent


def test_a_connection_stays_open_and_silent_when_the_service_has_gone():
    with echoing() as (address, accepted), Relay(address) as relay, connected(relay) as connection:
        connection.sendall(b"ping")
        assert connection.recv(4) == b"ping"
        accepted[0].shutdown(socket.SHUT_RDWR)
        connection.settimeout(0.5)
        for _ in range(3):
            connection.sendall(b"more")
            with pytest.raises(TimeoutError):
                connection.recv(4)


def refuse_sockets_under(monkeypatch, *folders):
    class Socket(socket.socket):
        def bind(self, address):
            if str(address).startswith(folders):
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Socket)


@pytest.mark.parametrize("why", ["no sockets", "a long path"])
def test_unusable_folder_is_replaced_by_the_common_one(why, tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100 if why == "a long path" else "x")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if why == "no sockets":
        refuse_sockets_under(monkeypatch, str(folder))
    with echoing() as (address, _), Relay(address) as relay, connected(relay) as connection:
        connection.sendall(b"ping")
        assert connection.recv(4) == b"ping"
    assert not list(folder.iterdir())


def test_error_names_tmpdir_if_no_socket_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refuse_sockets_under(monkeypatch, str(tmp_path), "/tmp")
    message(ClusterStartError, lambda: Relay("127.0.0.1:1"), "Set TMPDIR to")


def test_no_connection_after_the_block():
    with echoing() as (address, _):
        with Relay(address) as relay, connected(relay):
            pass
        with pytest.raises(FileNotFoundError), connected(relay):
            pass
