"""Two processes send each other bytes over a TCP connection of this machine, which gives an upper bound on
the rate."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from typing import Any

import peer_process


def build(num_bytes: int) -> Any:
    """Starts the other process, and returns functions that send to it and receive from it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = multiprocessing.get_context("spawn").Process(
            target=_echo, args=(listening.getsockname()[1], num_bytes), daemon=True
        )
        other.start()
        connection, _ = listening.accept()
    _set(connection)
    sent, received = bytearray(num_bytes), bytearray(num_bytes)

    def push() -> None:
        connection.sendall(b"<")
        connection.sendall(sent)
        _take(connection, memoryview(received)[:1])

    def pull() -> None:
        connection.sendall(b">")
        _take(connection, memoryview(received))

    def run(count: int) -> dict[str, float]:
        return {"push": _median_s(push, count) * count, "pull": _median_s(pull, count) * count}

    return run


def _median_s(once: Any, count: int) -> float:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _echo(port: int, num_bytes: int) -> None:
    """Receives everything after a ``<``, and sends as many bytes for a ``>``."""
    memory, word = bytearray(num_bytes), bytearray(1)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        _set(connection)
        while _take(connection, memoryview(word)):
            if word == b"<":
                _take(connection, memoryview(memory))
                connection.sendall(b"!")
            else:
                connection.sendall(memory)


def _set(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _take(connection: socket.socket, into: memoryview) -> bool:
    """Fills ``into``; False if the peer has ended."""
    while into:
        count = connection.recv_into(into)
        if not count:
            return False
        into = into[count:]
    return True


if __name__ == "__main__":
    peer_process.answer(build)
