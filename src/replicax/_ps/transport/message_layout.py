"""The places of a message's arrays in its body, and their description. Pure.

Training steps send messages with the same arrays again and again, with other values, so layouts are cached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from replicax._src.program_kit.errors import MessageError
from replicax._src.program_kit.task_connections import aligned
from replicax._src.program_kit.texts import TextError, read_json

INLINE_BYTES: Final = 60 * 1024
"""The most bytes of arrays in the head."""

_MOST_DIMS: Final = 64
_MOST_KEPT: Final = 128
_LONGEST_KEPT: Final = 32 * 1024
_NUMPY_DTYPES: Final = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)
_SMALL_DTYPES: Final = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int2 int4 uint2 uint4"
)
_DTYPES: Final = {name: np.dtype(name) for name in _NUMPY_DTYPES.split()} | {
    name: np.dtype(kind)
    for name in _SMALL_DTYPES.split()
    if (kind := getattr(ml_dtypes, name, None)) is not None  # older versions of ml_dtypes have fewer
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}

Spec = tuple[np.dtype[Any], tuple[int, ...]]


class Layout(NamedTuple):
    """The arrays of a message: each at a multiple of 64 bytes, the small ones first.

    Attributes:
      specs: The dtype and shape of each array.
      text: The same, as JSON: the form in which it is sent.
      offsets: The start of each array. Arrays before ``inline_bytes`` are in the head, the others after it.
      inline_bytes: The number of bytes of the arrays in the head.
      num_bytes: The number of bytes of all arrays.
    """

    specs: tuple[Spec, ...]
    text: bytes
    offsets: tuple[int, ...]
    inline_bytes: int
    num_bytes: int


_kept: dict[tuple[Spec, ...] | bytes, Layout] = {}


def layout_of(arrays: Sequence[np.ndarray]) -> Layout:
    """Returns the layout of arrays to be sent, whose dtypes are allowed."""
    specs = tuple([(array.dtype, array.shape) for array in arrays])
    found = _kept.get(specs)
    if found is None:
        text = json.dumps([(_NAMES[dtype], shape) for dtype, shape in specs], separators=(",", ":")).encode()
        found = _keep(specs, _made(specs, text))
    return found


def announced_layout(text: bytes) -> Layout:
    """Returns the layout of arrays that ``text`` announces.

    Raises:
      MessageError: The text is not valid.
    """
    found = _kept.get(text)
    if found is None:
        try:
            given = read_json(text)
        except TextError as error:
            raise MessageError(f"The description of arrays is not JSON: {text[:40]!r}.") from error
        if not isinstance(given, list):
            raise MessageError(f"The description of arrays is not a list: {text[:40]!r}.")
        found = _keep(text, _made(tuple(map(_checked, given)), text))
    return found


def sendable(array: np.ndarray) -> np.ndarray:
    """Returns an array as it is sent: C-contiguous, in this machine's byte order.

    Raises:
      MessageError: Its dtype cannot be sent.
    """
    if type(array) is not np.ndarray or not array.flags.c_contiguous:
        array = np.asarray(array, order="C")
    if array.dtype in _NAMES:
        return array
    native = array.dtype.newbyteorder("=")
    if native in _NAMES:
        return array.astype(native)
    raise MessageError(
        f"An array of dtype {array.dtype} cannot be sent. These can: {', '.join(_DTYPES)}. For typed PRNG keys send "
        f"jax.random.key_data(keys)."
    )


def _keep(key: tuple[Spec, ...] | bytes, layout: Layout) -> Layout:
    if len(layout.text) <= _LONGEST_KEPT:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()  # (safe from any thread: a thread that misses an entry makes it again)
        _kept[key] = layout
    return layout


def _made(specs: tuple[Spec, ...], text: bytes) -> Layout:
    sizes = [aligned(dtype.itemsize * math.prod(shape)) for dtype, shape in specs]
    offsets, outside, at = [0] * len(sizes), [], 0
    for number, size in enumerate(sizes):
        if at + size <= INLINE_BYTES:
            offsets[number] = at
            at += size
        else:
            outside.append(number)
    inline_bytes = at
    for number in outside:
        offsets[number] = at
        at += sizes[number]
    return Layout(specs, text, tuple(offsets), inline_bytes, at)


def _checked(array: object) -> Spec:
    if not (isinstance(array, list) and len(array) == 2 and isinstance(array[0], str)):
        raise MessageError(f"An array must be announced by its dtype and shape, got {repr(array)[:80]}.")
    name, shape = array
    if name not in _DTYPES:
        raise MessageError(
            f"An array of dtype {name[:40]!r} was announced. Allowed are {', '.join(_DTYPES)}."
        )
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(_is_size(size) for size in shape):
        raise MessageError(
            f"An array of shape {repr(shape)[:80]} was announced. A shape has at most {_MOST_DIMS} whole "
            "numbers, each at least 0."
        )
    return _DTYPES[name], tuple(shape)


def _is_size(size: object) -> bool:
    return type(size) is int and 0 <= size < 2**62
