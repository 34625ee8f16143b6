"""Files of records: TFRecord and ArrayRecord, which grain reads, and lines of text."""

from __future__ import annotations

import gzip
import itertools
import os
import sys
import weakref
from typing import Any, BinaryIO, Final, final

from replicax._src.input.chunks import Chunk
from replicax._src.input.files.formats import REWRITE, FileReader, UnreadableFileError, load

_GZIP_MAGIC: Final = b"\x1f\x8b"


def is_gzip(path: str) -> bool:
    """True if a file starts as gzip files do; no text does."""
    with open(path, "rb") as file:
        return file.read(2) == _GZIP_MAGIC


# --- TFRecord -----------------------------------------------------------------------------------------


def open_tfrecords(path: str, position: Any) -> FileReader:
    """Opens a file of TensorFlow's format: length, checksum of the length, bytes, checksum of the bytes.

    grain trusts each length and verifies no checksum. This function checks the first length, to detect another kind of
    file.

    Source: https://www.tensorflow.org/tutorials/load_data/tfrecord
    """
    if is_gzip(path):
        raise UnreadableFileError(
            f"The TFRecord file {path!r} is compressed with gzip, which grain does not read. Decompress it (gunzip), or "
            "write it without compression."
        )
    _check_first_length(path)
    iterator = iter(load("grain", "from_tfrecords").experimental.TFRecordIterDataset(path))
    if position is not None:
        iterator.set_state(position)
    return _TFRecordReader(iterator)


def _check_first_length(path: str) -> None:
    """Raises for a file of another kind, or for a file of zeros, which a machine crash may leave."""
    with open(path, "rb") as file:
        header = file.read(12)
    is_whole = len(header) == 12 and int.from_bytes(header[:8], "little") + 16 <= os.path.getsize(path)
    if header and not (is_whole and any(header[8:])):  # the checksum of a length is never 0
        raise UnreadableFileError(
            f"{path!r} is not a TFRecord file: its first record is longer than the file (compressed with zlib, "
            f"truncated, or another format). {REWRITE}"
        )


@final
class _TFRecordReader(FileReader):
    """A reader whose position is the state of grain's iterator."""

    def __init__(self, iterator: Any):
        self._iterator = [iterator]  # the only reference, because grain closes the file when it is dropped
        self._close = weakref.finalize(self, self._iterator.clear)

    def read(self, num_rows: int) -> Chunk:
        return list(itertools.islice(self._iterator[0], min(num_rows, sys.maxsize)))

    def tell(self) -> Any:
        return self._iterator[0].get_state()

    def close(self) -> None:
        self._close()


# --- ArrayRecord --------------------------------------------------------------------------------------


def open_array_records(path: str, position: Any) -> FileReader:
    """Opens a file of numbered records with checksums, which are all verified."""
    return _ArrayRecordReader(_source(path), position or 0)


def count_array_records(path: str) -> int:
    """Returns the number of records."""
    return len(_source(path))


@final
class _ArrayRecordReader(FileReader):
    """A reader whose position is the number of the next record."""

    def __init__(self, source: Any, position: int):
        self._source, self._position = source, position

    def read(self, num_rows: int) -> Chunk:
        numbers = range(self._position, min(self._position + num_rows, len(self._source)))
        self._position = numbers.stop
        if len(numbers) <= 1:  # grain reads several records through a thread
            return [self._source[number] for number in numbers]
        return list(self._source.__getitems__(numbers))

    def tell(self) -> Any:
        return self._position

    def close(self) -> None:
        self._source.__exit__(None, None, None)


def _source(path: str) -> Any:
    return load("grain", "from_array_records").sources.ArrayRecordDataSource(path)


# --- lines of text ------------------------------------------------------------------------------------


def open_text_lines(path: str, position: Any, *, encoding: str) -> FileReader:
    """Opens a file of text lines, without their line ends, also if it is compressed with gzip."""
    file = gzip.open(path, "rb") if is_gzip(path) else open(path, "rb")  # noqa: SIM115 because the reader closes it
    return _LineReader(file, path, encoding, position or 0)


def count_text_lines(path: str) -> int | None:
    """Returns 0 for an empty file; otherwise the number is not known."""
    return 0 if os.path.getsize(path) == 0 else None


@final
class _LineReader(FileReader):
    """A reader whose position is the byte, after decompression, at which the next line begins."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, path: str, encoding: str, position: int):
        self._file, self._path, self._encoding = file, path, encoding
        self._close = weakref.finalize(self, file.close)
        self._position = position
        file.seek(position)

    def read(self, num_rows: int) -> Chunk:
        lines = list(itertools.islice(self._file, min(num_rows, sys.maxsize)))
        decoded = [self._decoded(line) for line in lines]
        self._position += sum(map(len, lines))
        return decoded

    def tell(self) -> Any:
        return self._position

    def close(self) -> None:
        self._close()

    def _decoded(self, line: bytes) -> str:
        try:
            return line.removesuffix(b"\n").removesuffix(b"\r").decode(self._encoding)
        except UnicodeDecodeError as error:
            raise UnreadableFileError(
                f"The text file {self._path!r} has a line that is not {self._encoding} text: {line[:60]!r} "
                f"({error.reason}). "
                "Give its encoding: from_text_lines(files, encoding='latin-1')."
            ) from error
