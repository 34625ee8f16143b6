"""The sums of arrays that processes add on their hosts, outside of programs, as the layers below ``collectives`` see
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import numpy as np


class SumsOfProcesses(Protocol):
    """Adds arrays of all processes in the order of the replicas, in shared memory or over connections."""

    @property
    def transport(self) -> str:
        """The transport in words: ``shared memory``, ``connections``, or both."""
        ...

    def program(self, name: str, text: str) -> AbstractContextManager[None]:
        """Wraps the exchanges of one program, which has one place in the sequence of all processes' programs.

        Args:
          name: The name, for messages.
          text: What all processes must do alike.

        Raises:
          ProgramMismatchError: The processes are about to run different programs.
          ClusterFailureError: Another process is gone.
        """
        ...

    def all_reduce(self, op: Literal["sum", "max", "min"], arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Combines one array of each replica, in a ``program``; see ``World.all_reduce``.

        Args:
          arrays: One for each replica of this process, of the same shape and dtype.
        """
        ...

    def can_add(self, dtype: np.dtype) -> bool:
        """True if arrays of a dtype can be added."""
        ...
