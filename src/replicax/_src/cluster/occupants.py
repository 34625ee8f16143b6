"""The program that listens at the address of a task but is no task of the cluster: what it is, for messages."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from replicax._src.cluster.routes import routed_address
from replicax._src.cluster.spec import split_address
from replicax._src.drawing.text import printable
from replicax._src.wire.sockets import seconds_left

_REQUEST: Final = b"GET / HTTP/1.0\r\n\r\n"
_MOST_BYTES: Final = 60
SILENT: Final = (
    "a program there takes connections and says nothing: it is no task of this job, or it is stopped"
)


class Occupant(NamedTuple):
    """The program at an address.

    Attributes:
      text: The program in words.
      answers: True if it answers, so that it is no task of a cluster.
    """

    text: str
    answers: bool = False


def describe_other_program(address: str, timeout_s: float) -> str:
    """Returns in words which program listens at an address. It blocks for up to ``timeout_s``."""
    return occupant_of(address, timeout_s).text


def occupant_of(address: str, timeout_s: float, environ: Mapping[str, str] | None = None) -> Occupant:
    """Returns the program that listens at an address, by its answer to a request of the web's protocol.

    It blocks for up to ``timeout_s``.
    """
    route = split_address(routed_address(address, os.environ if environ is None else environ))
    deadline = time.monotonic() + timeout_s
    said = b""
    try:
        with socket.create_connection(route, timeout_s) as connection:
            connection.sendall(_REQUEST)
            while len(said) < _MOST_BYTES:
                connection.settimeout(seconds_left(deadline))
                if not (part := connection.recv(_MOST_BYTES - len(said))):
                    break
                said += part
    except ConnectionRefusedError:
        return Occupant("no program listens there now")
    except OSError:  # out of time, or reset
        pass
    if said.startswith(b"HTTP/"):
        return Occupant(f"a web server listens there ({_line(said)})", answers=True)
    if said:
        return Occupant(f"a program that says {_line(said)!r} listens there", answers=True)
    is_out_of_time = time.monotonic() >= deadline
    return Occupant(SILENT if is_out_of_time else "a program there closes each connection at once")


def _line(said: bytes) -> str:
    return printable(said.decode(errors="replace").splitlines()[0])
