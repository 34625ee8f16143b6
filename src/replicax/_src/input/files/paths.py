"""Resolves a path, a list of paths or a pattern to files. Nothing is read here."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""What is given as files: a path, a pattern such as ``"data/*.parquet"``, or several of them."""


class MissingFileError(ReplicaxError, FileNotFoundError):
    """A file does not exist, or no file matches a pattern."""


def resolve_files(files: Files) -> tuple[str, ...]:
    """Returns the paths. Those of a pattern are sorted.

    Raises:
      MissingFileError: No file was found, or a path does not exist or is a directory.
      InvalidArgumentError: The values are not paths.
    """
    try:
        given = [files] if isinstance(files, str | bytes | os.PathLike) else list(files)
        names = [os.path.expanduser(os.fsdecode(one)) for one in given]
    except TypeError as error:
        raise InvalidArgumentError(
            f"files must be a path, a pattern such as 'data/*.csv', or a list of these, got {files!r}."
        ) from error
    paths = tuple(path for name in names for path in _expanded(name))
    if not paths:
        raise MissingFileError("Got an empty list of files; give a path, a list of paths, or a pattern.")
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise MissingFileError(_missing_text(missing, len(paths)))
    return paths


def fingerprint_of(paths: Sequence[str]) -> dict[str, Any]:
    """Returns the number of files and a hash of their names and sizes, independent of their directory."""
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise MissingFileError(
            f"{_missing_text(missing, len(paths))} It was there when the dataset was made."
        )
    listed = "\0".join(f"{os.path.basename(path)}\0{os.path.getsize(path)}" for path in paths)
    return {"num_files": len(paths), "names_and_sizes": hashlib.sha256(listed.encode()).hexdigest()[:16]}


def shorten(paths: Sequence[str], most: int = 3) -> str:
    """Returns ``'a', 'b', 'c' and 4 more``."""
    shown = ", ".join(repr(path) for path in paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"


def _expanded(path: str) -> list[str]:
    if os.path.exists(path) or not any(sign in path for sign in "*?["):
        return [path]
    found = sorted(one for one in glob.glob(path, recursive=True) if os.path.isfile(one))
    if not found:
        raise MissingFileError(
            f"No file matches the pattern {path!r} (working directory {os.getcwd()!r}). Patterns follow Python's glob: "
            "* and ? within a name, ** for any directories."
        )
    return found


def _missing_text(missing: Sequence[str], num_files: int) -> str:
    first = missing[0]
    if os.path.isdir(first):
        return f"{first!r} is a folder. Name its files with a pattern: {os.path.join(first, '*')!r}."
    remote = " Only local paths are read." if "://" in first else ""
    relative = "" if os.path.isabs(first) or remote else f" Relative paths start at {os.getcwd()!r}."
    if num_files == 1:
        return f"The file {first!r} does not exist.{relative}{remote}"
    return f"{len(missing)} of the {num_files} files do not exist: {shorten(missing)}.{relative}{remote}"
