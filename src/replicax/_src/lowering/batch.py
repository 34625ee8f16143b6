"""A batch from a dataset in a training loop, and the layout of its arrays over the replicas' devices."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices import memory
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.row_partitioner.row_layouts import RowSplit
from replicax._src.values.narrowing import narrowed

_OF_KERAS = ("x", "y", "sample_weight")


class WorkerRows(np.ndarray):
    """An array of which this process has only the rows of its own replicas.

    Attributes:
      all_sizes: The number of rows of each of all R replicas.
    """

    all_sizes: tuple[int, ...]

    @classmethod
    def of(cls, array: Any, all_sizes: Sequence[int]) -> WorkerRows:
        """Returns an array with the sizes."""
        rows = np.asarray(array).view(cls)
        rows.all_sizes = tuple(all_sizes)
        return rows

    def __array_finalize__(self, obj: Any) -> None:
        self.all_sizes = getattr(obj, "all_sizes", ())


@final
class DatasetBatch:
    """One batch as it comes from a dataset, on the host or on devices.

    Attributes:
      leaves: The arrays.
      tree: The structure of the pytree with these leaves.
      num_rows: The size of the first array's first dim, which usually is that of the others.
      worker_sizes: The number of rows of each of all R replicas, if this process has only the rows of its own replicas.
      signature: A hashable that is equal for batches that one program takes.
    """

    __slots__ = ("leaves", "num_rows", "signature", "tree", "worker_sizes")

    def __init__(self, pytree: Any, *, is_kept: bool = False):
        """Takes what a dataset yields.

        Args:
          pytree: A pytree of arrays.
          is_kept: True to copy the batch, because the dataset may reuse its memory before it is on the devices.
        """
        leaves, self.tree = jax.tree_util.tree_flatten(pytree)
        self.leaves = [
            leaf if isinstance(leaf, (np.ndarray, jax.Array)) else np.asarray(leaf) for leaf in leaves
        ]
        roots = _OF_KERAS if type(pytree) is tuple and len(pytree) <= len(_OF_KERAS) else ("batch",)
        self.leaves = list(narrowed(self.leaves, self.tree, *roots))
        self.worker_sizes = next((x.all_sizes for x in self.leaves if isinstance(x, WorkerRows)), None)
        if is_kept:
            self.leaves = [
                memory.copy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in self.leaves
            ]
        self.num_rows = next((leaf.shape[0] for leaf in self.leaves if leaf.ndim), 0)
        self.signature: Hashable = (
            self.tree,
            tuple((leaf.shape, leaf.dtype) for leaf in self.leaves),
            self.worker_sizes,
        )

    def sizes(self, num_replicas: int) -> Sequence[int]:
        """Returns the number of rows of each replica. A global batch gives equally many to all, and fewer or none to
        the last.
        """
        if self.worker_sizes is not None:
            return self.worker_sizes
        size = math.ceil(self.num_rows / num_replicas)
        return [max(0, min(size, self.num_rows - r * size)) for r in range(num_replicas)]


@final
class BatchLayout:
    """The layout of one array of a batch: its rows are split evenly over the devices, or it is replicated.

    Attributes:
      is_split: True if each device gets some rows.
      aval: The aval of the global array, without padding.
    """

    def __init__(self, leaf: Any, batch: DatasetBatch, split: RowSplit, topology: Topology):
        self._topology, self._split = topology, split
        self._is_whole_here = batch.worker_sizes is None
        shape = leaf.shape
        has_rows = bool(shape) and shape[0] == batch.num_rows
        if self._is_whole_here:
            self.is_split = has_rows and batch.num_rows > 0 and len(split.sizes) > 1
        else:
            self.is_split = has_rows
        rows = split.largest * len(split.sizes)
        self._shape = (split.num_rows, *shape[1:]) if self.is_split else shape
        self._padded = (rows, *shape[1:]) if self.is_split else shape
        self._dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        self.aval = jax_compat.shaped(self._shape, self._dtype)

    @property
    def is_padded(self) -> bool:
        """True if the rows cannot be split evenly."""
        return self._padded != self._shape

    def sharding(self, *, is_stacked: bool) -> Any:
        """Returns the sharding of the array, or of several stacked arrays."""
        if not self.is_split:
            return self._topology.replicated
        return self._topology.stacked if is_stacked else self._topology.per_replica

    def described(self) -> Any:
        """Returns the shape, dtype and sharding of the array that programs take."""
        return jax.ShapeDtypeStruct(self._padded, self._dtype, sharding=self.sharding(is_stacked=False))

    def without_padding(self, leaf: Any) -> Any:
        """Removes the padding rows, in a program that sees the global array."""
        if self._padded == self._shape:
            return leaf
        if self._is_whole_here:
            return leaf[: self._shape[0]]
        return jnp.concatenate([leaf[rows] for rows in self._split.places])

    def put(self, leaf: Any) -> jax.Array:
        """Places an array. It copies a host array, because the owner may write the next batch into it."""
        sharding = self.sharding(is_stacked=False)
        if isinstance(leaf, jax.Array):
            return jax_compat.put(self._pad_on_device(leaf), sharding)
        return self._topology.put_parts(self._padded, [part[0] for part in self._parts([leaf], 1)], sharding)

    def put_stacked(self, leaves: Sequence[Any], capacity: int) -> jax.Array:
        """Places the arrays of several batches as one, with the batches as a new first dim."""
        sharding = self.sharding(is_stacked=True)
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            rows = [self._pad_on_device(leaf) for leaf in leaves]
            rows += [jnp.zeros_like(rows[0])] * (capacity - len(leaves))
            return jax_compat.put(jnp.stack(rows), sharding)
        return self._topology.put_parts((capacity, *self._padded), self._parts(leaves, capacity), sharding)

    def rows_of(self, leaf: Any, replica: int) -> np.ndarray:
        """Returns the part of a replica on the host, padded to the rows that every replica holds.

        It shares the memory of ``leaf`` if nothing has to be changed. A process that has only the rows of some replicas
        gives a ``leaf`` with the rows of this one.
        """
        array = np.asarray(leaf)
        if not self.is_split:
            return array.astype(self._dtype, copy=False)
        start, size = self._split.starts[replica], self._split.sizes[replica]
        rows = array[start : start + size] if self._is_whole_here else array
        if size == self._split.largest:
            return rows.astype(self._dtype, copy=False)
        part = memory.empty((self._split.largest, *self._shape[1:]), self._dtype)
        part[:size], part[size:] = rows, 0
        return part

    def described_rows(self) -> Any:
        """Returns the shape and dtype of ``rows_of``."""
        shape = (self._split.largest, *self._shape[1:]) if self.is_split else self._shape
        return jax.ShapeDtypeStruct(shape, self._dtype)

    def _parts(self, leaves: Sequence[Any], capacity: int) -> list[np.ndarray]:
        """Returns each local replica's part of several batches, filled up with zeros: [capacity, ...]."""
        replicas = self._topology.local_replicas
        if not self.is_split:
            whole = memory.empty((capacity, *self._shape), self._dtype)
            for number, leaf in enumerate(leaves):
                whole[number, ...] = leaf
            whole[len(leaves) :] = 0
            return [whole] * len(replicas)
        first = 0 if self._is_whole_here else self._split.starts[replicas[0]]
        parts = memory.empty((len(replicas), capacity, self._split.largest, *self._shape[1:]), self._dtype)
        for part, replica in zip(parts, replicas, strict=True):
            start, size = self._split.starts[replica] - first, self._split.sizes[replica]
            for number, leaf in enumerate(leaves):
                part[number, :size], part[number, size:] = leaf[start : start + size], 0
            part[len(leaves) :] = 0
        return list(parts)

    def _pad_on_device(self, leaf: jax.Array) -> jax.Array:
        if self._padded == self._shape:
            return leaf
        rows = self._padded[0] - self._shape[0]
        return jnp.concatenate([leaf, jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)])
