"""Parquet files, which pyarrow reads."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Final, final

from replicax._src.input.files.columns import ColumnReader, Specs, specs_of
from replicax._src.input.files.formats import REWRITE, FileFormat, FileReader, load, reading

_BYTES_PER_BLOCK: Final = 8 << 20  # decoded at once; enough that the cost per block is not seen
_MAX_ROWS_PER_BLOCK: Final = 1 << 16


@final
@dataclass(frozen=True)
class Parquet(FileFormat):
    """Parquet files.

    Attributes:
      first_file: Whose columns all other files must have.
      columns: Which to read; None is all of them.
    """

    first_file: str = field(repr=False)
    columns: tuple[str, ...] | None

    name = "Parquet"
    advice = REWRITE
    has_columns = True

    def open(self, path: str, position: Any) -> FileReader:
        expected = self.row_spec
        file = _open(path)
        specs = specs_of(file.schema_arrow, self.columns, path)
        row = position or 0
        groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        starts = list(itertools.accumulate(groups, initial=0))
        first = max(bisect.bisect_right(starts, row) - 1, 0)
        blocks = file.iter_batches(_rows_per_block(specs), range(first, len(groups)), list(specs))
        return ColumnReader(path, blocks, file.close, (expected, self.first_file), starts[first], row)

    def count_rows(self, path: str) -> int | None:
        with _open(path) as file:
            return file.metadata.num_rows

    @functools.cached_property
    def row_spec(self) -> Specs:
        with reading(self.first_file, self), _open(self.first_file) as file:
            return specs_of(file.schema_arrow, self.columns, self.first_file)


def _open(path: str) -> Any:
    # pre_buffer would read all row groups ahead, however large the file.
    parquet = load("pyarrow.parquet", "from_parquet")
    return parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)


def _rows_per_block(specs: Specs) -> int:
    bytes_per_row = sum(
        spec.dtype.itemsize * math.prod(size or 1 for size in spec.shape) for spec in specs.values()
    )
    return min(max(_BYTES_PER_BLOCK // max(bytes_per_row, 1), 1), _MAX_ROWS_PER_BLOCK)
