"""``ShardedVariable``: several shards, cut along the first dim, that act as one variable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, TypeAlias, TypeGuard, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.collectives.in_replica import IndexedSlices
from replicax._src.jax_internals import jax_compat
from replicax._src.values.array_types import ConvertibleToArray, shape_of
from replicax._src.values.distributed import ArrayLike
from replicax._src.values.framework import is_variable
from replicax._src.variables.shards import (
    Shards,
    ShardsInVariables,
    ShardsOfOne,
    VariableShard,
    array_of_shape,
)
from replicax._src.variables.variable import Variable
from replicax._src.vocabulary.errors import InvalidArgumentError, VariableError

Index: TypeAlias = "slice | EllipsisType | ConvertibleToArray | None"
"""What indexes one dim of an array, or several."""


@final
class ShardedVariable(ArrayLike):
    """Several shards that act as one variable, joined along the first dim.

    It acts as the full array in arithmetic, in JAX functions and in ``[]``. Iteration and ``len`` are over the shards.
    The contexts of ``rx.Variable`` apply here too: an assignment in ``Strategy.run`` is combined over replicas by the
    shards' ``aggregation``.

    Args:
      variables: The shards: a list of ``rx.Variable`` whose shapes agree in all dims but the first.
      name: The name in messages and checkpoints.

    Raises:
      TypeError: The argument is not a list of variables, or is empty.
      VariableError: The shards differ in dtype, or in a dim other than the first.

    Source: TensorFlow, ``ShardedVariable``. Differences: ``sparse_read`` returns rows in the order of the indices, the
    shards may have any sizes, and ``[]`` takes arrays of ids.

    >>> import replicax as rx
    >>> v = rx.experimental.ShardedVariable([rx.Variable([1.0, 2.0]), rx.Variable([3.0])])
    >>> v.assign_add([1.0, 1.0, 1.0])
    ShardedVariable('ShardedVariable', shape=(3,), dtype=float32, num_shards=2)
    >>> v[::-1].tolist()
    [4.0, 3.0, 2.0]
    """

    def __init__(self, variables: Sequence[Variable] | Shards, name: str = "ShardedVariable"):
        self._shards = variables if isinstance(variables, Shards) else ShardsInVariables(variables, name)

    @classmethod
    def in_one(cls, variable: Variable, num_shards: int) -> ShardedVariable:
        """Returns the shards of one variable that has all rows."""
        return cls(ShardsOfOne([variable], num_shards), variable.name)

    @property
    def variables(self) -> list[Variable] | list[VariableShard]:
        """The shards."""
        return self._shards.variables

    @property
    def name(self) -> str:
        return self._shards.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full array."""
        return self._shards.shape

    @property
    def dtype(self) -> np.dtype:
        return self._shards.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def shards(self) -> Shards:
        """The storage of the shards."""
        return self._shards

    def __len__(self) -> int:
        return len(self._shards.rows)

    def __iter__(self) -> Iterator[Variable | VariableShard]:
        return iter(self.variables)

    def __repr__(self) -> str:
        return (
            f"ShardedVariable({self.name!r}, shape={self.shape}, dtype={jnp.dtype(self.dtype).name}, "
            f"num_shards={len(self)})"
        )

    # --- reading --------------------------------------------------------------------------------------

    @property
    def value(self) -> jax.Array:
        """The full array."""
        return self._shards.read()

    def read_value(self) -> jax.Array:
        """Returns ``value``."""
        return self._shards.read()

    def as_array(self) -> jax.Array:
        return self._shards.read()

    def numpy(self) -> np.ndarray:
        """Returns the full array as a NumPy array (a copy). Blocks until it is computed."""
        return np.array(self._shards.read())

    def __getitem__(self, index: Index | tuple[Index, ...]) -> jax.Array:
        """Returns ``value[index]``, for ints, slices, ``...``, ``None``, masks and arrays of ints.

        Raises:
          IndexError: An index is out of bounds. Traced indices are not checked.
          InvalidArgumentError: A mask has another shape, or is ``True`` or ``False``.
        """
        items = tuple(map(_plain_index, index if isinstance(index, tuple) else (index,)))
        _check_bounds(items, self.shape)
        if len(items) == 1 and _is_array(items[0]) and not _is_mask(items[0]):
            return self._shards.read_rows(items[0])
        return jnp.asarray(self._shards.read())[items]

    def sparse_read(self, indices: Any) -> jax.Array:
        """Returns rows [n, ...] for a 1-D array of indices [n], in the order of the indices.

        Raises:
          InvalidArgumentError: The indices are not 1-D, not integers or, if their values are known, out of range.
        """
        return self._shards.read_rows(_checked_indices(indices, self.shape[0]))

    # --- assigning ------------------------------------------------------------------------------------

    def assign(self, value: Any, read_value: bool = True) -> ShardedVariable:
        """Replaces the value by an array of the full shape. Each shard gets its rows. Returns the variable."""
        del read_value
        return self._update("assign", value)

    def assign_add(self, delta: Any, read_value: bool = True) -> ShardedVariable:
        """Adds an array of the full shape. Each shard gets its rows. Returns the variable."""
        del read_value
        return self._update("assign_add", delta)

    def assign_sub(self, delta: Any, read_value: bool = True) -> ShardedVariable:
        """Subtracts an array of the full shape. Each shard gets its rows. Returns the variable."""
        del read_value
        return self._update("assign_sub", delta)

    def scatter_add(self, sparse_delta: IndexedSlices) -> ShardedVariable:
        """Adds rows: ``variable[indices[i]] += values[i]``. Returns the variable.

        Raises:
          VariableError: The argument is not ``rx.IndexedSlices``, or its values have the wrong shape.
          InvalidArgumentError: The indices are not 1-D, not integers or, if their values are known, out of range.
            Traced indices out of range are ignored.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> ShardedVariable:
        """Subtracts rows, as in ``scatter_add``."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> ShardedVariable:
        """Multiplies rows, as in ``scatter_add``."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> ShardedVariable:
        """Divides rows, as in ``scatter_add``."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> ShardedVariable:
        """Takes the elementwise minimum of rows, as in ``scatter_add``."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> ShardedVariable:
        """Takes the elementwise maximum of rows, as in ``scatter_add``."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> ShardedVariable:
        """Replaces rows, as in ``scatter_add``."""
        return self._scatter("scatter_update", sparse_delta)

    def batch_scatter_update(self, sparse_delta: IndexedSlices) -> ShardedVariable:
        """Replaces rows, as ``scatter_update`` does; the two are the same for 1-D indices."""
        return self._scatter("scatter_update", sparse_delta)

    def _update(self, method: str, value: ConvertibleToArray) -> ShardedVariable:
        array = array_of_shape(value, self.shape, f"{method} of variable {self.name!r}")
        self._shards.update(method, array)
        return self

    def _scatter(self, method: str, delta: IndexedSlices) -> ShardedVariable:
        if not isinstance(delta, IndexedSlices):
            raise VariableError(
                f"{method} takes rx.IndexedSlices(values, indices), got {type(delta).__name__}."
            )
        indices = _checked_indices(delta.indices, self.shape[0])
        shape = (*indices.shape, *self.shape[1:])
        values = array_of_shape(delta.values, shape, f"{method} of variable {self.name!r}")
        self._shards.update_rows(method, indices, values)
        return self


