"""Shards as a server holds them, views of their values, and checks of messages against them. The caller holds the
lock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np

from replicax._ps.store.changed_rows import ChangedRows
from replicax._ps.store.held_values import Spec
from replicax._ps.store.updates import CompiledUpdate
from replicax._src.program_kit.errors import InvalidArgumentError

MAX_COPIED_BYTES: Final = 4_000_000


@dataclass(slots=True)
class HeldShard:
    """A shard of a variable on this server.

    Attributes:
      key: The name of the shard.
      spec: The shape and dtype.
      value: The value. It is deleted if an update failed while it wrote in place.
      number: The number of the version. It grows with every change and is never reused for this key.
      changed: The rows that have changed since the last snapshot.
    """

    key: str
    spec: Spec
    value: jax.Array
    number: int
    changed: ChangedRows = field(init=False)

    def __post_init__(self) -> None:
        self.changed = ChangedRows(self.spec)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the value."""
        shape, dtype = self.spec
        return math.prod(shape) * dtype.itemsize

    def held(self) -> jax.Array:
        """Returns the value. Raises RuntimeError if it is lost."""
        if self.value.is_deleted():
            raise RuntimeError(
                f'The value of shard "{self.key}" was lost: an update ran out of memory while it wrote in place. '
                "Assign a value, or restart the server from a snapshot."
            )
        return self.value

    def view(self) -> np.ndarray:
        """Returns the value without a copy. Keep it briefly: while it exists, an update of the shard needs new
        memory.
        """
        return np.asarray(self.held())


def shown(shards: Sequence[HeldShard]) -> list[np.ndarray]:
    """Returns their values: copies of small ones, so that the next update can reuse the memory, and views of
    large ones.
    """
    values = [shard.view() for shard in shards]
    num_bytes = 0
    for index in sorted(range(len(values)), key=lambda i: values[i].nbytes):
        num_bytes += values[index].nbytes
        if num_bytes >= MAX_COPIED_BYTES:
            break
        values[index] = values[index].copy()
    return values


def rows_of(shard: HeldShard, numbers: np.ndarray) -> np.ndarray:
    """Returns copies of rows. A number outside of the shard is clipped to the first or the last row."""
    return np.take(shard.view(), numbers, axis=0, mode="clip")


def check_tables(tables: Sequence[HeldShard]) -> None:
    """Raises InvalidArgumentError if a shard has no rows."""
    for shard in tables:
        shape, _ = shard.spec
        if not shape or not shape[0]:
            raise InvalidArgumentError(
                f'Shard "{shard.key}" has the shape {list(shape)}, so its rows cannot be read. '
                "Pull the whole shard; only a shard with at least one row has rows to read."
            )


def check_state(update: CompiledUpdate, state: Sequence[HeldShard]) -> None:
    """Raises InvalidArgumentError unless the program was exported for these shards."""
    for shard, spec in zip(state, update.state):
        if shard.spec != spec:
            raise InvalidArgumentError(
                f'Program {update.program.digest} takes shard "{shard.key}" as {text(*spec)}, and it is '
                f"{text(*shard.spec)}. Export the program for the shard as it is."
            )


def check_assigned(shard: HeldShard, array: np.ndarray) -> None:
    """Raises InvalidArgumentError unless the array has the shape and dtype of the shard."""
    if shard.spec != (array.shape, array.dtype):
        raise InvalidArgumentError(
            f'Shard "{shard.key}" is {text(*shard.spec)}, and cannot be assigned {text(array.shape, array.dtype)}. '
            "Give a value of its shape and dtype."
        )


def text(shape: Sequence[int], dtype: np.dtype[Any]) -> str:
    """Returns the shape and dtype as text, such as ``float32[4, 2]``."""
    return f"{dtype.name}{list(shape)}"


def few(keys: Mapping[str, Any], limit: int = 5) -> str:
    """Returns the first keys as text."""
    if not keys:
        return "none"
    first = ", ".join(f'"{key}"' for key in list(keys)[:limit])
    return first if len(keys) <= limit else f"{first} and {len(keys) - limit} more"
