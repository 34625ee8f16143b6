"""Columns of numbers: conversion from Arrow to NumPy, and a reader of files of columns. No Python runs per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

from replicax._src.input.chunks import ArrayRows, Chunk, read_pieces
from replicax._src.input.element_specs import ArraySpec
from replicax._src.input.files.formats import FileReader, load
from replicax._src.vocabulary.errors import ReplicaxError

Specs = dict[str, ArraySpec]
"""What the rows of each column look like."""


class ColumnError(ReplicaxError, TypeError):
    """A column is missing, has null values, has a type that no device supports, or differs from the first file."""


@final
class ColumnReader(FileReader):
    """Reads record batches of any size. Its position is the number of the next row.

    Args:
      blocks: Iterates over ``pyarrow.RecordBatch``es.
      close: Closes the file.
      start: The number of the first row of the blocks.
      position: The first row to read.
      expected: The specs of the first file's columns, and its path.
    """

    def __init__(
        self,
        path: str,
        blocks: Iterator[Any],
        close: Callable[[], None],
        expected: tuple[Specs, str],
        start: int = 0,
        position: int = 0,
    ):
        self._path, self._blocks, self._close, self._expected = path, blocks, close, expected
        self._block: Chunk = []
        self._given = 0  # the number of rows taken from the block
        self._position = start
        while self._position < position and self._piece(position - self._position) is not None:
            pass

    def read(self, num_rows: int) -> Chunk:
        return read_pieces(num_rows, self._piece)

    def _piece(self, num_rows: int) -> Chunk | None:
        if self._given == len(self._block) and not self._fill():
            return None
        piece = self._block[self._given : self._given + num_rows]
        self._given += len(piece)
        self._position += len(piece)
        return piece

    def tell(self) -> Any:
        return self._position

    def close(self) -> None:
        self._close()

    def _fill(self) -> bool:
        for block in self._blocks:
            if block.num_rows:
                self._block, self._given = _as_rows(block, self._path, self._expected), 0
                return True
        return False


# --- from Arrow to NumPy ------------------------------------------------------------------------------


def specs_of(schema: Any, columns: tuple[str, ...] | None, path: str) -> Specs:
    """Returns the specs of the rows of some columns.

    Raises:
      ColumnError: A column is missing, repeated or has an unsupported type.
    """
    names = schema.names if columns is None else columns
    repeated = [name for name in names if schema.names.count(name) > 1]
    if repeated:
        raise ColumnError(f"The file {path!r} has several columns {repeated[0]!r}; it has {schema.names}.")
    missing = [name for name in names if name not in schema.names]
    if missing:
        raise ColumnError(f"The file {path!r} has no column {missing[0]!r}; it has {schema.names}.")
    return {name: _spec(schema.field(name).type, name, path) for name in names}


def _spec(arrow_type: Any, name: str, path: str) -> ArraySpec:
    types = load("pyarrow", "from_parquet").types
    if types.is_fixed_size_list(arrow_type):
        inner = _spec(arrow_type.value_type, name, path)
        return ArraySpec((arrow_type.list_size, *inner.shape), inner.dtype)
    kinds = {"i": types.is_signed_integer, "u": types.is_unsigned_integer, "f": types.is_floating}
    for kind, is_of_kind in kinds.items():
        if is_of_kind(arrow_type):
            return ArraySpec((), np.dtype(f"{kind}{arrow_type.bit_width // 8}"))
    if types.is_boolean(arrow_type):
        return ArraySpec((), np.dtype(bool))
    raise ColumnError(
        f"Column {name!r} of {path!r} has the type {arrow_type}. {_advice(types, arrow_type)} Or leave it out: "
        "columns=[...]."
    )


def _advice(types: Any, arrow_type: Any) -> str:
    if types.is_null(arrow_type):
        return "All its values are null; fill them in when the file is written."
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        return (
            "Its rows may have different lengths, and batches are dense. If they are equal, write it as "
            "pyarrow.list_(value_type, length); else pad them."
        )
    if types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_dictionary(arrow_type):
        return "No device holds text; write it as numbers (token ids, categories)."
    return "No device holds it; write it as integers or floats."


def _as_rows(block: Any, path: str, expected: tuple[Specs, str]) -> ArrayRows:
    specs, (first_specs, first_path) = specs_of(block.schema, None, path), expected
    for name in [*first_specs, *specs]:
        got, wanted = specs.get(name), first_specs.get(name)
        if got != wanted:
            raise ColumnError(
                f"Column {name!r} is {_described(got)} in {path!r}, but {_described(wanted)} in {first_path!r}. All "
                "files of a dataset need the same columns."
            )
    return ArrayRows.all_of({name: _as_numpy(block.column(name), name, path) for name in specs})


def _described(spec: ArraySpec | None) -> str:
    return "missing" if spec is None else f"{spec.dtype}{list(spec.shape) or ''}"


def _as_numpy(array: Any, name: str, path: str) -> np.ndarray:
    """Returns an Arrow array as ``[num_rows, ...]``, without a copy unless it holds booleans."""
    if array.null_count:
        raise ColumnError(
            f"Column {name!r} of {path!r} has null (missing) values: {array.null_count} of the {len(array)} in the block "
            "that was read. Replace them when you write the file, or leave the column out: columns=[...]."
        )
    if load("pyarrow", "from_parquet").types.is_fixed_size_list(array.type):
        inner = _as_numpy(array.flatten(), name, path)
        return inner.reshape(len(array), array.type.list_size, *inner.shape[1:])
    return array.to_numpy(zero_copy_only=False)
