"""Memory that this process shares with others of its host: anonymous, so that nothing is left behind.

``Segment`` is a file of the kernel without a name (``memfd``). A process of the host opens it as ``/proc/PID/fd/FD``,
from then on it lives as long as one process maps it. It needs no room in ``/dev/shm``, and a process that is killed at
any time leaves no file. An offer is accepted only by a process that sees the same kernel, the same process and the
same random bytes. So containers and hosts that do not share memory are recognized by trying.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from replicax._src.untrusted.strict_json import Form, JsonReader, TextError

log = logging.getLogger(__name__)

_NAME: Final = "replicax-sums"
_NONCE_BYTES: Final = 32
_START: Final = 64
"""The bytes before the memory of the user: the nonce, and room so that it begins at a multiple of 64."""
_OFFER: Final[Mapping[str, Form[Any]]] = {
    "kernel": JsonReader.string,
    "process": lambda it: it.whole(1),
    "descriptor": JsonReader.count,
    "bytes": lambda it: it.whole(1),
    "nonce": JsonReader.string,
}


@final
class Segment:
    """Memory of this process that others may read.

    Args:
      num_bytes: The size. Pages take memory when they are first written.

    Attributes:
      memory: uint8, at a multiple of 64.
      offer: What another process needs to open it, for JSON.

    Raises:
      OSError: The system has no such memory.
    """

    def __init__(self, num_bytes: int):
        kernel = _kernel()
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, _START + num_bytes)
            whole_memory = np.frombuffer(mmap.mmap(self._file, _START + num_bytes), np.uint8)
        except BaseException:
            self.close()
            raise
        nonce = secrets.token_bytes(_NONCE_BYTES)
        whole_memory[:_NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        self.memory = whole_memory[_START:]
        self.offer: dict[str, Any] = {
            "kernel": kernel,
            "process": os.getpid(),
            "descriptor": self._file,
            "bytes": num_bytes,
            "nonce": nonce.hex(),
        }

    def close(self) -> None:
        """Withdraws the offer. A process that has the memory keeps it, this one too."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def make_segment(num_bytes: int) -> Segment | None:
    """Returns new memory to share; None if the system has none, which the log says."""
    try:
        return Segment(num_bytes)
    except (OSError, AttributeError) as error:  # AttributeError: not on Linux
        log.warning("No memory can be shared with other processes: %s. Connections are used instead.", error)
        return None


def why_not_shared() -> str | None:
    """Returns the reason why processes of this host share no memory; None if they do."""
    try:
        segment = Segment(_START)
        try:
            _opened(segment.offer, _START)
        finally:
            segment.close()
    except (OSError, AttributeError) as error:  # AttributeError: not on Linux
        return str(error)
    return None


def open_offer(offer: Any, num_bytes: int) -> np.ndarray | None:
    """Returns the memory of another process, uint8, read-only; None if this process cannot share it.

    Args:
      offer: The other process's offer; None if it has made none.
      num_bytes: The expected size.
    """
    if offer is None:
        return None
    try:
        return _opened(JsonReader(offer, "the offer").record(_OFFER), num_bytes)
    except (OSError, TextError, ValueError) as error:
        log.debug("The memory of another process is not shared: %s.", error)
        return None


def _opened(offer: Mapping[str, Any], num_bytes: int) -> np.ndarray:
    if offer["kernel"] != _kernel():
        raise OSError("it is on another host")
    if offer["bytes"] != num_bytes:
        raise OSError(f"it has {offer['bytes']} bytes, expected {num_bytes}")
    path = f"/proc/{offer['process']}/fd/{offer['descriptor']}"
    if _NAME not in os.readlink(path):  # opening another file may have effects
        raise OSError("it is in another container")
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size < _START + num_bytes:
            raise OSError("it is shorter than its offer")
        memory = np.frombuffer(mmap.mmap(file, _START + num_bytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)
    if memory[:_NONCE_BYTES].tobytes().hex() != offer["nonce"]:
        raise OSError("it is another process's")
    return memory[_START:]


@functools.cache
def _kernel() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
