"""Checks that the addresses of a cluster answer, and answers at this task's own address."""

from __future__ import annotations

import contextlib
import enum
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from replicax._src.cluster.control_messages import ask, receive, send
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.spec import Task, split_address
from replicax._src.drawing.text import printable
from replicax._src.vocabulary.errors import (
    MessageError,
    MissingExtraError,
    UnauthenticatedError,
    UnavailableError,
)
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError, PeerEndedError, TokenError
from replicax._src.wire.listener import Listener
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import listen

_ATTEMPT_S: Final = 2.0
_RETRY_S: Final = 0.3
# Keeps listening after all have answered: each task asks again within the two times above.
_AFTERWARDS_S: Final = 4.0


AskOnce = Callable[[str], "Answer"]


class Outcome(enum.Enum):
    """The result of asking an address."""

    ANSWERS = enum.auto()
    SILENT = enum.auto()  # it may answer later
    WRONG = enum.auto()  # it never will without a change
    UNCHECKED = enum.auto()


@dataclass(frozen=True)
class Answer:
    """The result of asking an address, and its description."""

    outcome: Outcome
    text: str


def ask_all(addresses: Mapping[Task, str], deadline: float, ask_once: AskOnce) -> dict[Task, Answer]:
    """Asks all addresses in parallel, each at least once, until it answers or the deadline passes."""
    found: dict[Task, Answer] = {}

    def look(task: Task, address: str) -> None:
        found[task] = ask_until(address, deadline, ask_once)

    threads = [threading.Thread(target=look, args=item, daemon=True) for item in addresses.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def stay(found: Mapping[Task, Answer], deadline: float) -> None:
    """Waits while other tasks may still ask: a few seconds if all have answered, otherwise until ``deadline``."""
    if all(answer.outcome is Outcome.ANSWERS for answer in found.values()):
        deadline = min(deadline, time.monotonic() + _AFTERWARDS_S)
    while time.monotonic() < deadline:
        time.sleep(0.1)


@contextlib.contextmanager
def answering(address: str, security: Security, ask_once: AskOnce) -> Iterator[Answer]:
    """Answers the other tasks at this task's address while the block runs. Yields the state of the address."""
    host, port = split_address(address)
    if port == 0:
        yield Answer(Outcome.UNCHECKED, "which needs no address")
        return
    try:
        socket.getaddrinfo(host, port)
        listening = listen(host, port)
    except (socket.gaierror, UnicodeError):
        yield Answer(Outcome.WRONG, _unknown(host))
        return
    except OSError as error:
        yield _why_not(error, address, ask_once)
        return
    listener = Listener(listening, security, _answer_pings)
    try:
        yield Answer(Outcome.ANSWERS, "")
    finally:
        listener.close()


def _answer_pings(connection: Connection) -> None:
    deadline = time.monotonic() + _ATTEMPT_S
    receive(connection, deadline)
    send(connection, {"kind": "pong", "cluster": "doctor"}, deadline)
    connection.wait(_ATTEMPT_S)  # lets the peer read the answer and close the connection first


def _why_not(error: OSError, address: str, ask_once: AskOnce) -> Answer:
    if ask_until(address, 0, ask_once).outcome is Outcome.ANSWERS:
        return Answer(Outcome.UNCHECKED, "a job runs there now")
    is_in_use = error.errno == errno.EADDRINUSE
    return Answer(Outcome.WRONG, "its port is in use" if is_in_use else error.strerror or str(error))


def ask_until(address: str, deadline: float, ask_once: AskOnce) -> Answer:
    """Asks at least once, until an answer comes or the deadline passes."""
    while True:
        answer = ask_once(address)
        if answer.outcome is not Outcome.SILENT or time.monotonic() >= deadline:
            return answer
        time.sleep(_RETRY_S)


def ask_channel(address: str, security: Security) -> Answer:
    """Asks a task on the control channel."""
    host, port = split_address(address)
    if port == 0:
        return Answer(
            Outcome.UNCHECKED,
            "cannot be checked from here: its address is not known, it connects to the first",
        )
    try:
        answer = ask(address, {"kind": "ping"}, security, _ATTEMPT_S)
        if answer.get("cluster") == "doctor":
            return Answer(Outcome.ANSWERS, "answers")
        epoch = answer.get("epoch")  # of a job that tolerates failures
        more = f", whose workers are in epoch {epoch:d}" if isinstance(epoch, int) and epoch else ""
        return Answer(Outcome.ANSWERS, f"answers: a job runs there{more}")
    except (socket.gaierror, UnicodeError):
        return Answer(Outcome.WRONG, f"is unknown: {_unknown(host)}")
    except ConnectionRefusedError:
        text = "does not listen: the host is there, and no task (or doctor) runs on it"
        return Answer(Outcome.SILENT, text)
    except TokenError as error:
        return Answer(Outcome.WRONG, f"runs a task of replicax, and refuses this token: {error}")
    except (ForeignPeerError, PeerEndedError):
        return Answer(Outcome.WRONG, "is another program's")
    except TimeoutError:
        return Answer(
            Outcome.SILENT, "does not answer: the host is down, or a firewall drops what is sent there"
        )
    except OSError as error:
        return Answer(Outcome.SILENT, f"cannot be reached: {error.strerror or error}")


def ask_task(address: str, credentials: Credentials) -> Answer:
    """Asks on the control channel, and if the peer does not speak it, with the protocol of parameter servers."""
    answer = ask_channel(address, credentials.security())
    if answer.outcome in (Outcome.ANSWERS, Outcome.UNCHECKED):
        return answer
    try:
        from replicax._ps.transport.transport import TaskClient

        with TaskClient(address, credentials, "task") as client:
            status = client.ask("status", {}, _ATTEMPT_S)
    except UnauthenticatedError:
        return Answer(Outcome.WRONG, "runs `replicax server`, and refuses this token or certificate")
    except (MissingExtraError, MessageError, UnavailableError):
        return answer
    free = "waits for a coordinator" if status["incarnation"] is None else "has a coordinator"
    return Answer(Outcome.ANSWERS, f"answers: {printable(status['task'])} runs there, and {free}")


def _unknown(host: str) -> str:
    return f"no host is called {host!r} here"
