"""``Unwritten``: what a snapshot and its store have in common until it is written, and how much may be there twice.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, final

_MIN_TWICE_BYTES: Final = 64 * 2**20
_TWICE: Final = 1 / 8


@final
class Unwritten:
    """Pieces that a snapshot has yet to write.

    Until then the first update of one leaves its value, and makes another one.

    So much may be there twice: an eighth of all pieces, or 64 MB. What would need more has to wait until more is
    written.

    Args:
      sizes: Bytes of each piece, by its key.
      keys: The keys of those that are not written yet.
      until: The end of all waits for room: what has waited until then goes on.
    """

    def __init__(self, sizes: Mapping[str, int], keys: Iterable[str], until: float):
        self.until = until
        self._shared = {key: sizes[key] for key in keys}
        self._twice: dict[str, int] = {}
        self._most_bytes = max(_MIN_TWICE_BYTES, _TWICE * sum(sizes.values()))

    def has_room(self, keys: Iterable[str]) -> bool:
        """True if these may change now."""
        more = sum(self._shared.get(key, 0) for key in keys)
        return not more or sum(self._twice.values()) + more <= self._most_bytes

    def change(self, key: str) -> None:
        """One has another value now."""
        if (size := self._shared.pop(key, None)) is not None:
            self._twice[key] = size

    def written(self, key: str) -> None:
        """One is in the file."""
        self._shared.pop(key, None)
        self._twice.pop(key, None)
