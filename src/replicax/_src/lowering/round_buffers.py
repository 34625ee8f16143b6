"""The buffers in which the arrays of one round travel: equal on all replicas and processes.

Small arrays of one dtype and one reduction share a buffer, and each large array has its own. Arrays without entries do
not travel. A buffer is flat, and its entries are numbers that NumPy adds fast: half precision is sent as float32, small
integers and truth values as int32, complex numbers as pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.collectives.in_replica import MANY_ARRAYS, Packing, joined, separated
from replicax._src.tracing.rounds import Reduction

# Each buffer is an exchange of its own, which costs 50 to 100 µs; an array of this size takes longer to copy.
_PACKING = Packing(bytes_per_pack=2**62, alone_bytes=512 * 1024)


@dataclass(frozen=True)
class RoundBuffer:
    """One buffer of each replica, to be combined entry by entry.

    Attributes:
      reduction: "sum", "max" or "min". NaN stays NaN in all three.
      dtype: The dtype of the entries: float32, float64, int32, int64, uint32 or uint64.
      size: The number of entries.
    """

    reduction: Reduction
    dtype: np.dtype
    size: int


@final
class RoundLayout:
    """The places of a round's arrays in its buffers.

    Args:
      reductions: The reduction of each array.
      avals: The shape and dtype of each array.

    Attributes:
      buffers: The buffers.
    """

    def __init__(self, reductions: Sequence[Reduction], avals: Sequence[Any]):
        self._avals = list(avals)
        travelling = [jax.eval_shape(_to_travel, aval) for aval in avals]
        self._shapes = [each.shape for each in travelling]
        self._packs: list[list[int]] = []  # the arrays of each buffer
        buffers = []
        for reduction in dict.fromkeys(reductions):
            chosen = [i for i, each in enumerate(reductions) if each == reduction and travelling[i].size]
            for pack in _PACKING.packs([travelling[i] for i in chosen]):
                self._packs.append([chosen[at] for at in pack])
                sizes = [travelling[i].size for i in self._packs[-1]]
                dtype = np.dtype(travelling[self._packs[-1][0]].dtype)
                buffers.append(RoundBuffer(reduction, dtype, sum(sizes)))
        self.buffers = tuple(buffers)
        self._buffer_of = {i: at for at, pack in enumerate(self._packs) for i in pack}

    def buffers_of(self, arrays: Sequence[int]) -> list[int]:
        """Returns the positions of the buffers that have these arrays."""
        return sorted({self._buffer_of[i] for i in arrays if i in self._buffer_of})

    def pack(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the buffers, in the trace of a program."""
        return [joined([_to_travel(arrays[i]) for i in pack]) for pack in self._packs]

    def empty(self) -> dict[int, Any]:
        """Returns the arrays that have no entries, by position."""
        empty = [i for i in range(len(self._avals)) if i not in self._buffer_of]
        return {i: jnp.zeros(self._avals[i].shape, self._avals[i].dtype) for i in empty}

    def unpack(self, at: int, buffer: Any) -> dict[int, Any]:
        """Returns the arrays of one buffer by position, in the trace of a program."""
        pack = self._packs[at]
        shapes = [self._shapes[i] for i in pack]
        arrays = separated(buffer, shapes, hides_starts=len(pack) > MANY_ARRAYS)
        return {i: _from_travel(array, self._avals[i].dtype) for i, array in zip(pack, arrays, strict=True)}


def _to_travel(value: Any) -> Any:
    dtype = value.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.stack([value.real, value.imag])
    is_integer = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)
    if is_integer and dtype.itemsize < 4:
        return value.astype(jnp.int32)
    return value.astype(jnp.float32) if dtype.itemsize < 4 else value


def _from_travel(value: Any, dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(value[0], value[1])
    return value.astype(dtype)
