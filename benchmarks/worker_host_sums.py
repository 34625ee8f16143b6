"""One process of ``host_sums.py``: an all-reduce of host arrays, in shared memory or over connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import peer_process
import worker_timing
from replicax._src.cluster.spec import split_address
from replicax._src.collectives.host_sums.members import Member
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.wire.security import Security
from worker_timing import Run

LIMIT_S = 300.0


def build(index: int, addresses: Sequence[str], shares_memory: bool) -> Run:
    """Answers the commands of the benchmark."""
    host, port = split_address(addresses[index])
    rendezvous = Rendezvous(host, Security(b"a benchmark"), port=port, shares_memory=shares_memory)
    members = [
        Member(number, f"worker {number}", address, (number,)) for number, address in enumerate(addresses)
    ]
    for member in members:  # a member that does not listen is lost, so all must listen first
        _wait_for(member.address)
    world = rendezvous.meet(0, members, index, LIMIT_S)
    steps = iter(range(2**62))

    def make(size: int) -> Callable[[], Any]:
        value = np.ones(size // 4, np.float32)
        return lambda: world.all_reduce("sum", [value], step=next(steps))

    return worker_timing.of_sizes(make, lambda total: total, len(addresses))


def _wait_for(address: str) -> None:
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            socket.create_connection(split_address(address)).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    peer_process.answer(build)
