"""The layouts of a global program's values on replicas that each have some of the batch's rows."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.devices.topology import REPLICA_AXIS


class Shared(enum.Enum):
    """A value for which every replica has an array of the full shape.

    WHOLE: every replica has the value. SUM, MAX, MIN: the value is the sum (maximum, minimum) of the replicas' arrays.
    """

    WHOLE = "whole"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Rows:
    """A value of which every replica has its own rows.

    Attributes:
      dim: The dim of the batch's rows.
      unit: The number of entries of the dim per row. It is more than one after dims were merged.
    """

    dim: int
    unit: int = 1


Layout = Shared | Rows


@final
class RowSplit:
    """The split of a batch's rows over replicas. All replicas hold equally many rows; surplus rows are garbage.

    Args:
      sizes: The number of rows of each replica, in replica order.
      replica: Returns the number of the replica in its program. By default it is the position on the axis ``replica``.

    Attributes:
      sizes: The number of rows of each replica.
      starts: The index of each replica's first row in the global batch.
      num_rows: The number of rows B of the global batch.
      largest: The number of rows that every replica holds, at least one.
      is_even: True if there is no garbage.
    """

    def __init__(self, sizes: Sequence[int], replica: Callable[[], Any] | None = None):
        self._replica = replica or _position_on_axis
        self.sizes = tuple(sizes)
        self.starts = (0, *itertools.accumulate(self.sizes[:-1]))
        self.num_rows = sum(self.sizes)
        self.largest = max(1, *self.sizes)
        self.is_even = set(self.sizes) == {self.largest}

    @property
    def places(self) -> list[slice]:
        """Returns the slice of each replica's rows in the concatenation of all replicas' arrays."""
        return [slice(r * self.largest, r * self.largest + size) for r, size in enumerate(self.sizes)]

    def local_shape(self, shape: Sequence[int], rows: Rows) -> tuple[int, ...]:
        """Returns the shape of a replica's part of an array of this shape."""
        return (*shape[: rows.dim], self.largest * rows.unit, *shape[rows.dim + 1 :])

    # --- in the program of a replica ------------------------------------------------------------------

    def take(self, value: Any, rows: Rows) -> Any:
        """Returns this replica's rows of a replicated value."""
        start = jnp.asarray(self.starts, jnp.int32)[self._replica()] * rows.unit
        missing = max(self.starts) + self.largest - self.num_rows
        if missing > 0:
            widths = [(0, 0)] * value.ndim
            widths[rows.dim] = (0, missing * rows.unit)
            value = jnp.pad(value, widths)
        return jax.lax.dynamic_slice_in_dim(value, start, self.largest * rows.unit, rows.dim)

    def cleared(self, value: Any, rows: Rows, neutral: Any = 0) -> Any:
        """Returns a value with ``neutral`` instead of garbage, so that rows can be combined."""
        if self.is_even:
            return value
        count = jnp.asarray(self.sizes, jnp.int32)[self._replica()] * rows.unit
        number = jax.lax.broadcasted_iota(jnp.int32, value.shape, rows.dim)
        return jnp.where(number < count, value, jnp.asarray(neutral, value.dtype))

    def counted_once(self, value: Any) -> Any:
        """Returns this replica's part of a sum whose total is the replicated ``value``."""
        return jnp.where(self._replica() == 0, value, jnp.zeros_like(value))

    def converted(self, value: Any, layout: Layout, wanted: Layout) -> Any:
        """Converts a replicated value to rows or to parts of a sum; returns a value in the wanted layout unchanged.

        Raises:
          ValueError: The conversion needs the other replicas.
        """
        if layout == wanted:
            return value
        if layout is Shared.WHOLE and isinstance(wanted, Rows):
            return self.take(value, wanted)
        if layout is Shared.WHOLE and wanted is Shared.SUM:
            return self.counted_once(value)
        raise ValueError(f"{layout} cannot be converted to {wanted}")


def _position_on_axis() -> Any:
    return jax.lax.axis_index(REPLICA_AXIS)
