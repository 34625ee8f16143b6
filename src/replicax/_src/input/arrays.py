"""Arrays as the leaves of elements: checks of their dtypes, and batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import numpy as np

from replicax._src.devices import memory
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError

_NOT_NUMBERS: Final = "OUSMm"
_TO_NUMBERS: Final = (
    "Convert it to numbers first (token ids; for categories np.unique(texts, return_inverse=True)[1]), or leave "
    "it out."
)


class UnsupportedElementError(ReplicaxError, TypeError):
    """A dataset yields a value that is not an array, or an array that no device can hold."""


class InconsistentRowsError(InvalidArgumentError):
    """The arrays of one batch or dataset have different numbers of rows."""


def batch_of_rows(rows: list[Any]) -> Any:
    """Returns a pytree of arrays ``[num_rows, ...]``; text and bytes become arrays of Python objects.

    Raises:
      InconsistentRowsError: The rows differ in structure, shape or dtype.
    """
    leaves, structure = jax.tree.flatten(rows[0])
    try:
        others = [structure.flatten_up_to(row) for row in rows[1:]]
    except (ValueError, TypeError) as error:
        raise InconsistentRowsError(
            f"The rows of a batch differ in structure; the first has {structure}: {str(error).rstrip('. ')}. Make the "
            "map function return the same names and nesting for every row."
        ) from error
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(rows[0])]
    stacked = [_stack(name, column) for name, *column in zip(names, leaves, *others, strict=True)]
    return jax.tree.unflatten(structure, stacked)


def _stack(name: str, column: list[Any]) -> np.ndarray:
    if isinstance(column[0], str | bytes):
        texts = np.empty(len(column), object)
        texts[:] = column
        return texts
    arrays = [np.asarray(value) for value in column]
    kinds = {(array.shape, array.dtype) for array in arrays}
    if len(kinds) > 1:
        some = " and ".join(sorted(f"{dtype}{list(shape)}" for shape, dtype in kinds)[:3])
        raise InconsistentRowsError(
            f"The rows of a batch need one shape and dtype, got {some} for {name or 'the element'}. Pad or cut them, "
            "and convert them (np.float32(...)), in the map function."
        )
    return memory.stack(arrays, len(arrays)) if arrays[0].ndim else np.array(arrays)


def as_array(leaf: Any) -> np.ndarray | jax.Array:
    """Returns a leaf of an element as an array. JAX arrays are unchanged; other values go through NumPy.

    Raises:
      UnsupportedElementError: The leaf is not an array, or no device can hold it.
    """
    if isinstance(leaf, jax.Array):
        if not isinstance(leaf.dtype, np.dtype):
            raise UnsupportedElementError(
                f"Got an array of random keys ({leaf.dtype}); batches are numbers. Pass jax.random.key_data(keys), and call "
                "jax.random.wrap_key_data in the replica function."
            )
        return leaf
    if isinstance(leaf, np.ma.MaskedArray):
        raise UnsupportedElementError(
            f"Got a masked array of shape {leaf.shape}; devices do not support masks. Fill it with .filled(value), and "
            "pass the mask as a separate array."
        )
    if type(leaf).__module__.startswith("scipy.sparse"):
        raise UnsupportedElementError(
            f"Got a scipy sparse matrix ({type(leaf).__name__}); batches are dense. Convert each batch with "
            ".toarray(), or pass the row numbers and values as two arrays."
        )
    array = np.asarray(leaf)
    if array.dtype.kind in _NOT_NUMBERS or array.dtype.names is not None:
        raise UnsupportedElementError(_unsupported_dtype_text(leaf, array))
    if array.dtype.char in "gG":
        raise UnsupportedElementError(
            f"Got dtype {array.dtype}, which no device can hold; convert it with .astype(np.float64 or np.complex128)."
        )
    # This array has another byte order, and devices would not swap its bytes.
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def converted(pytree: Any, convert: Callable[[Any], Any] = as_array) -> Any:
    """Returns a pytree with its leaves as arrays.

    Raises:
      UnsupportedElementError: A leaf is not an array, or no device can hold it. The error names the leaf.
    """
    try:
        return jax.tree.map(convert, pytree)
    except UnsupportedElementError:
        for path, leaf in jax.tree_util.tree_leaves_with_path(pytree):
            try:
                convert(leaf)
            except UnsupportedElementError as error:
                raise _named(error, jax.tree_util.keystr(path)) from None
        raise


def check_numbers(pytree: Any, root: str = "") -> None:
    """Raises if arrays in memory hold text, dates or Python objects.

    Args:
      pytree: Tuples, lists and dicts of arrays, tables of pandas, and anything else, which is not checked.
      root: The name of the pytree in errors.

    Raises:
      UnsupportedElementError: They do. The error names the array, or the column of the table.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        pytree, is_leaf=lambda x: not isinstance(x, (tuple, list, dict))
    )
    for path, leaf in leaves:
        if not path and isinstance(leaf, str | bytes):  # perhaps the name of a file
            continue
        for name, array in _in_memory(leaf):
            if array.dtype.kind in _NOT_NUMBERS:
                error = UnsupportedElementError(_unsupported_dtype_text(leaf, array))
                raise _named(error, f"{root}{jax.tree_util.keystr(path)}{name}")


