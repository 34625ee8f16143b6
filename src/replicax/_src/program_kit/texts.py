"""Reading what a file or a peer has written: JSON of a known form, names of dtypes, paths."""

from __future__ import annotations

from replicax._src.untrusted.strict_json import JsonReader, TextError, read_json
from replicax._src.values.dtypes import as_dtype, dtype_name
from replicax._src.vocabulary.options import path_of

__all__ = [
    "JsonReader",
    "TextError",
    "as_dtype",
    "dtype_name",
    "path_of",
    "read_json",
]
