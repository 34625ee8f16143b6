"""``FragmentValues``: the arrays of one fragment as one float32 [n] on their device, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._ps.local_updates.unmerged_progress import moved
from replicax._src.program_kit.errors import UnsupportedError

move_at_once: Final = jax.jit(moved)
"""``moved`` as one program, so that what it computes between is in no memory."""


@final
class FragmentValues:
    """The arrays of one fragment. Each direction is one program, for which nobody waits.

    Args:
      shapes, dtypes: Those of the arrays. The dtypes are floating.

    Attributes:
      size: The number of values.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]):
        self._shapes, self._dtypes = tuple(shapes), tuple(dtypes)
        sizes = [math.prod(shape) for shape in shapes]
        self.size = sum(sizes)
        self._ends = np.cumsum(sizes).tolist()
        self._flat, self._parts = jax.jit(self._flattened), jax.jit(self._cut)
        self._moved = jax.jit(self._cut_moved)

    def flat(self, arrays: Sequence[Any]) -> jax.Array:
        """Returns float32 [n] of its own memory, so that a step may donate the arrays."""
        return self._flat(True, [on_one_device(array) for array in arrays])

    def parts(self, flat: Any) -> list[jax.Array]:
        """Returns arrays of their own memory, of the shapes and dtypes."""
        return self._parts(True, flat)

    def moved(self, arrays: Sequence[Any], before: Any, base: Any) -> list[jax.Array]:
        """Returns the parts of ``moved(flat(arrays), before, base)``."""
        return self._moved(True, [on_one_device(array) for array in arrays], before, base)

    def _cut_moved(
        self, is_so: jax.Array, arrays: Sequence[jax.Array], before: jax.Array, base: jax.Array
    ) -> list[jax.Array]:
        return self._cut(is_so, moved(self._flattened(is_so, arrays), before, base))

    def _flattened(self, is_so: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate([_copied(is_so, array).reshape(-1).astype(jnp.float32) for array in arrays])

    def _cut(self, is_so: jax.Array, flat: jax.Array) -> list[jax.Array]:
        starts = [0, *self._ends]
        return [
            _copied(is_so, flat[starts[at] : self._ends[at]]).reshape(shape).astype(dtype)
            for at, (shape, dtype) in enumerate(zip(self._shapes, self._dtypes, strict=True))
        ]


def _copied(is_so: jax.Array, array: jax.Array) -> jax.Array:
    """Returns a copy, if ``is_so``. On CPUs JAX runs a program that only copies in the thread that calls it, which
    waits; one that chooses runs beside it.
    """
    return jnp.where(is_so, array, 0)


def on_one_device(array: Any) -> Any:
    """Returns the copy of a replicated array on one device of this process; others as they are.

    Raises:
      UnsupportedError: The array is in shards.
    """
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1:
        return array
    if not array.is_fully_replicated:
        raise UnsupportedError(
            f"rx.experimental.LocalUpdates got an array of shape {array.shape} in shards on "
            f"{len(array.sharding.device_set)} devices. It exchanges values that each device of the group has in full: leave "
            "out shard_state and layout maps."
        )
    return array.addressable_data(0)


def beside(array: Any, other: Any) -> Any:
    """Returns an array on all devices on which another one is replicated."""
    if not isinstance(array, jax.Array) or not isinstance(other, jax.Array):
        return array
    sharding = other.sharding
    if array.committed and array.sharding == sharding:
        return array
    if len(sharding.device_set) == 1:
        return jax.device_put(array, sharding)
    here = sorted(sharding.addressable_devices, key=lambda device: device.id)
    copies = [jax.device_put(on_one_device(array), device) for device in here]
    return jax.make_array_from_single_device_arrays(other.shape, sharding, copies)
