"""The first values of Keras variables on parameter servers. They are made here and sent, or a program makes them there
in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._ps.programs.programs import UpdateProgram
from replicax._src.program_kit.traced_programs import export

_BLOCK_BYTES = 16 << 20
_STDDEV_OF_TRUNCATED = 0.87962566103423978  # of a normal distribution cut at two standard deviations

Draw = Callable[[Any, tuple[int, ...]], Any]
"""Values of some rows, from a random key and their shape."""


@final
class InitialValue:
    """The value that an initializer gives a variable.

    A large value is drawn in blocks of rows, with other random numbers than on one device.

    Args:
      initializer: A Keras initializer, or a function of a shape and a dtype.
    """

    def __init__(self, initializer: Any, shape: Sequence[int], dtype: Any):
        self._initializer, self._shape, self._dtype = initializer, tuple(shape), jnp.dtype(dtype)

    def __call__(self) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            return np.asarray(self._initializer(self._shape, dtype=str(self._dtype)))

    def program(self, start: int, stop: int, platforms: Sequence[str]) -> UpdateProgram | None:
        """Returns the program that makes rows ``start`` to ``stop`` on a server, or None if rows cannot be made
        independently.
        """
        draw = _draw(self._initializer, self._shape)
        if draw is None:
            return None
        seed = getattr(self._initializer, "seed", None)
        if seed is not None and not isinstance(seed, int):
            return None
        dtype, row_shape = self._dtype, self._shape[1:]
        row_bytes = max(1, math.prod(row_shape) * dtype.itemsize)
        block = max(1, min(stop - start, _BLOCK_BYTES // row_bytes))
        num_blocks = -(-(stop - start) // block)

        def make() -> list[Any]:
            key = jax.random.key(0 if seed is None else seed)
            rows = jnp.zeros((stop - start, *row_shape), dtype)

            def fill(number: Any, rows: Any) -> Any:
                at = jnp.minimum(number * block, stop - start - block)  # the last block may overlap
                values = draw(jax.random.fold_in(jax.random.fold_in(key, start), number), (block, *row_shape))
                return jax.lax.dynamic_update_slice(
                    rows, values.astype(dtype), (at, *(jnp.zeros((), at.dtype) for _ in row_shape))
                )

            return [jax.lax.fori_loop(0, num_blocks, fill, rows)]

        return UpdateProgram(export(make, [], platforms, "initial_value"), (), ())


def _draw(initializer: Any, shape: tuple[int, ...]) -> Draw | None:
    """Returns the function that draws some rows, if the initializer draws each element independently; otherwise
    None.
    """
    kinds = keras.initializers
    kind = type(initializer)
    if kind is kinds.Zeros:
        return lambda key, rows: jnp.zeros(rows)
    if kind is kinds.Ones:
        return lambda key, rows: jnp.ones(rows)
    if kind is kinds.Constant and np.ndim(initializer.value) == 0:
        return lambda key, rows: jnp.full(rows, initializer.value)
    if kind is kinds.RandomUniform:
        return lambda key, rows: jax.random.uniform(
            key, rows, minval=initializer.minval, maxval=initializer.maxval
        )
    if kind is kinds.RandomNormal:
        return _normal(initializer.mean, initializer.stddev)
    if kind is kinds.TruncatedNormal:
        return _truncated(initializer.mean, initializer.stddev)
    if isinstance(initializer, kinds.VarianceScaling) and len(shape) == 2:
        return _variance_scaling(initializer, *shape)
    return None


def _normal(mean: float, stddev: float) -> Draw:
    return lambda key, rows: mean + stddev * jax.random.normal(key, rows)


def _truncated(mean: float, stddev: float) -> Draw:
    return lambda key, rows: mean + stddev * jax.random.truncated_normal(key, -2.0, 2.0, rows)


def _variance_scaling(initializer: Any, fan_in: int, fan_out: int) -> Draw:
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    scale = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "truncated_normal":
        return _truncated(0.0, math.sqrt(scale) / _STDDEV_OF_TRUNCATED)
    if initializer.distribution == "untruncated_normal":
        return _normal(0.0, math.sqrt(scale))
    limit = math.sqrt(3.0 * scale)
    return lambda key, rows: jax.random.uniform(key, rows, minval=-limit, maxval=limit)
