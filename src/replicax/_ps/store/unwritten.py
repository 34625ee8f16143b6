"""``Unwritten``: the shards that a snapshot has yet to write, and a limit on the memory that this costs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, final

_MIN_TWICE_BYTES: Final = 64 * 2**20
_TWICE: Final = 1 / 8


@final
class Unwritten:
    """Shards that a snapshot has yet to write.

    Until one is written, the first update of it cannot reuse its memory, and needs memory for a second value. These
    second values may take an eighth of the memory of all shards, or 64 MB. Updates that would need more must wait.

    Args:
      sizes: The number of bytes of each shard, by its key.
      keys: The keys of the shards that are not written yet.
      until: The time at which all waits for memory end.
    """

    def __init__(self, sizes: Mapping[str, int], keys: Iterable[str], until: float):
        self.until = until
        self._shared = {key: sizes[key] for key in keys}
        self._twice: dict[str, int] = {}
        self._most_bytes = max(_MIN_TWICE_BYTES, _TWICE * sum(sizes.values()))

    def has_room(self, keys: Iterable[str]) -> bool:
        """True if these shards may change now."""
        more = sum(self._shared.get(key, 0) for key in keys)
        return not more or sum(self._twice.values()) + more <= self._most_bytes

    def change(self, key: str) -> None:
        """Records that a shard has another value."""
        if (size := self._shared.pop(key, None)) is not None:
            self._twice[key] = size

    def written(self, key: str) -> None:
        """Records that a shard is in the file."""
        self._shared.pop(key, None)
        self._twice.pop(key, None)
