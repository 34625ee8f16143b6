"""``JobSums``: sums on the hosts of a job that a death ends. ``joined_sums`` connects its processes.

The processes agree on the transport when they start: shared memory between those of one host, connections between the
others, and the collectives of JAX if one of them cannot be reached, which is not an error. A death, or a process that
does something else, is the same error as in a program of several processes.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, final

import numpy as np

from replicax._src.cluster.control_messages import security_of
from replicax._src.cluster.failures import ClusterFailureError, PeerFailureError, again
from replicax._src.cluster.peers import Peers
from replicax._src.collectives.host_sums.errors import EpochEnded
from replicax._src.collectives.host_sums.members import Member
from replicax._src.collectives.host_sums.ordered_addition import can_add
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.collectives.host_sums.world import World
from replicax._src.vocabulary.errors import ReplicaxError

log = logging.getLogger("replicax")
MOST_PROCESSES: Final = 8
"""The most processes that add on their hosts. Each two have a connection."""
_MEETING_S: Final = 10.0
_REASON_S: Final = 5.0
"""The time that a lost connection waits for its cause, the failure of another task."""
_LATER_S: Final = 10.0
"""The time by which an exchange ends after the controller's limit, whose error names what each task does."""


@final
class JobSums:
    """Sums between the processes of a job; see ``devices/sums_of_processes.py``.

    Args:
      peers: The processes.
      world: All of them, connected.
    """

    def __init__(self, peers: Peers, world: World):
        self._peers, self._world = peers, world
        self._labels: dict[str, str] = {}
        self._position, self._num_exchanges = -1, 0
        peers.watchdog.on_unblock = lambda: world.cancel("the tasks cannot continue together")

    @property
    def transport(self) -> str:
        """The transport in words."""
        sharing = len(self._world.statistics()["shares_memory_with"])
        if not sharing:
            return "connections"
        return "shared memory" if sharing == len(self._peers) - 1 else "shared memory and connections"

    def can_add(self, dtype: np.dtype) -> bool:
        """True if arrays of a dtype can be added."""
        return can_add(dtype)

    def program(self, name: str, text: str) -> AbstractContextManager[None]:
        """Wraps the exchanges of one program; see ``SumsOfProcesses``."""
        label = self._labels.get(text)
        if label is None:
            label = self._labels[text] = self._peers.agree(name, f"{name} on the hosts\n{text}")
        return self._peers.running(label, is_new=False)

    def all_reduce(self, op: Literal["sum", "max", "min"], arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Combines one array of each replica; see ``World.all_reduce``.

        Raises:
          ClusterFailureError: Another process is gone, or exchanges something else.
        """
        position = self._peers.position
        number = self._num_exchanges + 1 if position == self._position else 0
        self._position, self._num_exchanges = position, number
        try:
            return self._world.all_reduce(op, arrays, step=position, round=number)
        except EpochEnded as ended:
            raise self._failure(ended) from None

    def _failure(self, ended: EpochEnded) -> ClusterFailureError:
        failure = self._peers.wait_for_failure(_REASON_S)
        if failure is not None:
            return again(failure)
        lost = () if ended.lost is None else (self._peers.names[ended.lost],)
        return PeerFailureError(
            f"The processes cannot add arrays any more: {ended.reason}. End this process, and start the job again.",
            lost,
        )


_joined: list[JobSums | None] = []  # of this process, which joins a job once


def joined_sums(peers: Peers, host: str, replicas_each: int, timeout_s: float) -> JobSums | None:
    """Connects the processes of a job for sums on their hosts. All call it, in the same order. The first call counts.

    Args:
      peers: The processes.
      host: The name or address by which the others reach this host; empty if it is not known.
      replicas_each: The number of replicas of each process.
      timeout_s: The controller's limit for waits.

    Returns:
      None if one of them cannot take part: then all use the collectives of JAX.
    """
    if not _joined:
        _joined.append(_connected(peers, host, replicas_each, timeout_s))
    return _joined[0]


def _connected(peers: Peers, host: str, replicas_each: int, timeout_s: float) -> JobSums | None:
    if len(peers) > MOST_PROCESSES:
        return None
    rendezvous, why = None, "" if host else "its own address is not known"
    try:
        rendezvous = Rendezvous(host, security_of()) if host else None
    except (OSError, ReplicaxError) as error:
        why = f"it cannot listen at {host}: {error}"
    address = "" if rendezvous is None else rendezvous.address
    purpose = "to connect the workers for sums on their hosts"
    found = peers.gather("addresses of sums", [address, why], purpose)
    whys: Sequence[Any] = [each[1] for each in found]
    world = None
    if rendezvous is not None and not any(whys):
        members = [
            Member(n, peers.names[n], each[0], tuple(range(n * replicas_each, (n + 1) * replicas_each)))
            for n, each in enumerate(found)
        ]
        try:
            world = rendezvous.meet(0, members, peers.number, _MEETING_S, exchange_s=timeout_s + _LATER_S)
        except (EpochEnded, ReplicaxError) as error:
            why = str(error)
            rendezvous.end(0, why)
        whys = list(peers.gather("connections of sums", why, purpose))
    if rendezvous is None or world is None or any(whys):
        if rendezvous is not None:
            rendezvous.close()
        first = next(n for n, each in enumerate(whys) if each)
        log.info(
            "Sums between workers go through the collectives of JAX, not through the hosts' memory and connections, "
            "which is slower. %s: %s",
            peers.names[first],
            whys[first],
        )
        return None
    atexit.register(rendezvous.close)  # the others may still need this process's last frames
    return JobSums(peers, world)
