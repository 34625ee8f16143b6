"""``Admission``: the interface by which the replacement of a dead worker gets the state from the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

DescribedArrays = tuple[Mapping[str, Any], Sequence[np.ndarray]]
"""A description, as JSON, and arrays."""


class Admission(Protocol):
    """What a program calls where it saves, and where it restores, in the thread that made the strategy."""

    @property
    def is_newcomer(self) -> bool:
        """True in a replacement that has not entered yet."""
        ...

    @property
    def is_asked(self) -> bool:
        """True if replacements wait, and this process is the chief. It serves queued messages first."""
        ...

    def admit(self, take: Callable[[], DescribedArrays]) -> None:
        """Lets the replacements enter that wait. Returns when this process may step again.

        Args:
          take: Returns the state. Called when it must be given.
        """
        ...

    def enter(self) -> DescribedArrays:
        """Waits in a replacement until it may enter, and returns the state."""
        ...
