"""Finds the number of the newest checkpoint in a directory, without JAX. ``python -m`` prints it, for batch scripts.

A checkpoint is a directory such as ``ckpt-7`` whose manifest has its number; see ``checkpoint/contents.py``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

from replicax._src.untrusted.strict_json import JsonReader, TextError, read_json

NO_CHECKPOINT: Final = -1
_MANIFEST: Final = "manifest.json"
_NAME: Final = re.compile(r".+-(\d+)", re.ASCII)
# Directories that are being written or replaced, whose names may end like those of checkpoints.
_TEMPORARY: Final = re.compile(r"\.(part|replaced)-")


def newest_checkpoint(directory: str | os.PathLike[str]) -> int:
    """Returns the largest number of a checkpoint that can be restored, as far as its manifest says; -1 without one.

    >>> newest_checkpoint("/no/such/directory")
    -1
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return NO_CHECKPOINT
    numbered = ((_NAME.fullmatch(name), name) for name in names if not _TEMPORARY.search(name))
    by_number = sorted(((int(match[1]), name) for match, name in numbered if match is not None), reverse=True)
    numbers = (_number_of(os.path.join(directory, name, _MANIFEST)) for _, name in by_number)
    return next((number for number in numbers if number is not None), NO_CHECKPOINT)


def _number_of(manifest: str) -> int | None:
    """Returns the number in a manifest; None if there is no manifest, or it is damaged."""
    try:
        whole = JsonReader(read_json(Path(manifest).read_bytes()), "the manifest")
        return whole.record({"contents": _number_in}, others=True)["contents"]
    except (OSError, TextError):
        return None


def _number_in(contents: JsonReader) -> int:
    return contents.record({"number": JsonReader.count}, others=True)["number"]


if __name__ == "__main__":
    print(newest_checkpoint(sys.argv[1]))
