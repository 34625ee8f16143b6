"""``replicax doctor``: what this process would be in which cluster, why, and what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replicax._src.cluster.detect import ResolverChoice, choose_resolver
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.frames import Decoder, FrameError, ask, encode, listen
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.routes import routed_address
from replicax._src.cluster.spec import split_address

_DESCRIPTION: Final = """\
Says which cluster this process would be part of and why, which task it would be, what it has, and whether the other
tasks' addresses answer. Run it on all hosts at the same time, with --wait 60 say: each answers the others, at its own
address. The exit code is 1 if something is wrong.
"""
_PACKAGES: Final = ("replicax", "jax", "jaxlib", "keras", "numpy", "grain", "orbax-checkpoint")
_ATTEMPT_S: Final = 2.0
_RETRY_S: Final = 0.3


@dataclass(frozen=True)
class Answer:
    """What came of connecting to an address.

    Attributes:
      is_good: A replicax process answers there.
      is_wrong: It never will, as it is.
      text: For people.
    """

    is_good: bool
    is_wrong: bool
    text: str


def add_parser(subparsers: Any) -> None:
    """Adds the command ``doctor``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="say which cluster this is, and what is wrong with it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=None,
        metavar="S",
        help="how long the other tasks may take to answer (0)",
    )
    parser.add_argument("--no-devices", action="store_true", help="do not start JAX to look at the devices")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Prints what it finds; returns the exit code."""
    wrong: list[str] = []
    _section("versions", _versions())
    try:
        choice = choose_resolver(os.environ)
    except ClusterError as error:
        print(f"\nwrong: {error}")
        return 1
    _section("cluster", _described(choice))
    if not options.no_devices:
        _section("devices", _devices(wrong))
    if choice.membership.num_workers > 1:
        rows = _addresses(choice.membership, options.wait, os.environ, wrong)
        _section("tasks", rows)
    for text in wrong:
        print(f"\nwrong: {text}")
    if not wrong:
        print("\nnothing is wrong")
    return 1 if wrong else 0


def _section(title: str, rows: Sequence[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in rows), default=0)
    print(f"{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def _versions() -> list[tuple[str, str]]:
    rows = [("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows.append((name, importlib.metadata.version(name)))
    return rows


def _described(choice: ResolverChoice) -> list[tuple[str, str]]:
    membership = choice.membership
    task = "one worker on its own" if not membership.spec else f"{membership.task}"
    if membership.spec and membership.is_chief:
        task += ", which is the chief"
    return [
        ("resolver", f"{choice.name} ({type(choice.resolver).__name__})"),
        ("why", choice.reason),
        *(("not", f"{candidate.name}: {candidate.why}") for candidate in choice.passed_over),
        ("this task", task),
        ("workers", str(membership.num_workers)),
    ]


def _devices(wrong: list[str]) -> list[tuple[str, str]]:
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        wrong.append(f"JAX does not start: {error}")
        return [("jax", "does not start")]
    kinds = {device.device_kind for device in devices}
    return [(devices[0].platform, f"{len(devices)} ({', '.join(sorted(kinds))})")]


# --- the addresses --------------------------------------------------------------------------------------


def _addresses(
    membership: Membership, wait_s: float | None, environ: Mapping[str, str], wrong: list[str]
) -> list[tuple[str, str]]:
    """Listens at this task's address, and asks those of the others."""
    deadline = time.monotonic() + (wait_s or 0)
    with _answering(membership, wrong) as own:
        found: dict[int, Answer] = {}
        threads = []
        for number, (task, address) in enumerate(zip(membership.workers, membership.addresses, strict=True)):
            if task == membership.task:
                continue

            def look(number: int = number, address: str = address) -> None:
                found[number] = _ask(routed_address(address, environ), deadline)

            threads.append(threading.Thread(target=look, daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
        while time.monotonic() < deadline:  # the others may want an answer still
            time.sleep(0.1)
    rows = []
    for number, (task, address) in enumerate(zip(membership.workers, membership.addresses, strict=True)):
        answer = found.get(number)
        rows.append((f"{task}", f"{address:<24} {own if answer is None else answer.text}"))
        if answer is not None and (answer.is_wrong or (wait_s is not None and not answer.is_good)):
            wrong.append(f"{task} at {address} {answer.text}.")
    return rows


@contextlib.contextmanager
def _answering(membership: Membership, wrong: list[str]) -> Iterator[str]:
    """Answers the others at this task's address while the block runs."""
    address = membership.address
    _, port = split_address(address)
    if port == 0:
        yield "this task, which needs no address"
        return
    try:
        listener = listen(address, backlog=16)
    except OSError as error:
        if _ask(address, 0).is_good:
            yield "this task; a job runs there now"
            return
        reason = "its port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        wrong.append(
            f"this task, {membership.task}, cannot listen at its own address {address}: {reason}. The address must be of "
            "this machine, and the port free."
        )
        yield f"this task; {reason}"
        return
    stop = threading.Event()
    thread = threading.Thread(target=_serve, args=(listener, stop), daemon=True)
    thread.start()
    try:
        yield "this task"
    finally:
        stop.set()
        thread.join(timeout=2)
        listener.close()


def _serve(listener: socket.socket, stop: threading.Event) -> None:
    listener.settimeout(0.1)
    while not stop.is_set():
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(1.0)
                connection.recv(2**12)
                connection.sendall(encode({"kind": "pong", "cluster": "doctor"}))


def _ask(address: str, deadline: float) -> Answer:
    """Asks until somebody answers or the time is over; at least once."""
    while True:
        answer = _ask_once(address)
        if answer.is_good or answer.is_wrong or time.monotonic() >= deadline:
            return answer
        time.sleep(_RETRY_S)


def _ask_once(address: str) -> Answer:
    host, port = split_address(address)
    if port == 0:
        return Answer(True, False, "needs no address: it connects to the first")
    try:
        with socket.create_connection((host, port), timeout=_ATTEMPT_S) as connection:
            answer, *_ = ask(connection, {"kind": "ping"}, Decoder(), time.monotonic() + _ATTEMPT_S)
            if answer.get("cluster") == "doctor":
                return Answer(True, False, "answers")
            return Answer(True, False, "answers: a job runs there")
    except socket.gaierror:
        return Answer(False, True, f"is unknown: no host is called {host!r} here")
    except ConnectionRefusedError:
        return Answer(False, False, "does not listen: the host is there, and no task (or doctor) runs on it")
    except FrameError:
        return Answer(False, True, "is another program's")
    except TimeoutError:
        return Answer(
            False, False, "does not answer: the host is down, or a firewall drops what is sent there"
        )
    except OSError as error:
        return Answer(False, False, f"cannot be reached: {error.strerror or error}")
