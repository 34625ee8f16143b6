"""The rules of the chain of snapshots: which file is the base of which, which are restored, and which are removed.

Pure: files are their numbers and sizes. A snapshot is either a *base*, whose file has all shards, or it continues an
earlier one: its file has the changes. The files from the base to this one are its *chain*. The rules:

- Numbers rise, and the highest number is the newest snapshot. No number that is in use is used again.
- A snapshot continues the snapshot that was written or restored last, if all files of that still have their bytes, and
  the chain does not become too long.
- The chain of the newest snapshot is kept, and the chain of the base before it. So once there are two bases, two
  snapshots exist that share no file. Nothing is removed before the newest snapshot is complete.
- The chain of the last epoch of which all servers have a snapshot is kept, because all may go back to it. Between that
  and the newest snapshot may be any number of epochs that another server did not write.
- Files between the newest snapshot and its predecessor belong to a state that was rolled back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

MAX_FILES: Final = 64
"""The most files in a chain. A restore opens all of them. At the default interval there is a new base every hour."""

GROWTH: Final = 1.5
"""The largest size of a chain, relative to the shards. So at worst two thirds of the bytes written are bases."""

Chain = Sequence[tuple[int, int]]
"""The numbers of the files, each with its number of bytes of shards; the base is first."""


def next_number(numbers: Iterable[int]) -> int:
    """Returns the number of the next file."""
    return max(numbers, default=0) + 1


def continued(chain: Chain | None, number: int, num_bytes: int) -> Chain:
    """Returns the chain of a snapshot in the file of this number. It is a base if it continues no chain."""
    return [*(chain or ()), (number, num_bytes)]


def extends(chain: Chain, num_new_bytes: int, num_bytes: int) -> bool:
    """True if a snapshot of shards of ``num_bytes`` can continue a chain; False if it has to be a base."""
    held = sum(of_file for _, of_file in chain)
    return len(chain) < MAX_FILES and held + num_new_bytes <= GROWTH * num_bytes


def is_whole(chain: Chain, used: Collection[int], sizes: Mapping[int, int]) -> bool:
    """True if a snapshot can be continued, because nobody has removed or cut one of its files.

    Args:
      chain: Its chain.
      used: The numbers of the files that have parts of its shards.
      sizes: The number of bytes of the files that exist.
    """
    num_bytes = dict(chain)
    return all(
        number in sizes and sizes[number] >= num_bytes.get(number, 0) for number in {*used, chain[-1][0]}
    )


def removable(
    numbers: Iterable[int], before: Chain | None, newest: Chain, kept: Chain | None = None
) -> list[int]:
    """Returns the numbers of the files that are no longer needed, once the newest snapshot is complete.

    Args:
      numbers: The numbers of all files.
      before: The chain of the snapshot that was written or restored before it; None if it is not known, as in a new
        process that has restored none. Then all files are kept.
      newest: The chain of the newest snapshot.
      kept: The chain of the last epoch of which all servers have a snapshot; None if there is none.
    """
    if before is None:
        return []
    is_base = len(newest) == 1
    first, last, own = before[0][0] if is_base else 0, before[-1][0], newest[-1][0]
    needed = {own, *(number for number, _ in kept or ())}
    return [number for number in numbers if not first <= number <= last and number not in needed]


def restore_order(numbers: Iterable[int]) -> list[int]:
    """Returns the files to try, the newest first. The first that is intact, and of the epoch, is restored."""
    return sorted(numbers, reverse=True)


def is_of_epoch(found: int, epoch: int | None) -> bool:
    """True if a snapshot may be restored for an epoch; None stands for any."""
    return epoch is None or found == epoch
