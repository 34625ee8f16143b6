"""Casts 64-bit host arrays to the dtypes that JAX gives them, 32 bits by default. A number that does not fit is an
error.

JAX would silently keep the lower bits. A program would then look up and train a wrong row of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from replicax._src.vocabulary.errors import InvalidArgumentError


class NarrowingError(InvalidArgumentError):
    """A number of 64 bits does not fit into the 32 bits that JAX gives its array."""


def narrowed(leaves: Sequence[Any], tree: Any, *roots: str) -> Sequence[Any]:
    """Returns the leaves of a pytree, with 64-bit host arrays cast to the dtype that JAX gives them.

    Integers cost a search for the largest and the smallest. Floats cost only the cast.

    Args:
      leaves: Host arrays are checked; other leaves stay unchanged.
      tree: The structure of the pytree.
      roots: The name of the pytree in errors; several are the names of its items.

    Raises:
      NarrowingError: An integer does not fit, or a finite float becomes infinite.

    >>> leaves, tree = jax.tree.flatten({"ids": np.array([3, 4])})
    >>> narrowed(leaves, tree, "batch")
    [array([3, 4], dtype=int32)]
    """
    return narrowed_at(range(len(leaves)), leaves, lambda: names_of(tree, roots))


def as_numpy(value: Any) -> Any:
    """Returns an int as an array, which ``narrowed`` checks; any other value unchanged."""
    return np.asarray(value) if isinstance(value, int) else value


def narrowed_pytree(pytree: Any, *roots: str) -> Any:
    """Like ``narrowed``, for a complete pytree."""
    leaves, tree = jax.tree.flatten(pytree)
    narrow = narrowed(leaves, tree, *roots)
    return pytree if narrow is leaves else tree.unflatten(narrow)


def narrowed_at(
    positions: Iterable[int], leaves: Sequence[Any], names: Callable[[], Sequence[str]]
) -> Sequence[Any]:
    """Like ``narrowed``, for the leaves at some positions; ``names`` returns the names of all leaves for errors."""
    wide = {i for i in positions if _is_wide(leaves[i])}
    if not wide:
        return leaves
    return [_narrowed(leaf, i, names) if i in wide else leaf for i, leaf in enumerate(leaves)]


def _is_wide(leaf: Any) -> bool:
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return False
    dtype = leaf.dtype
    return dtype.itemsize >= 8 and dtype.kind in "iufc" and jax.dtypes.canonicalize_dtype(dtype) != dtype


def _narrowed(array: Any, position: int, names: Callable[[], Sequence[str]]) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if array.size and (array.max() > bounds.max or array.min() < bounds.min):
            raise _error(array, (array > bounds.max) | (array < bounds.min), dtype, names()[position])
        return array.astype(dtype)
    try:
        with np.errstate(all="ignore", over="raise"):
            return array.astype(dtype)
    except FloatingPointError:
        pass
    with np.errstate(all="ignore"):
        is_lost = np.isfinite(array) & ~np.isfinite(array.astype(dtype))
    raise _error(array, is_lost, dtype, names()[position])


def _error(array: Any, is_lost: Any, dtype: np.dtype, name: str) -> NarrowingError:
    index = tuple(map(int, np.argwhere(is_lost)[0]))
    number = array[index]
    with np.errstate(all="ignore"):
        wrong = number.astype(dtype)
    where = f" at {list(index)}" if index else ""
    way = "hash ids, or ids % num_rows" if dtype.kind in "iu" else "scale or clip"
    return NarrowingError(
        f"{name} has {number}{where}. JAX keeps {array.dtype} as {dtype} by default, where it would become {wrong}. Make the "
        f"numbers fit, in the dataset or before the call ({way}; then cast to {dtype}). Or keep 64 bits: "
        'jax.config.update("jax_enable_x64", True) at the start of the program, or JAX_ENABLE_X64=1 in all tasks.'
    )


def names_of(tree: Any, roots: Sequence[str]) -> list[str]:
    """Returns the path of each leaf in a pytree, such as ``args[0]['ids']``; see ``narrowed``."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree.unflatten(range(tree.num_leaves)))]
    if len(roots) == 1:
        return [f"{roots[0]}{jax.tree_util.keystr(path)}" for path in paths]
    return [f"{roots[path[0].idx]}{jax.tree_util.keystr(path[1:])}" for path in paths]
