"""The functions that make a FileDataset: one for each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from replicax._src.input.files.csv import CsvOptions
from replicax._src.input.files.file_dataset import FileDataset, file_dataset
from replicax._src.input.files.formats import FileFormat, load
from replicax._src.input.files.parquet import ParquetOptions
from replicax._src.input.files.paths import Files, resolve_files
from replicax._src.input.files.records import (
    count_array_records,
    count_text_lines,
    open_array_records,
    open_text_lines,
    open_tfrecords,
)
from replicax._src.values.dtypes import as_dtype
from replicax._src.vocabulary.errors import InvalidArgumentError


def from_tfrecords(files: Files) -> FileDataset:
    """Makes a dataset whose elements are the records of TFRecord files, as ``bytes``.

    ``from_tfrecords("train-*.tfrecord").map(parse).shuffle(10_000, seed=1).batch(128)``, where ``parse`` converts one
    record to a pytree of arrays. grain reads the files, which must be uncompressed. It detects a truncated file but not
    a changed byte, because it does not verify checksums.

    Args:
      files: A path, a pattern (sorted by name), or a list of these.

    Raises:
      MissingFileError: No file matches.
      MissingExtraError: grain is not installed.
    """
    load("grain", "from_tfrecords")
    return file_dataset(resolve_files(files), FileFormat("TFRecord", "TFRecords()", open_tfrecords))


def from_array_records(files: Files) -> FileDataset:
    """Makes a dataset whose elements are the records of ArrayRecord files, as ``bytes``. grain reads the files.

    Use it like ``from_tfrecords``. The number of records is known, and all checksums are verified.

    Args:
      files: A path, a pattern (sorted by name), or a list of these.

    Raises:
      MissingFileError: No file matches.
      MissingExtraError: grain is not installed.
    """
    load("grain", "from_array_records")
    format = FileFormat("ArrayRecord", "ArrayRecords()", open_array_records, count_array_records)
    return file_dataset(resolve_files(files), format)


def from_text_lines(files: Files, *, encoding: str = "utf-8") -> FileDataset:
    """Makes a dataset whose elements are the lines of text files, as ``str`` without line ends.

    Use it like ``from_tfrecords``. It recognises files compressed with gzip.

    Args:
      files: A path, a pattern (sorted by name), or a list of these.
      encoding: An encoding in which the byte 10 always ends a line, so not UTF-16.

    Raises:
      MissingFileError: No file matches.
    """
    options = f"TextLines(encoding={encoding!r})"
    format = FileFormat("text", options, partial(open_text_lines, encoding=encoding), count_text_lines)
    return file_dataset(resolve_files(files), format)


def from_parquet(files: Files, columns: Sequence[str] | None = None) -> FileDataset:
    """Makes a dataset whose elements are the rows of Parquet files, as ``{column: value}``.

    ``from_parquet("part-*.parquet").shuffle(10_000, seed=1).batch(128)`` yields ``{column: array [128, ...]}``. pyarrow
    and NumPy read and batch rows as columns. Batches may be read-only views.

    Args:
      files: A path, a pattern (sorted by name), or a list of these.
      columns: The columns to read; None reads all. Numbers and booleans become ``[num_rows]``, lists of a fixed size k
        ``[num_rows, k]``. Text, lists of varying sizes and null values raise an error when they are read.

    Raises:
      MissingFileError: No file matches.
      MissingExtraError: pyarrow is not installed.
    """
    load("pyarrow.parquet", "from_parquet")
    paths = resolve_files(files)
    return file_dataset(paths, ParquetOptions(paths[0], _names(columns, "columns")).format())


def from_csv(
    files: Files,
    columns: Sequence[str] | None = None,
    *,
    delimiter: str = ",",
    column_names: Sequence[str] | None = None,
    column_dtypes: Mapping[str, Any] | None = None,
) -> FileDataset:
    r"""Makes a dataset whose elements are the rows of CSV files, as ``{column: value}``. Use it like ``from_parquet``.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "a.csv").write_text("x,y\n1,1\n2,4\n3,9\n")
    ...     [batch["y"].tolist() for batch in from_csv(f"{folder}/*.csv").batch(2)]
    [[1, 4], [9]]

    It recognises files compressed with gzip. To resume from a saved position, it reads the file from its start.

    Args:
      files: A path, a pattern (sorted by name), or a list of these.
      columns: The columns to read; None reads all.
      delimiter: The character between two values.
      column_names: The names of all columns, if the files have no header line.
      column_dtypes: ``{column: dtype}``. The others are inferred from the first lines of the first file that has rows:
        int64, float64 or bool.

    Raises:
      MissingFileError: No file matches.
      MissingExtraError: pyarrow is not installed.
    """
    load("pyarrow.csv", "from_csv")
    dtypes = tuple((name, np.dtype(as_dtype(dtype)).name) for name, dtype in (column_dtypes or {}).items())
    paths = resolve_files(files)
    names, all_names = _names(columns, "columns"), _names(column_names, "column_names")
    return file_dataset(paths, CsvOptions(paths, names, delimiter, all_names, dtypes).format())


def _names(names: Sequence[str] | None, argument: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"{argument} must be a list of names, or None, got {names!r}.")
    return tuple(names)
