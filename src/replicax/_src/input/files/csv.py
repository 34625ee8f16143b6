"""CSV files, which pyarrow reads."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

from replicax._src.input.files.columns import ColumnError, ColumnReader, Specs, specs_of
from replicax._src.input.files.formats import FileFormat, FileReader, load, reading
from replicax._src.input.files.records import is_gzip

_ADVICE: Final = (
    "It is damaged, or a line has not as many values as the header, or a value does not fit the type of its column. "
    "The types of columns are inferred from the first lines of the first "
    "file; if a later value does not fit, say column_dtypes={name: dtype}."
)


@final
@dataclass(frozen=True)
class CsvOptions:
    """The options of reading CSV files, which may be compressed with gzip.

    The first file with rows decides the types for all files. Otherwise "5" would be an integer in one file but not
    "5.5" in the next, and workers that read different files would disagree.

    Attributes:
      files: All files of the dataset.
      columns: The columns to read; None reads all.
      delimiter: The character between two values.
      column_names: The names of all columns, if the files have no header line.
      column_dtypes: The dtypes of columns that must not be inferred.
    """

    files: Sequence[str] = field(repr=False)
    columns: tuple[str, ...] | None
    delimiter: str
    column_names: tuple[str, ...] | None
    column_dtypes: tuple[tuple[str, str], ...]

    def format(self) -> FileFormat:
        """The format of CSV files, read with these options."""
        options = repr(self).replace(
            "CsvOptions", "Csv", 1
        )  # the name in positions that older versions saved
        return FileFormat(
            "CSV", options, self._open_at, _count_rows, self._row_spec, has_columns=True, advice=_ADVICE
        )

    def _open_at(self, path: str, position: Any) -> FileReader:
        if self._first is None or _is_blank(path):
            return ColumnReader(path, iter(()), lambda: None, ({}, path))
        schema, first_file = self._first
        blocks = self._open(path, {column.name: column.type for column in schema})
        expected = specs_of(schema, None, first_file)
        return ColumnReader(path, blocks, blocks.close, (expected, first_file), position=position or 0)

    def _row_spec(self) -> Specs | None:
        return None if self._first is None else specs_of(self._first[0], None, self._first[1])

    @functools.cached_property
    def _first(self) -> tuple[Any, str] | None:
        """Returns the schema and path of the first file that has rows."""
        pa = load("pyarrow", "from_csv")
        given = {name: pa.from_numpy_dtype(np.dtype(dtype)) for name, dtype in self.column_dtypes}
        for path in self.files:
            with reading(path, self.format()):
                if _is_blank(path):
                    continue
                with self._open(path, given) as blocks:
                    if any(block.num_rows for block in blocks):
                        return blocks.schema, path
        return None

    def _open(self, path: str, types: Mapping[str, Any]) -> Any:
        pa, csv = load("pyarrow", "from_csv"), load("pyarrow.csv", "from_csv")
        # Otherwise pyarrow treats NaN, which is a number, as a missing value.
        nulls = [text for text in csv.ConvertOptions().null_values if "nan" not in text.lower()]
        stream = pa.input_stream(path, compression="gzip" if is_gzip(path) else None)
        try:
            return csv.open_csv(
                stream,
                csv.ReadOptions(column_names=self.column_names and list(self.column_names)),
                csv.ParseOptions(delimiter=self.delimiter),
                csv.ConvertOptions(
                    column_types=types, null_values=nulls, include_columns=self.columns and list(self.columns)
                ),
            )
        except KeyError as error:
            raise ColumnError(
                f"The CSV file {path!r} lacks some of the columns {list(self.columns or ())}; its header line is "
                f"{_first_line_of(path)!r:.300}. Names come from the header line or column_names; values are separated "
                f"by delimiter={self.delimiter!r}."
            ) from error


def _count_rows(path: str) -> int | None:
    return 0 if _is_blank(path) else None


def _is_blank(path: str) -> bool:
    with gzip.open(path) if is_gzip(path) else open(path, "rb") as file:
        return not file.read(1)


def _first_line_of(path: str) -> str:
    with gzip.open(path) if is_gzip(path) else open(path, "rb") as file:
        return file.readline().decode(errors="replace").rstrip("\r\n")
