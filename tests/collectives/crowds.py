"""Members of a world on threads of one process, each with its own ``Rendezvous``."""

import concurrent.futures
import itertools
import os
import time

import numpy as np

from replicax._src.collectives.host_sums.members import Member
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.wire.security import Security

LIMIT_S = 60.0
TOKEN = Security(b"secret")


class Crowd:
    """Some members, by place. They meet again for each epoch."""

    def __init__(self, num_members, *, shares_memory=True, security=TOKEN):
        self.rendezvous = [
            Rendezvous("127.0.0.1", security, shares_memory=shares_memory) for _ in range(num_members)
        ]
        self._threads = concurrent.futures.ThreadPoolExecutor(num_members)
        self._epochs = itertools.count(1)

    def members(self, replicas=None):
        """The members, with one replica each unless ``replicas`` says which."""
        replicas = [(place,) for place in range(len(self.rendezvous))] if replicas is None else replicas
        return [
            Member(place, f"worker {place}", rendezvous.address, tuple(held))
            for place, (rendezvous, held) in enumerate(zip(self.rendezvous, replicas, strict=True))
        ]

    def start(self, act):
        """Calls ``act(place)`` on a thread of each member; gives futures."""
        return [self._threads.submit(act, place) for place in range(len(self.rendezvous))]

    def each(self, act):
        """The results of ``act(place)``, by place."""
        return [future.result(LIMIT_S) for future in self.start(act)]

    def failures(self, act):
        """The errors of ``act(place)``, by place."""
        return [future.exception(LIMIT_S) for future in self.start(act)]

    def meet(self, replicas=None, timeout_s=LIMIT_S):
        """The worlds of all members, by place."""
        epoch, members = next(self._epochs), self.members(replicas)
        return self.each(lambda place: self.rendezvous[place].meet(epoch, members, place, timeout_s))

    def sum(self, arrays, replicas=None, *, op="sum"):
        """The results of one exchange of one array per replica, by place."""
        worlds = self.meet(replicas)
        held = [member.replicas for member in worlds[0].members]
        return self.each(
            lambda place: worlds[place].all_reduce(op, [arrays[replica] for replica in held[place]], step=0)
        )

    def close(self):
        self.each(lambda place: self.rendezvous[place].close())
        self._threads.shutdown()


class SharedFiles:
    """The files in shared memory when this object is made. Other programs of the machine have some for a while."""

    def __init__(self):
        self._before = set(os.listdir("/dev/shm"))

    def check(self):
        """No new file stays."""
        new = set(os.listdir("/dev/shm")) - self._before
        until = time.monotonic() + LIMIT_S
        while new & set(os.listdir("/dev/shm")):
            assert time.monotonic() < until, new
            time.sleep(0.05)


def bits(array):
    """The bytes of an array, to compare them."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()
