"""Values of shards in memory that the server owns: it creates them, overwrites them in place, and takes views of
them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Spec = tuple[tuple[int, ...], np.dtype[Any]]  # a shape and a dtype

BYTES_PER_BLOCK: Final = 1 << 24
_MIN_IN_PLACE_BYTES: Final = 1 << 22


def is_wide(dtype: np.dtype[Any]) -> bool:
    """True if JAX supports this dtype only with x64 enabled."""
    return dtype in (np.int64, np.uint64, np.float64, np.complex128)


def with_dtypes(dtypes: Sequence[np.dtype[Any]]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which arrays keep these dtypes, so that a server holds the dtypes of its clients."""
    return jax.enable_x64(True) if any(map(is_wide, dtypes)) else contextlib.nullcontext()


def copied(value: np.ndarray, device: Any) -> jax.Array:
    """Returns a new array with the contents of ``value``, which may then be overwritten. It needs one block of
    extra memory.
    """
    if value.nbytes > BYTES_PER_BLOCK and value.ndim:
        return filled(value.shape, value.dtype, device, lambda start, stop: value[start:stop])
    with with_dtypes([value.dtype]):
        # `jax_compat.copied` does not work here: it adopts NumPy's memory, and XLA does not write to that in
        # place (jax 0.10).
        return jnp.array(value, copy=True, device=device).block_until_ready()


def filled(
    shape: Sequence[int],
    dtype: np.dtype[Any],
    device: Any,
    rows: Callable[[int, int], np.ndarray],
    rows_per_unit: int = 1,
) -> jax.Array:
    """Returns an array whose rows ``start`` to ``stop`` are ``rows(start, stop)``. It asks in order, in blocks of
    whole units.
    """
    rows_per_block = num_rows_per_block(shape, dtype, rows_per_unit)
    with with_dtypes([dtype]):
        value = jnp.zeros(shape, dtype, device=device)
        for start in range(0, shape[0], rows_per_block):
            block = rows(start, min(start + rows_per_block, shape[0]))
            value = _with_block(value, block, np.int32(start))
            value.block_until_ready()  # the block's memory is reused
    return value


def num_rows_per_block(shape: Sequence[int], dtype: np.dtype[Any], rows_per_unit: int = 1) -> int:
    """Returns the number of rows that are filled at once: a whole number of units."""
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    return max(1, BYTES_PER_BLOCK // max(1, row_bytes * rows_per_unit)) * rows_per_unit


def is_overwritten(value: np.ndarray) -> bool:
    """True if it is faster to write a new value to the old one's memory than to new memory."""
    return value.nbytes >= _MIN_IN_PLACE_BYTES


def overwritten(old: jax.Array, value: np.ndarray) -> jax.Array:
    """Returns an array with the contents of ``value`` in the memory of ``old``, which is deleted."""
    with with_dtypes([value.dtype]):
        return _second(old, value).block_until_ready()


@functools.partial(jax.jit, donate_argnums=0)
def _with_block(whole: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, block, start, 0)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _second(old: jax.Array, value: jax.Array) -> jax.Array:
    del old
    return value
