"""What the elements of a dataset look like: shapes, where None is a size that may vary, dtypes, and how many."""

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
      shape: Its sizes; None where they vary from element to element.
      dtype: As the dataset yields it, before JAX narrows it.
    """

    shape: Shape
    dtype: Any

    @property
    def is_static(self) -> bool:
        """Whether all sizes are known."""
        return None not in self.shape


@dataclass(frozen=True)
class PerReplicaSpec:
    """One array in an element of a distributed dataset: what each replica gets.

    Attributes:
      shape: The sizes on one replica; None where they vary over elements or replicas.
      dtype: As it arrives on the devices.
      num_replicas: R.
    """

    shape: Shape
    dtype: Any
    num_replicas: int

    @classmethod
    def of_replica(cls, spec: ArraySpec, num_replicas: int) -> PerReplicaSpec:
        """The spec of arrays that each replica gets whole."""
        return cls(spec.shape, _on_device(spec.dtype), num_replicas)

    @classmethod
    def of_batch(cls, spec: ArraySpec, num_replicas: int) -> PerReplicaSpec:
        """The spec of one array ``[global_batch, ...]``, cut over the replicas."""
        num_rows, *dims = spec.shape
        sizes = {None} if num_rows is None else set(split_sizes(num_rows, num_replicas))
        rows = sizes.pop() if len(sizes) == 1 else None
        return cls.of_replica(ArraySpec((rows, *dims), spec.dtype), num_replicas)


def spec_of(element: Any) -> Any:
    """Returns a pytree of ArraySpecs for one element, the sizes of whose first dims may vary."""
    return jax.tree.map(_spec_of_array, element)


def is_static(specs: Any) -> bool:
    """Whether all elements that fit a pytree of ArraySpecs have the same shapes."""
    return all(spec.is_static for spec in jax.tree.leaves(specs))


def _on_device(dtype: Any) -> Any:
    """The dtype that JAX gives an array of ``dtype``: without x64, int64 becomes int32."""
    return jax.dtypes.canonicalize_dtype(dtype)


def _spec_of_array(array: Any) -> ArraySpec:
    first: Shape = (None,) if array.ndim else ()
    return ArraySpec((*first, *array.shape[1:]), array.dtype)
