"""Parquet files, which pyarrow reads."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from typing import Any, Final

from replicax._src.input.files.columns import ColumnReader, Specs, specs_of
from replicax._src.input.files.formats import FileFormat, FileReader, load, reading

_BYTES_PER_BLOCK: Final = 8 << 20  # decoded at once; large enough to make the cost per block negligible
_MAX_ROWS_PER_BLOCK: Final = 1 << 16


def parquet(first_file: str, columns: tuple[str, ...] | None) -> FileFormat:
    """Returns the format of Parquet files.

    Args:
      first_file: All other files must have its columns.
      columns: The columns to read; None reads all.
    """

    @functools.cache
    def row_spec() -> Specs:
        with reading(first_file, format), _open(first_file) as file:
            return specs_of(file.schema_arrow, columns, first_file)

    def open_at(path: str, position: Any) -> FileReader:
        expected = row_spec()
        file = _open(path)
        specs = specs_of(file.schema_arrow, columns, path)
        row = position or 0
        groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        starts = list(itertools.accumulate(groups, initial=0))
        first = max(bisect.bisect_right(starts, row) - 1, 0)
        blocks = file.iter_batches(_rows_per_block(specs), range(first, len(groups)), list(specs))
        return ColumnReader(path, blocks, file.close, (expected, first_file), starts[first], row)

    options = f"Parquet(columns={columns!r})"
    format = FileFormat("Parquet", options, open_at, _count_rows, row_spec, has_columns=True)
    return format


def _count_rows(path: str) -> int:
    with _open(path) as file:
        return file.metadata.num_rows


def _open(path: str) -> Any:
    # pre_buffer would prefetch all row groups, however large the file.
    parquet = load("pyarrow.parquet", "from_parquet")
    return parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)


def _rows_per_block(specs: Specs) -> int:
    bytes_per_row = sum(
        spec.dtype.itemsize * math.prod(size or 1 for size in spec.shape) for spec in specs.values()
    )
    return min(max(_BYTES_PER_BLOCK // max(bytes_per_row, 1), 1), _MAX_ROWS_PER_BLOCK)
