"""Shared parts of the tests of the wire: pairs of connections, plain and encrypted, with and without checksums."""

import socket
import threading
import time

import pytest

from certificates import credentials_of_ca
from replicax._src.wire.connection import Connection
from replicax._src.wire.streams import EncryptedStream, PlainStream


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    """``Security`` with mutual TLS."""
    return credentials_of_ca(tmp_path_factory.mktemp("pki"), "a").security()


@pytest.fixture
def sockets():
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture(params=["plain", "plain checked", "TLS", "TLS checked"])
def pair(request, sockets):
    """The two ends of a connection."""
    ours, theirs = sockets
    if "TLS" in request.param:
        security, until, ends = request.getfixturevalue("tls"), time.monotonic() + 30, []
        serving = threading.Thread(
            target=lambda: ends.append(EncryptedStream(theirs, security.server, until))
        )
        serving.start()
        streams = [EncryptedStream(ours, security.client, until, "127.0.0.1")]
        serving.join()
        streams += ends
    else:
        streams = [*map(PlainStream, sockets)]
    is_checked = "checked" in request.param
    pair = tuple(
        Connection(end, stream, "a peer", is_checked=is_checked)
        for end, stream in zip(sockets, streams, strict=True)
    )
    yield pair
    for connection in pair:
        connection.close()


@pytest.fixture
def plain_pair(sockets):
    """The two ends of a connection without TLS, with checksums."""
    pair = tuple(Connection(end, PlainStream(end), "a peer", is_checked=True) for end in sockets)
    yield pair
    for connection in pair:
        connection.close()