# --- checks -------------------------------------------------------------------------------------------


def check_ids(ids: ConvertibleToArray, num_rows: int | None, what: str) -> jax.Array:
    """Returns row numbers as an array of ints. Checks their range if their values are known and ``num_rows`` is given.

    Raises:
      InvalidArgumentError: They are not integers, or one is not in ``[0, num_rows)``.
    """
    ids = ids.as_array() if isinstance(ids, ArrayLike) else ids
    array = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if array.size == 0 and not isinstance(ids, (jax.Array, np.ndarray)):
        array = array.astype(np.int32)  # NumPy makes [] an array of floats
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise InvalidArgumentError(f"{what} must be integers, the numbers of rows; got dtype {array.dtype}.")
    if num_rows is not None and not isinstance(array, jax_compat.Tracer):
        known = np.asarray(array)
        wrong = known[(known < 0) | (known >= num_rows)]
        if wrong.size:
            raise InvalidArgumentError(
                f"{what} has {int(wrong.flat[0])}, which is not in [0, {num_rows}): there are {num_rows} rows."
            )
    return jnp.asarray(array) if array.dtype.itemsize >= 4 else jnp.asarray(array, jnp.int32)  # all rows fit


def _checked_indices(indices: ConvertibleToArray, num_rows: int) -> jax.Array:
    shape = shape_of(indices)
    if len(shape) != 1:
        raise InvalidArgumentError(
            f"ShardedVariable: indices must be 1D Tensor for sparse operations. Received shape: {shape}. For other "
            f"shapes use rx.nn.embedding_lookup."
        )
    return check_ids(indices, num_rows, "indices")


