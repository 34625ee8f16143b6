"""``Watchdog``: unblocks a step that waits for a stuck task, by shutting down this process's collective connections.

The waiting thread then gets an ordinary error from the devices. If that does not help within 20 seconds, the process is
ended. Systems other than Linux do not list the connections, so there the process is always ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from replicax._src.cluster.failures import ClusterFailureError

log = logging.getLogger("replicax")
_DESCRIPTORS = Path("/proc/self/fd")
# The devices raise their own error in less time if a connection has ended.
_GRACE_S = 1.0
_LAST_RESORT_S = 20.0


def connections() -> dict[str, int]:
    """Returns the sockets of this process: kernel name to descriptor. Empty if the system does not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                target = os.readlink(_DESCRIPTORS / entry)
                if target.startswith("socket:"):
                    found[target] = int(entry)
    return found


@final
class Watchdog:
    """Shuts down collective connections: the sockets that were opened during the first run of a program.

    Args:
      is_running: Returns True while a program runs.

    Attributes:
      is_held: Returns True while this process must not be ended, because another thread saves.
      on_unblock: Called beside, to end exchanges that are not those of the devices.
    """

    def __init__(self, is_running: Callable[[], bool]):
        self._is_running = is_running
        self.is_held: Callable[[], bool] = lambda: False
        self.on_unblock: Callable[[], None] = lambda: None
        self._ours: set[str] = set()

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Wraps the first run of a program. Every socket that any thread opens meanwhile counts as collective."""
        before = connections().keys()
        try:
            yield
        finally:
            self._ours |= connections().keys() - before

    def unblock(self, failure: ClusterFailureError) -> None:
        """Ends the running program if it does not end on its own, because the tasks cannot continue. Does not block."""
        threading.Thread(target=self._unblock, args=(failure,), name="replicax-watchdog", daemon=True).start()

    def _unblock(self, failure: ClusterFailureError) -> None:
        time.sleep(_GRACE_S)
        deadline = time.monotonic() + _LAST_RESORT_S
        while self._is_running():
            self.on_unblock()
            for name, descriptor in connections().items():
                if name in self._ours:
                    _shut_down(descriptor)
            if time.monotonic() > deadline and not self.is_held():
                log.critical("%s\nThe waiting step cannot be interrupted, so this process ends.", failure)
                os._exit(1)
            time.sleep(0.5)


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            connection.shutdown(socket.SHUT_RDWR)
