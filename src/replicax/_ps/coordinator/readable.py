"""``Readable``: waits until one of many descriptors is readable, or a bell rings."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import weakref
from typing import Final, final

_HAS_EPOLL: Final = sys.platform == "linux"  # a wait for thousands of descriptors costs as much as for one
_ONE: Final = (1).to_bytes(8, sys.byteorder)


@final
class Bell:
    """A descriptor that is readable once any thread has rung, until it is silenced."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            self._hears = self._rings = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._hears, self._rings = os.pipe()
        for descriptor in {self._hears, self._rings}:
            os.set_blocking(descriptor, False)
            weakref.finalize(self, os.close, descriptor).atexit = False

    def fileno(self) -> int:
        return self._hears

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._rings, _ONE)

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._hears, 4096)


@final
class Readable:
    """The descriptors for which one thread waits. Only ``ring`` may be called from other threads."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._of_bell = self._bell.fileno()
        if sys.platform == "linux":
            self._poll = select.epoll()
            # Each ring ends one wait, so that nobody needs to silence the bell.
            self._poll.register(self._of_bell, select.EPOLLIN | select.EPOLLET)
        else:
            self._poll = select.poll()
            self._poll.register(self._of_bell, select.POLLIN)
        self.ring = self._bell.ring

    def add(self, descriptor: int) -> None:
        self._poll.register(descriptor, select.POLLIN)

    def remove(self, descriptor: int) -> None:
        """Waits for a descriptor no more; it may be closed already."""
        with contextlib.suppress(OSError, KeyError):
            self._poll.unregister(descriptor)

    def wait(self, timeout_s: float) -> list[int]:
        """Waits until a descriptor is readable or the bell rings. Returns the readable ones."""
        ready = [
            descriptor for descriptor, _ in self._poll.poll(timeout_s if _HAS_EPOLL else 1000 * timeout_s)
        ]
        if self._of_bell in ready:
            ready.remove(self._of_bell)
            if not _HAS_EPOLL:
                self._bell.silence()
        return ready

    def close(self) -> None:
        if sys.platform == "linux" and isinstance(self._poll, select.epoll):
            self._poll.close()
