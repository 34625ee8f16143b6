"""Dtypes as users name them: NumPy's, JAX's, TensorFlow's, torch's. The module imports none of these libraries."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def as_dtype(dtype: Any) -> Any:
    """Returns a dtype of another library, such as ``tf.float32``, as NumPy and JAX accept it; any other dtype
    unchanged.
    """
    try:
        np.dtype(dtype)
    except TypeError:
        # tf.float32 has a name; torch.float32 has none, and prints as itself.
        name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
        try:
            return np.dtype(getattr(ml_dtypes, name, name))
        except TypeError:
            pass  # JAX's own kinds, such as that of random keys, or no dtype at all, which JAX says
    return dtype