def _plain_index(item: Index) -> Index:
    if isinstance(item, list):
        return np.asarray(item)
    return item.as_array() if isinstance(item, ArrayLike) else item


def _is_array(item: Index) -> TypeGuard[np.ndarray | np.number | np.bool_ | jax.Array]:
    return isinstance(item, (np.ndarray, np.number, np.bool_, jax.Array))


def _is_mask(item: Index) -> TypeGuard[np.ndarray | np.bool_ | jax.Array]:
    return _is_array(item) and item.dtype == bool


def _check_bounds(items: tuple[Index, ...], shape: tuple[int, ...]) -> None:
    """Raises if an index is out of bounds, where JAX would take the nearest row or an arbitrary one."""
    taken = [0 if x is None or x is Ellipsis else x.ndim if _is_mask(x) else 1 for x in items]
    if sum(taken) > len(shape):
        raise IndexError(f"ShardedVariable: {sum(taken)} indices were given, for shape {shape}.")
    dim = 0
    for item, num_dims in zip(items, taken, strict=True):
        if isinstance(item, bool) or _is_mask(item):
            _check_mask(shape_of(item), shape[dim : dim + num_dims], shape)
        is_known = not isinstance(item, jax_compat.Tracer) and not _is_mask(item)
        if is_known and (isinstance(item, int) or _is_array(item)):
            _check_known(item, dim, shape[dim])
        dim += len(shape) - sum(taken) if item is Ellipsis else num_dims


def _check_mask(shape: tuple[int, ...], wanted: tuple[int, ...], whole: tuple[int, ...]) -> None:
    if not shape:
        raise InvalidArgumentError(
            f"ShardedVariable: mask cannot be scalar. Give one of shape {whole[:1]}, or {whole}."
        )
    if shape != wanted:
        raise InvalidArgumentError(f"ShardedVariable: a mask of shape {shape} where it should be {wanted}.")


def _check_known(item: ConvertibleToArray, dim: int, size: int) -> None:
    numbers = np.asarray(item)
    wrong = numbers[(numbers < -size) | (numbers >= size)]
    if wrong.size:
        raise IndexError(
            f"ShardedVariable: slice index {wrong.flat[0]} of dimension {dim} out of bounds. Its size is {size}."
        )


# --- in functions of JAX ------------------------------------------------------------------------------


def _unflatten(description: tuple[Callable[..., Shards], tuple[Any, ...]], leaves: Sequence[Any]) -> Any:
    """Rebuilds the variable; from values or gradients of its shards, returns the full array."""
    kind, details = description
    leaves = tuple(leaves)
    if all(map(is_variable, leaves)):
        return ShardedVariable(kind(leaves, *details))
    if len(leaves) == 1:
        return leaves[0]
    return jnp.concatenate(leaves) if all(map(_is_array, leaves)) else leaves


jax.tree_util.register_pytree_node(
    ShardedVariable,
    lambda v: (v.shards.held, (type(v.shards), v.shards.description)),
    _unflatten,
)