def _in_memory(leaf: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the NumPy array of a leaf, or the columns of text of a table, each with its name in the leaf."""
    if isinstance(leaf, (np.ndarray, np.generic, str, bytes)):
        yield "", np.asarray(leaf)
    elif type(leaf).__module__.startswith("pandas."):
        columns = leaf.items() if type(leaf).__name__ == "DataFrame" else [(None, leaf)]
        for name, column in columns:
            if (
                getattr(column, "dtype", None) == np.dtype(object)
                and len(column)
                and isinstance(column.iloc[0], str)
            ):
                yield "" if name is None else f"[{name!r}]", column.to_numpy()


def _named(error: UnsupportedElementError, name: str) -> UnsupportedElementError:
    return UnsupportedElementError(f"The component {name}: {error}") if name else error


def common_num_rows(pytree: Any) -> int:
    """Returns the number of rows that all arrays ``[num_rows, ...]`` of a pytree have.

    Raises:
      UnsupportedElementError: The pytree has no arrays.
      InconsistentRowsError: The numbers of rows differ.
    """
    sizes = {array.shape[0] for array in jax.tree.leaves(pytree)}
    if not sizes:
        raise UnsupportedElementError(f"Got {pytree!r}, which contains no arrays.")
    if len(sizes) > 1:
        raise InconsistentRowsError(
            "All arrays of a batch need the same number of rows (the size of the first dim), got "
            f"{describe_shapes(pytree)}."
        )
    return sizes.pop()


def describe_shapes(pytree: Any) -> str:
    """Returns ``['x']: (4, 3), ['y']: (5,)`` for the arrays of a pytree."""
    leaves = jax.tree_util.tree_leaves_with_path(pytree)
    return ", ".join(f"{jax.tree_util.keystr(path) or 'array'}: {array.shape}" for path, array in leaves)


def _unsupported_dtype_text(leaf: Any, array: np.ndarray) -> str:
    got = f"Got {type(leaf).__name__} with dtype {array.dtype}"
    if array.dtype.kind == "O" and array.size and isinstance(array.flat[0], str | bytes):
        kind = "text" if isinstance(array.flat[0], str) else "bytes"
        return f"{got}, which holds {kind}; no device does. {_TO_NUMBERS}"
    if array.dtype.kind == "O" and not array.ndim:
        return f"Got {leaf!r} of type {type(leaf).__name__}, which is not an array; elements are pytrees of arrays."
    if array.dtype.kind == "O":
        return f"{got}, which holds Python objects (rows of different lengths?); pad them to one shape."
    if array.dtype.kind in "US":
        return f"{got}; no device holds text. {_TO_NUMBERS}"
    return f"{got}, which no device can hold; convert it to numbers first."
