"""How the values of a program over a whole batch lie on replicas that have some of its rows each."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.devices.topology import REPLICA_AXIS


class Shared(enum.Enum):
    """A value of which every replica has an array of the full shape.

    WHOLE: all have the value. SUM, MAX, MIN: it is the sum (maximum, minimum) of what they have.
    """

    WHOLE = "whole"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Rows:
    """A value of which every replica has its rows.

    Attributes:
      dim: The dim that goes over the rows of the batch.
      unit: How many entries of the dim belong to one row: more than one where dims were merged.
    """

    dim: int
    unit: int = 1


Layout = Shared | Rows


@final
class RowSplit:
    """Which rows of a batch each replica has. Each holds as many as the one with the most; what is too much is garbage.

    Args:
      sizes: The number of rows of each replica, in their order.

    Attributes:
      sizes: The number of rows of each replica.
      starts: The number of the first one of each, in the whole batch.
      num_rows: B, of the whole batch.
      largest: How many rows every replica holds: at least one.
      is_even: There is no garbage.
    """

    def __init__(self, sizes: Sequence[int]):
        self.sizes = tuple(sizes)
        self.starts = (0, *itertools.accumulate(self.sizes[:-1]))
        self.num_rows = sum(self.sizes)
        self.largest = max(1, *self.sizes)
        self.is_even = set(self.sizes) == {self.largest}

    @property
    def places(self) -> list[slice]:
        """Where the rows of each replica are in an array of what all hold."""
        return [slice(r * self.largest, r * self.largest + size) for r, size in enumerate(self.sizes)]

    def local_shape(self, shape: Sequence[int], rows: Rows) -> tuple[int, ...]:
        """Returns the shape of what a replica holds of an array of this shape."""
        return (*shape[: rows.dim], self.largest * rows.unit, *shape[rows.dim + 1 :])

    # --- in the program of a replica ------------------------------------------------------------------

    def take(self, value: Any, rows: Rows) -> Any:
        """This replica's rows of a whole value."""
        start = jnp.asarray(self.starts, jnp.int32)[_replica()] * rows.unit
        missing = max(self.starts) + self.largest - self.num_rows
        if missing > 0:
            widths = [(0, 0)] * value.ndim
            widths[rows.dim] = (0, missing * rows.unit)
            value = jnp.pad(value, widths)
        return jax.lax.dynamic_slice_in_dim(value, start, self.largest * rows.unit, rows.dim)

    def cleared(self, value: Any, rows: Rows, neutral: Any = 0) -> Any:
        """Returns a value with ``neutral`` in place of garbage, to be combined over the rows."""
        if self.is_even:
            return value
        count = jnp.asarray(self.sizes, jnp.int32)[_replica()] * rows.unit
        number = jax.lax.broadcasted_iota(jnp.int32, value.shape, rows.dim)
        return jnp.where(number < count, value, jnp.asarray(neutral, value.dtype))

    def counted_once(self, value: Any) -> Any:
        """What this replica has of a sum whose total is ``value``, which all have."""
        return jnp.where(_replica() == 0, value, jnp.zeros_like(value))

    def converted(self, value: Any, layout: Layout, wanted: Layout) -> Any:
        """Returns a value in another layout: a whole one, as rows or as a sum; or as it is.

        Raises:
          ValueError: That needs the other replicas.
        """
        if layout == wanted:
            return value
        if layout is Shared.WHOLE and isinstance(wanted, Rows):
            return self.take(value, wanted)
        if layout is Shared.WHOLE and wanted is Shared.SUM:
            return self.counted_once(value)
        raise ValueError(f"{layout} is no {wanted}")


def _replica() -> Any:
    return jax.lax.axis_index(REPLICA_AXIS)
