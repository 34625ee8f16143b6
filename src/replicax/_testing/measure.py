"""Measures the distance between two arrays, and the factor between them. Pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

# Relative to the largest magnitude. Several devices sum in a different order, and rounding errors grow.
_RTOL = {"float64": 1e-9, "float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}
_WIDER_FOR_FACTORS = 100


@dataclass(frozen=True)
class Tolerance:
    """The tolerance for rounding.

    Attributes:
      rtol: The tolerance relative to the largest magnitude of one device's value.
      atol: The absolute tolerance.
    """

    rtol: float
    atol: float


def default_rtol(dtype: Any) -> float:
    """Returns the relative tolerance for values that are computed in ``dtype``."""
    return _RTOL.get(jnp.dtype(dtype).name, 0.0 if not jnp.issubdtype(dtype, jnp.inexact) else 1e-5)


@dataclass(frozen=True)
class Measure:
    """The comparison of an array with the expected one.

    Attributes:
      is_same: True if they are equal up to rounding.
      has_new_nan: True if it has nan or inf where the expected array is finite.
      max_difference, relative_difference, factor: See ``Difference``.
    """

    is_same: bool
    has_new_nan: bool
    max_difference: float
    relative_difference: float
    factor: float | None


def measure(
    ours: np.ndarray, wanted: np.ndarray, tolerance: Tolerance, allowance: np.ndarray | float = 0.0
) -> Measure:
    """Compares two arrays of one shape.

    Args:
      allowance: A further absolute tolerance, one number or one per element.
    """
    ours, wanted = wide(ours), wide(wanted)
    if not ours.size:
        return Measure(True, False, 0.0, 0.0, None)
    finite = np.isfinite(ours) & np.isfinite(wanted)
    is_alike = (ours == wanted) | (np.isnan(ours) & np.isnan(wanted))
    if not np.all(finite | is_alike):
        return Measure(False, True, np.inf, np.inf, None)
    ours, wanted = np.where(finite, ours, 0), np.where(finite, wanted, 0)
    apart = np.abs(ours - wanted)
    scale, largest = float(np.max(np.abs(wanted))), float(np.max(apart))
    is_same = bool(np.all(apart <= tolerance.atol + tolerance.rtol * scale + allowance))
    relative = largest / scale if scale else (np.inf if largest else 0.0)
    factor = least_squares([(ours, wanted)])
    fits = factor is not None and np.all(
        np.abs(ours - factor * wanted)
        <= tolerance.atol + _WIDER_FOR_FACTORS * tolerance.rtol * np.max(np.abs(ours)) + allowance
    )
    return Measure(is_same, False, largest, relative, factor if fits else None)


def wide(array: np.ndarray) -> np.ndarray:
    """Returns an array in double precision, also for integers and bools."""
    array = np.asarray(array)
    return array.astype(np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)


def least_squares(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """Returns the factor that brings the second arrays of all pairs nearest to the first ones, by least squares."""
    wides = [(wide(ours), wide(wanted)) for ours, wanted in pairs]
    norm = sum(float(np.vdot(wanted, wanted).real) for _, wanted in wides)
    return sum(float(np.vdot(wanted, ours).real) for ours, wanted in wides) / norm if norm > 0 else None


def rounding_of(array: np.ndarray, dtype: Any) -> float:
    """Returns the uncertainty of a change of ``array`` that comes from storing its elements in ``dtype``."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return 4 * float(jnp.finfo(dtype).eps) * magnitude(array)


def noise_of(ours: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the uncertainty of each element of two agreeing gradients, relative to its magnitude; at most 1.

    Optimizers such as Adam divide by the gradient's magnitude. Rounding in elements that are nearly 0 then becomes a
    full step.
    """
    ours, wanted = wide(ours), wide(wanted)
    own = np.abs(wanted)
    return np.minimum(1.0, 4 * np.abs(ours - wanted) / np.where(own > 0, own, 1e-300))


def magnitude(array: np.ndarray) -> float:
    """Returns the largest finite absolute value; 0 for an empty array."""
    values = np.abs(wide(array))
    return float(np.max(values, where=np.isfinite(values), initial=0.0))
