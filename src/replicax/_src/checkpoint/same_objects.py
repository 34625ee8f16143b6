"""The check that all processes save the same objects.

The processes exchange a digest with each save. Only if the digests differ, they exchange all keys, for the message.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, final

from replicax._src.checkpoint.contents import SavedArray
from replicax._src.checkpoint.errors import enumerated
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.vocabulary.errors import InvalidArgumentError


@final
class SavedKinds:
    """What one process saves: for each key an array of a shape and dtype, or a Python state.

    Args:
      arrays: The shape and the dtype of each array, by key.
      states: The keys of the Python states.
    """

    def __init__(self, arrays: Mapping[str, tuple[Sequence[int], Any]], states: Iterable[str]):
        self._kinds = {
            **{key: f"{dtype}{list(shape)}" for key, (shape, dtype) in arrays.items()},
            **dict.fromkeys(states, "Python state"),
        }

    @classmethod
    def of_copy(cls, arrays: Mapping[str, SavedArray], states: Iterable[str]) -> Self:
        """Returns the kinds of a copy on the host."""
        stored = {key: one for key, array in arrays.items() if (one := array.value or array.components)}
        return cls({key: (one.shape, one.dtype) for key, one in stored.items()}, states)

    @property
    def digest(self) -> str:
        """A digest of the keys, shapes and dtypes."""
        return hashlib.sha256(json.dumps(self._kinds, sort_keys=True).encode()).hexdigest()[:32]

    def check(self, path: str, digests: Sequence[str], gather: Callable[[Any], GatheredValues]) -> None:
        """Checks that all processes save the same. All call it.

        Args:
          path: The path of the checkpoint.
          digests: The digests of all processes.
          gather: All-gathers a value. All processes call it if the digests differ.

        Raises:
          InvalidArgumentError: They do not; raised in all processes.
        """
        if len({*digests}) > 1:
            of_all = gather(self._kinds)
            keys = sorted({key for each in of_all for key in each})
            differing = [key for key in keys if len({each.get(key) for each in of_all}) > 1]
            if differing:  # otherwise the process that differs has died since
                raise _error(os.path.basename(path), differing, of_all)


def _error(name: str, differing: Sequence[str], of_all: GatheredValues) -> InvalidArgumentError:
    """Returns the error for processes that save objects of these kinds, by key."""
    holders: dict[str | None, list[str]] = {}
    for process, each in of_all.named():
        holders.setdefault(each.get(differing[0]), []).append(process)
    kinds = "; ".join(
        f"{enumerated(those)}: {'not tracked' if kind is None else kind}" for kind, those in holders.items()
    )
    more = f", and {len(differing) - 1} more differ" if differing[1:] else ""
    return InvalidArgumentError(
        f"The processes save different objects as {name!r}. {differing[0]!r} is the first that differs{more} ({kinds}). "
        "Track the same objects, with the same shapes and dtypes, in each of them."
    )
