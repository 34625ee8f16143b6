"""The structure of the elements of a dataset: shapes (None for a size that varies), dtypes and counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import jax

from replicax._src.devices.split import split_sizes

Shape = tuple[int | None, ...]

Cardinality = int | float
INFINITE: Final[float] = math.inf
"""The cardinality of what never ends."""


@dataclass(frozen=True)
class ArraySpec:
    """One array in an element of a dataset, before it is distributed.

    Attributes:
      shape: The sizes of its dims; None for sizes that vary between elements.
      dtype: The dataset's dtype, before JAX narrows it.
    """

    shape: Shape
    dtype: Any

    @property
    def is_static(self) -> bool:
        """True if all sizes are known."""
        return None not in self.shape


@dataclass(frozen=True)
class PerReplicaSpec:
    """One array in an element of a distributed dataset, as each replica gets it.

    Attributes:
      shape: The sizes on one replica; None for sizes that vary between elements or replicas.
      dtype: The dtype on the devices.
      num_replicas: R, the number of replicas.
    """

    shape: Shape
    dtype: Any
    num_replicas: int

    @classmethod
    def from_replica(cls, spec: ArraySpec, num_replicas: int) -> PerReplicaSpec:
        """Returns the spec of arrays that each replica gets in full."""
        return cls(spec.shape, _on_device(spec.dtype), num_replicas)

    @classmethod
    def from_batch(cls, spec: ArraySpec, num_replicas: int) -> PerReplicaSpec:
        """Returns the spec of one array ``[global_batch, ...]`` that is split over the replicas."""
        num_rows, *dims = spec.shape
        sizes = {None} if num_rows is None else set(split_sizes(num_rows, num_replicas))
        rows = sizes.pop() if len(sizes) == 1 else None
        return cls.from_replica(ArraySpec((rows, *dims), spec.dtype), num_replicas)


def spec_of(element: Any) -> Any:
    """Returns a pytree of ArraySpecs for one element. The sizes of the first dims may vary."""
    return jax.tree.map(_spec_of_array, element)


def is_static(specs: Any) -> bool:
    """True if all elements that fit a pytree of ArraySpecs have the same shapes."""
    return all(spec.is_static for spec in jax.tree.leaves(specs))


def _on_device(dtype: Any) -> Any:
    """Returns the dtype that JAX gives an array of ``dtype``. Without x64, int64 becomes int32."""
    return jax.dtypes.canonicalize_dtype(dtype)


def _spec_of_array(array: Any) -> ArraySpec:
    first: Shape = (None,) if array.ndim else ()
    return ArraySpec((*first, *array.shape[1:]), array.dtype)
