"""Sends and receives messages of the control channel: JSON objects with a ``kind``. controller.py has the rules."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.routes import routed_address
from replicax._src.cluster.spec import split_address
from replicax._src.untrusted.strict_json import Form, JsonReader, TextError, read_json
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.wire.client import connect as wire_connect
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError
from replicax._src.wire.frames import Kind
from replicax._src.wire.security import Security

_GONE: Final = (JsonReader.count, JsonReader.string, JsonReader.string)
_READING: Final = (JsonReader.integer, JsonReader.count, JsonReader.string)
_STATUS: Final[Mapping[str, Form[Any]]] = {
    "at": JsonReader.string,
    "callback": JsonReader.string,
    "doing": JsonReader.string,
    "done": JsonReader.integer,
    "is_solo": JsonReader.flag,
    "position": JsonReader.integer,
    "program": lambda it: it.optional(JsonReader.string),
    "reading": lambda it: it.optional(lambda reading: reading.fixed(*_READING)),
    "reads": JsonReader.count,
}
_MESSAGE: Final[Mapping[str, Form[Any]]] = {
    "addresses": lambda it: it.items(JsonReader.string),
    "behind": lambda it: it.items(JsonReader.count),
    "blamed": lambda it: it.optional(JsonReader.count),
    "cluster": lambda it: it.optional(JsonReader.string),
    "digest": lambda it: it.optional(JsonReader.string),
    "entering": lambda it: it.items(JsonReader.count),
    "epoch": JsonReader.count,
    "figures": lambda it: it.table(JsonReader.anything),
    "gone": lambda it: it.items(lambda each: each.fixed(*_GONE)),
    "is_final": JsonReader.flag,
    "is_open": JsonReader.flag,
    "key": JsonReader.string,
    "member": JsonReader.count,
    "members": lambda it: it.items(JsonReader.count),
    "min_workers": lambda it: it.optional(JsonReader.count),
    "position": lambda it: it.optional(JsonReader.integer),
    "purpose": lambda it: it.table(JsonReader.string),
    "reason": JsonReader.string,
    "num_left": JsonReader.count,
    "round": JsonReader.count,
    "since": JsonReader.count,
    "solo": lambda it: it.items(JsonReader.count),
    "source": JsonReader.count,
    "started": JsonReader.integer,
    "status": lambda it: it.record({}, _STATUS, others=True),
    "text": JsonReader.string,
    "values": lambda it: list(it.items(JsonReader.anything)),
    "version": lambda it: it.optional(JsonReader.count),
}
"""Each field has one type in all messages. Fields that are not listed are not checked here."""


def security_of(environ: Mapping[str, str] | None = None) -> Security:
    """Returns the secrets that the control channel asks of its peers: ``REPLICAX_TOKEN`` and the TLS files of the
    environment.

    Raises:
      ClusterEnvironmentError: The variables contradict each other, or a file cannot be read.
    """
    environ = os.environ if environ is None else environ
    try:
        return Credentials.from_environment(environ).security(environ)
    except InvalidArgumentError as error:
        raise ClusterEnvironmentError(f"REPLICAX_TLS_… in the environment: {error}") from error


def connect(
    address: str, security: Security, deadline: float, environ: Mapping[str, str] | None = None
) -> Connection:
    """Connects to a controller, along the route of ``REPLICAX_ROUTES`` if there is one.

    Raises:
      OSError: No controller answers in time, or another program answers; see ``wire.client.connect``.
    """
    route = split_address(routed_address(address, os.environ if environ is None else environ))
    return wire_connect(*route, security, deadline, certified_as=split_address(address)[0])


def send(connection: Connection, message: Mapping[str, Any], deadline: float) -> None:
    """Sends a message.

    Raises:
      OSError: The peer did not read the message in time, or the connection has ended.
    """
    send_text(connection, text_of(message), deadline)


def text_of(message: Mapping[str, Any]) -> bytes:
    """Returns a message as it is sent."""
    return json.dumps(message).encode()


def send_text(connection: Connection, text: bytes, deadline: float) -> None:
    """Sends the text of a message, which may go to several peers.

    Raises:
      OSError: The peer did not read the message in time, or the connection has ended.
    """
    connection.send([(Kind.MESSAGE, text, ())], deadline)


def receive(connection: Connection, deadline: float) -> dict[str, Any]:
    """Waits for the next message.

    Raises:
      ForeignPeerError: The peer sent something that is not a message.
      OSError: No message arrived in time, or the connection has ended.
    """
    return checked(bytes(connection.receive(deadline) or b""))


def checked(text: bytes) -> dict[str, Any]:
    """Returns the message that a peer has sent.

    Raises:
      ForeignPeerError: The text is not a message.
    """
    try:
        return JsonReader(read_json(text), "it").record({"kind": JsonReader.string}, _MESSAGE, others=True)
    except TextError as error:
        raise ForeignPeerError(f"{text[:40]!r} is not a message: {error}") from error


def ask(
    address: str,
    question: Mapping[str, Any],
    security: Security,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Connects to a controller, sends a message and returns the answer.

    Raises:
      OSError: See ``connect`` and ``receive``.
    """
    deadline = time.monotonic() + timeout_s
    connection = connect(address, security, deadline, environ)
    try:
        send(connection, question, deadline)
        return receive(connection, deadline)
    finally:
        connection.close()
