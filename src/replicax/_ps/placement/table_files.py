"""Saves and loads tables on parameter servers in blocks of rows, so that no process holds a full table."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from replicax._src.program_kit.errors import InvalidArgumentError
from replicax._src.program_kit.texts import path_of
from replicax._src.program_kit.variables import RemoteArray, owner_of_table

_BLOCK_BYTES = 16 << 20


def save_table(table: Any, path: str | os.PathLike[str]) -> None:
    """Writes a table on parameter servers to a NumPy file (``.npy``).

    The table travels in blocks of 16 MiB, so it may be larger than the memory of this process. While functions run, one
    block may be older than another: call ``coordinator.join()`` before. The call blocks until the file is written. The
    complete file then replaces an existing one. Optimizer slots of a table are tables, too: see
    ``optimizer.variables``.
    NumPy files have no name for bfloat16: read it as ``numpy.load(path).view(ml_dtypes.bfloat16)``.

    Args:
      table: A variable [rows, ...] (also of Keras) or a ``ShardedVariable``, made in the scope of a
        ParameterServerStrategy.
      path: The path of the file.

    Raises:
      InvalidArgumentError: The argument is not a table on parameter servers.
      UnavailableError: A parameter server is gone.
    """
    stored = _stored(table, *owner_of_table(table))
    path = path_of(path, "path", "table.npy")
    rows = np.lib.format.open_memmap(f"{path}.part", "w+", stored.dtype, stored.shape)
    for block in _blocks(stored):
        rows[block.start : block.stop] = stored.read_rows(np.arange(block.start, block.stop))
    rows.flush()
    os.replace(f"{path}.part", path)


def load_table(table: Any, path: str | os.PathLike[str]) -> None:
    """Assigns the table that ``save_table`` has written, also in blocks.

    Args:
      table: As for ``save_table``. Its shards may differ from those of the saved table.
      path: The path of the file.

    Raises:
      InvalidArgumentError: The argument is not a table on parameter servers, or the file's table has another shape or
        dtype.
    """
    strategy, held = owner_of_table(table)
    stored = _stored(table, strategy, held)
    rows = np.load(path_of(path, "path", "table.npy"), mmap_mode="r")
    in_file = np.dtype(
        np.lib.format.dtype_to_descr(stored.dtype)
    )  # these files store only the size of bfloat16
    if rows.shape != stored.shape or rows.dtype != in_file:
        raise InvalidArgumentError(
            f"{os.fspath(path)!r} has a table of shape {rows.shape} and dtype {rows.dtype}, and {stored.name!r} is {stored.shape}, "
            f"{stored.dtype}. Give a table of the same shape and dtype."
        )
    assert strategy is not None  # the table has an owner

    def assign(ids: Any, values: Any) -> None:
        held.assign(held.value.at[ids].set(values))  # the servers get it as rows

    rows = rows.view(stored.dtype)
    for block in _blocks(stored):
        ids = np.arange(block.start, block.stop, dtype=np.int32)
        strategy.variable_placement.update(assign, ids, np.array(rows[block.start : block.stop]))


def _stored(table: Any, strategy: Any, held: Any) -> RemoteArray:
    stored = None if strategy is None else strategy.variable_placement.table_of(held)
    if stored is None:
        raise InvalidArgumentError(
            f"Tables on parameter servers are in shards or have at least 1 MiB, and have rows, [rows, ...]; got {table!r:.200}. "
            "Save other variables with numpy.save(path, variable)."
        )
    return stored


def _blocks(stored: RemoteArray) -> Iterator[range]:
    """Yields ranges of rows, each of which fits into one block."""
    row_bytes = max(1, math.prod(stored.shape[1:]) * stored.dtype.itemsize)
    rows_per_block = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, stored.shape[0], rows_per_block):
        yield range(start, min(start + rows_per_block, stored.shape[0]))
