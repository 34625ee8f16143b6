"""``FutureValue``: a value that a function computes elsewhere, and that can be fetched later."""

from __future__ import annotations

import abc
from typing import Any


class FutureValue:
    """A result that may not be there yet. It has no attributes, because a program makes one for each call."""

    __slots__ = ()

    @abc.abstractmethod
    def fetch(self, timeout_s: float | None = None) -> Any:
        """Waits for the result, and returns it with NumPy arrays. Blocks."""
