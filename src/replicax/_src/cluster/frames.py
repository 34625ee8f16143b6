"""Messages of the control channel on a socket: JSON behind its length. No rules here, they are in hub.py."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, final

from replicax._src.cluster.spec import split_address

_LENGTH = struct.Struct("!I")
_LARGEST = 64 * 2**20


class FrameError(ValueError):
    """What came is no message of a control channel."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


@final
class Decoder:
    """Takes bytes as they come and gives whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that are complete now.

        Raises:
          FrameError: These are no messages; somebody else is talking.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _LARGEST:
                raise FrameError(f"a message of {length} bytes was announced")
            if len(self._buffer) < _LENGTH.size + length:
                return
            text = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            try:
                message = json.loads(text)
            except ValueError as error:
                raise FrameError(f"a message is not JSON: {text[:40]!r}") from error
            if not isinstance(message, dict) or "kind" not in message:
                raise FrameError(f"a message has no kind: {text[:40]!r}")
            yield message


def ask(
    connection: socket.socket, question: Mapping[str, Any], decoder: Decoder, deadline: float
) -> list[dict[str, Any]]:
    """Sends a message, and waits for what is said to it: one message at least.

    Args:
      deadline: When to give up, on the clock of ``time.monotonic``.

    Raises:
      FrameError: Another program is there.
      OSError: It is not, or says nothing in time.
    """
    connection.sendall(encode(question))
    answers: list[dict[str, Any]] = []
    while not answers:
        connection.settimeout(max(0.05, deadline - time.monotonic()))
        data = connection.recv(2**16)
        if not data:
            raise FrameError("it ended the connection; is that port another program's?")
        answers.extend(decoder.feed(data))
    return answers


def bind_host(host: str) -> str:
    """Where to listen for those who reach this machine as ``host``: on all its networks, if that is not loopback only.

    A name may stand for an address that this machine does not have itself: of a Kubernetes service, say.
    """
    if host in ("localhost", "::1") or host.startswith("127."):
        return host
    return "::" if ":" in host else "0.0.0.0"


def listen(address: str, backlog: int) -> socket.socket:
    """A socket that listens on ``host:port``.

    Raises:
      OSError: It cannot; the port may be in use.
    """
    listener = _bound(address, socket.SO_REUSEADDR)  # right after a restart on the same port
    try:
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def bind_shared(address: str) -> socket.socket:
    """A socket that holds ``host:port`` without listening, for a gRPC server of this process: only who shares ports, as
    gRPC does, can bind it too.

    Raises:
      OSError: It cannot; the port may be in use.
    """
    return _bound(address, socket.SO_REUSEPORT)


def _bound(address: str, option: int) -> socket.socket:
    host, port = split_address(address)
    host = bind_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, option, 1)
    if host == "::":
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # those who come by IPv4 too
    try:
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
