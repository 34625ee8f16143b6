"""Parquet files, which pyarrow reads."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, Final, final

from replicax._src.input.files.columns import ColumnReader, Specs, specs_of
from replicax._src.input.files.formats import FileFormat, FileReader, load, reading

_BYTES_PER_BLOCK: Final = 8 << 20  # decoded at once; large enough to make the cost per block negligible
_MAX_ROWS_PER_BLOCK: Final = 1 << 16


@final
@dataclass(frozen=True)
class ParquetOptions:
    """The options of reading Parquet files.

    Attributes:
      first_file: All other files must have its columns.
      columns: The columns to read; None reads all.
    """

    first_file: str
    columns: tuple[str, ...] | None

    def format(self) -> FileFormat:
        """Returns the format of Parquet files that are read with these options."""
        options = f"Parquet(columns={self.columns!r})"
        return FileFormat("Parquet", options, self._open_at, _count_rows, self._row_spec, has_columns=True)

    def _row_spec(self) -> Specs:
        return self._first

    @functools.cached_property
    def _first(self) -> Specs:
        """The specs of the first file's columns."""
        with reading(self.first_file, self.format()), _open(self.first_file) as file:
            return specs_of(file.schema_arrow, self.columns, self.first_file)

    def _open_at(self, path: str, position: Any) -> FileReader:
        expected = self._first, self.first_file
        file = _open(path)
        specs = specs_of(file.schema_arrow, self.columns, path)
        row = position or 0
        groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        starts = list(itertools.accumulate(groups, initial=0))
        first = max(bisect.bisect_right(starts, row) - 1, 0)
        blocks = file.iter_batches(_rows_per_block(specs), range(first, len(groups)), list(specs))
        return ColumnReader(path, blocks, file.close, expected, starts[first], row)


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
