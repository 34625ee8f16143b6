"""Files in the format safetensors: a header in JSON, and the bytes of each tensor. Written and read part by part.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.array_chunks import slabs
from replicax._src.checkpoint.errors import CheckpointWriteError
from replicax._src.checkpoint.saved import SavedValue
from replicax._src.untrusted.strict_json import Form, JsonReader, read_json
from replicax._src.vocabulary.errors import InvalidArgumentError

_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES: Final = {name: jnp.dtype(dtype) for dtype, name in _NAMES.items()}
_INDEX: Final = ".index.json"
_MOST_HEADER_BYTES: Final = 100_000_000  # the limit of the format
_MOST_DIMS: Final = 32


def _name_of_file(it: JsonReader) -> str:
    """Accepts names of files beside an index, or in folders there."""
    name = it.string()
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise it.wrong("the name of a file beside it")
    return name


_INDEX_OF_FILES: Final[Mapping[str, Form[Any]]] = {"weight_map": lambda it: it.table(_name_of_file)}
_TENSOR: Final[Mapping[str, Form[Any]]] = {
    "dtype": lambda it: it.one_of(*_DTYPES),
    "shape": lambda it: it.items(JsonReader.count, most=_MOST_DIMS),
    "data_offsets": lambda it: it.fixed(JsonReader.count, JsonReader.count),
}


def write(file: str, *, arrays: Mapping[str, SavedValue]) -> None:
    """Writes arrays under their keys, with their labels as metadata.

    Raises:
      CorruptCheckpointError: An array is damaged.
      CheckpointWriteError: The format lacks the dtype of an array.
      OSError: The file cannot be written.
    """
    lacking = [
        f"{key} ({array.dtype.name})" for key, array in arrays.items() if array.dtype.name not in _NAMES
    ]
    if lacking:
        raise CheckpointWriteError(
            errno.EINVAL,
            f"safetensors does not support the dtypes of {', '.join(lacking[:5])}. Export the others, with only, or all "
            "to a directory for orbax.",
        )
    # Large items first, so that each tensor begins at a multiple of its item's size.
    keys = sorted(arrays, key=lambda key: (-arrays[key].dtype.itemsize, key))
    header: dict[str, Any] = {"__metadata__": {key: arrays[key].label for key in keys}}
    position = 0
    for key in keys:
        array = arrays[key]
        end = position + math.prod(array.shape) * array.dtype.itemsize
        header[key] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for key in keys:
            for _, values in arrays[key].slabs():
                opened.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


@final
class Tensor:
    """A tensor in a file, of which parts can be read.

    Attributes:
      shape, dtype: Its shape and dtype.
      num_components: 0, as in other sources of values.
    """

    num_components = 0

    def __init__(self, file: str, offset: int, shape: tuple[int, ...], dtype: np.dtype):
        self.shape, self.dtype = shape, dtype
        self._file, self._offset, self._as = file, offset, dtype

    def cast(self, dtype: np.dtype) -> Tensor:
        """Returns the same tensor, whose values are read as another dtype."""
        tensor = Tensor(self._file, self._offset, self.shape, self.dtype)
        tensor._as = dtype
        return tensor

    def read(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """Returns the values of an index, in memory that nobody else holds: in that of ``into`` if it is given."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self._as)[index]
        mapped = np.memmap(self._file, self.dtype, "r", self._offset, self.shape)
        if into is None:
            return np.array(mapped[index], self._as, order="C")
        np.copyto(into, mapped[index], casting="unsafe")
        return into

    def read_components(self, index: tuple[Any, ...] = (), into: np.ndarray | None = None) -> np.ndarray:
        """There are none."""
        raise AssertionError(f"a tensor has no components, so not {index}")

    def slabs(self, max_bytes: int | None = None) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yields the parts of ``chunks.slabs``, each with its index."""
        for index in slabs(self.shape, self._as.itemsize, max_bytes=max_bytes):
            yield index, self.read(index)


def tensors_of(file: str) -> dict[str, Tensor]:
    """Returns the tensors of a file, or of all files that an index lists (``model.safetensors.index.json``).

    Raises:
      InvalidArgumentError: There is no such file, or it has another format or is truncated.
    """
    try:
        return _of_index(file) if file.endswith(_INDEX) else _of_file(file)
    except OSError as error:
        raise InvalidArgumentError(f"The safetensors file {file!r} cannot be read ({error}).") from error
    except (ValueError, KeyError, struct.error) as error:
        raise InvalidArgumentError(
            f"{file!r} is no safetensors file, or is truncated ({type(error).__name__}: {error!s:.200}). Give a file "
            f"such as 'model.safetensors', or an index such as 'model.safetensors{_INDEX}'."
        ) from error


def _of_index(file: str) -> dict[str, Tensor]:
    with open(file, "rb") as opened:
        text = opened.read(_MOST_HEADER_BYTES + 1)
    index = JsonReader(read_json(text, most_bytes=_MOST_HEADER_BYTES), "the index")
    files = index.record(_INDEX_OF_FILES, others=True)["weight_map"]
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(files.values()):
        tensors |= _of_file(os.path.join(os.path.dirname(file), name))
    return {name: tensors[name] for name in files}


def _of_file(file: str) -> dict[str, Tensor]:
    size = os.path.getsize(file)
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > min(size, _MOST_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        header = read_json(opened.read(length), most_bytes=_MOST_HEADER_BYTES)
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    tensors = {}
    for name, each in JsonReader(header, "the header").table(lambda it: it.record(_TENSOR)).items():
        (start, end), shape, dtype = each["data_offsets"], each["shape"], _DTYPES[each["dtype"]]
        JsonReader(shape, f"the shape of {name!r:.60}").check_size(dtype.itemsize)
        if end - start != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
            raise ValueError(f"{name!r} has {end - start} bytes at {start}, and the file {size}")
        tensors[name] = Tensor(file, 8 + length + start, shape, dtype)
    return tensors
