"""Lookups in tables of embeddings: ``rx.nn.embedding_lookup``, ``embedding_lookup_sparse`` and
``rx.experimental.lookup``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.markers import rows_p
from replicax._src.values.array_types import ConvertibleToArray, shape_of
from replicax._src.values.distributed import ArrayLike
from replicax._src.values.framework import is_variable
from replicax._src.variables.remote_array import RemoteArray
from replicax._src.variables.sharded import ShardedVariable, check_ids
from replicax._src.variables.shards import take_rows
from replicax._src.vocabulary.errors import InvalidArgumentError

COMBINERS = ("mean", "sqrtn", "sum")


def embedding_lookup(params: Any, ids: Any, max_norm: float | None = None) -> jax.Array:
    """Returns rows of a table, in the order of the ids.

    For a table on parameter servers, only the requested rows travel, each once. Works in every context, and is
    differentiable.

    Args:
      params: The table [rows, ...]: a ``ShardedVariable``, a variable (also of Keras), or an array; or a list of such,
        which are the parts of one table in order ("div" sharding).
      ids: Integers of any shape, in ``[0, rows)``. A traced function cannot raise: an id out of range gives a row of
        NaN, and negative ids count from the end, as in ``jnp.take``.
      max_norm: The largest 2-norm. A row with a larger norm is scaled: row · max_norm / max(‖row‖, max_norm).

    Returns:
      An array ``[*ids.shape, ...]`` of the table's dtype.

    Raises:
      InvalidArgumentError: Ids are not integers or, if their values are known, out of range; or the list is empty.

    Source: TensorFlow, ``tf.nn.embedding_lookup``.

    >>> import jax.numpy as jnp
    >>> embedding_lookup(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), [2, 0]).tolist()
    [[5.0, 6.0], [1.0, 2.0]]
    """
    remote = None if current_capture() is not None else remote_table(params)
    table: Any = _table(params) if remote is None else remote
    ids = check_ids(ids, table.shape[0], "ids")
    if remote is not None:
        rows = jnp.asarray(remote.read_rows(np.asarray(ids)))
    else:
        rows = table.shards.read_rows(ids) if isinstance(table, ShardedVariable) else take_rows(table, ids)
    return rows if max_norm is None else _clipped(rows, max_norm, ids.ndim)


def lookup(table: Any, ids: Any) -> jax.Array:
    """Returns rows of a table that may be sharded over replicas, without gathering the table.

    It is ``table[ids]``, in every context, and is differentiable. With ``shard_state="all"`` each replica holds a shard
    of a trainable table. In ``Strategy.run`` and ``fit`` the replicas then exchange ids and rows, whatever the number
    of ids. With n ids on each of the S replicas that share a table, a lookup moves S·n rows to each replica, and so
    does its gradient. ``embedding_lookup``, ``table[ids]`` and Keras's ``Embedding`` do the same for tables of at least
    1 MiB if all replicas together look up fewer rows than the table has. Otherwise they gather the table. The reference
    of sharded state lists the cases in which ``lookup`` gathers it, too.

    All replicas must call it, also those without rows. It communicates; it does not block.

    Args:
      table: [rows, ...]: an ``rx.Variable``, a variable of Keras, a ``ShardedVariable``, or an array.
      ids: Integers of any shape, this replica's own. An id out of range gives a row of NaN, and negative ids count
        from the end.

    Returns:
      An array ``[*ids.shape, ...]`` of the table's dtype.

    Raises:
      InvalidArgumentError: Ids are not integers.

    >>> import jax.numpy as jnp
    >>> lookup(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), [2, 0]).tolist()
    [[5.0, 6.0], [1.0, 2.0]]
    """
    if remote_table(table) is not None:
        return embedding_lookup(table, ids)
    table, ids = _table(table), check_ids(ids, None, "ids")
    if isinstance(table, ShardedVariable):
        return table.shards.read_rows(ids)
    return take_rows(rows_p.bind(table) if isinstance(table, jax_compat.Tracer) else table, ids)


def embedding_lookup_sparse(
    params: Any,
    ids: Any,
    weights: Any = None,
    combiner: str | None = None,
    max_norm: float | None = None,
    *,
    mask: Any = None,
) -> jax.Array:
    """Combines the rows of each example's ids. Examples may have different numbers of ids.

    With rows e_i and weights w_i (1 without ``weights``) of one example: "sum" is Σ w_i e_i, "mean" is
    Σ w_i e_i / Σ w_i, "sqrtn" is Σ w_i e_i / √(Σ w_i²); The result is 0 for an example without ids or a division by 0.
    Works in every context, and is differentiable, also with respect to ``weights``.

    TensorFlow's function takes a SparseTensor or a RaggedTensor. Here the ids are a padded array with a ``mask``, or a
    list of lists.

    Args:
      params: As for ``embedding_lookup``, with a floating dtype.
      ids: [..., n] integers; or, outside of traced functions, a list with a list of ids for each example.
      weights: As ``ids``, or None.
      combiner: "mean" (the default), "sqrtn" or "sum".
      max_norm: As for ``embedding_lookup``; applied to each row before they are combined.
      mask: [..., n] bool, True for valid ids; the others are ignored. Use ``ids >= 0`` if -1 is padding.

    Returns:
      An array ``[..., *row]`` of the table's dtype.

    Raises:
      InvalidArgumentError: The combiner is unknown, weights or mask have another shape than the ids, or the table has
        integers.

    Source: TensorFlow, ``tf.nn.embedding_lookup_sparse``.

    >>> import jax.numpy as jnp
    >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> embedding_lookup_sparse(table, [[0, 2], [1], []], combiner="mean").tolist()
    [[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]]
    """
    combiner = combiner or "mean"
    if combiner not in COMBINERS:
        raise InvalidArgumentError(f"combiner must be one of 'mean', 'sqrtn' or 'sum', got {combiner!r}.")
    if _is_ragged(ids):
        if mask is not None:
            raise InvalidArgumentError("A list of lists of ids needs no mask: leave mask out.")
        ids, weights, mask = _padded(ids, weights)
    table = _table(params)
    if not jnp.issubdtype(table.dtype, jnp.inexact):
        raise InvalidArgumentError(
            f"Rows are combined in a floating dtype, but params has dtype {table.dtype}."
        )
    mask = None if mask is None else _of_shape_of_ids("mask", mask, ids).astype(bool)
    if mask is not None:
        ids = jnp.where(mask, jnp.asarray(_plain(ids)), 0)
    rows = embedding_lookup(table, ids, max_norm)
    weights = jnp.ones(shape_of(ids)) if weights is None else _of_shape_of_ids("weights", weights, ids)
    exact = jnp.promote_types(rows.dtype, jnp.float32)  # sums in half precision lose digits
    weights = weights.astype(exact)
    if mask is not None:
        weights = jnp.where(mask, weights, 0)
    return _combined(rows.astype(exact), weights, combiner).astype(rows.dtype)


def remote_table(params: ConvertibleToArray) -> RemoteArray | None:
    """Returns the array of a variable (also of Keras) or ``ShardedVariable`` if it is a table whose rows live
    elsewhere; else None.
    """
    strategy, held = owner_of_table(params)
    return None if strategy is None else strategy.variable_placement.table_of(held)


def owner_of_table(params: ConvertibleToArray) -> tuple[AnyStrategy | None, Any]:
    """Returns the strategy in whose scope a variable was made, and the variable with all rows; None if there is
    none.
    """
    if isinstance(params, ShardedVariable):
        params, *others = params.shards.held
        if others:
            return None, None
    if not is_variable(params):
        return None, None
    return context.owner_of(params), params


def _combined(rows: jax.Array, weights: jax.Array, combiner: str) -> jax.Array:
    """Combines rows [..., n, *row] with weights [..., n] to [..., *row]."""
    axis = weights.ndim - 1
    row_dims = tuple(range(weights.ndim, rows.ndim))
    total = jnp.sum(rows * jnp.expand_dims(weights, row_dims), axis)
    if combiner == "sum":
        return total
    norm = jnp.sum(weights, axis) if combiner == "mean" else _norm(weights, (axis,), keepdims=False)
    norm = jnp.expand_dims(norm, tuple(dim - 1 for dim in row_dims))
    return jnp.where(norm == 0, 0, total / jnp.where(norm == 0, 1, norm))


def _clipped(rows: jax.Array, max_norm: float, num_id_dims: int) -> jax.Array:
    norm = _norm(rows, tuple(range(num_id_dims, rows.ndim)), keepdims=True)
    return (rows * max_norm / jnp.maximum(norm, max_norm)).astype(rows.dtype)


def _norm(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
    """Returns the 2-norm, with gradient 0 at 0."""
    squares = jnp.sum(x * x, axes, keepdims=keepdims)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def _table(params: ConvertibleToArray) -> ShardedVariable | jax.Array:
    """Returns a ShardedVariable unchanged and anything else as an array."""
    if isinstance(params, ShardedVariable):
        return params
    if isinstance(params, (list, tuple)):
        if not params:
            raise InvalidArgumentError("params is an empty list: a table has at least one part.")
        if all(is_variable(p) or isinstance(p, (ArrayLike, jax.Array, np.ndarray)) for p in params):
            first, *others = params
            return jnp.concatenate([jnp.asarray(_plain(p)) for p in params]) if others else _table(first)
    return _of_rows(jnp.asarray(_plain(params)))


def _of_rows(table: jax.Array) -> jax.Array:
    if table.ndim == 0:
        raise InvalidArgumentError(f"params is a scalar, {table}: a table has rows, [rows, ...].")
    return table


def _plain(x: ConvertibleToArray) -> ConvertibleToArray:
    return x.as_array() if isinstance(x, ArrayLike) else x


def _of_shape_of_ids(name: str, value: ConvertibleToArray, ids: ConvertibleToArray) -> jax.Array:
    array = jnp.asarray(_plain(value))
    if array.shape != shape_of(ids):
        raise InvalidArgumentError(
            f"{name} has shape {array.shape}, and ids {shape_of(ids)}: give one for each id."
        )
    return array


def _is_ragged(ids: ConvertibleToArray) -> TypeGuard[Sequence[Sequence[int]]]:
    return isinstance(ids, (list, tuple)) and any(isinstance(row, (list, tuple, np.ndarray)) for row in ids)


def _padded(ids: Sequence[Any], weights: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Pads lists of different lengths to arrays. Returns ids, weights and the mask of valid ids."""
    sizes = [len(row) for row in ids]
    if weights is not None and [np.size(row) for row in weights] != sizes:
        raise InvalidArgumentError(
            f"weights has rows of {[np.size(row) for row in weights]} numbers, and ids of {sizes}: give one for each id."
        )
    mask = np.arange(max(sizes)) < np.array(sizes)[:, None]
    padded = np.zeros(mask.shape, np.int64)
    padded[mask] = _joined(ids)
    if weights is None:
        return padded, None, mask
    padded_weights = np.zeros(mask.shape, np.float32)
    padded_weights[mask] = _joined(weights)
    return padded, padded_weights, mask


def _joined(rows: Sequence[Any]) -> np.ndarray:
    return np.concatenate(
        [np.asarray(row).reshape(-1) for row in rows if len(row)] or [np.zeros(0, np.int64)]
    )
