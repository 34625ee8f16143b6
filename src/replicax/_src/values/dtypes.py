"""Dtypes as users name them: NumPy's, JAX's, TensorFlow's, torch's. The module imports none of these libraries."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from replicax._src.untrusted.strict_json import JsonReader


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


def dtype_name(it: JsonReader) -> str:
    """Accepts the name of a dtype of numbers or booleans, in a text of another program.

    Raises:
      TextError: It is something else.
    """
    try:
        dtype = np.dtype(it.string())
    except (TypeError, ValueError, SyntaxError):  # NumPy parses names with commas
        raise it.wrong("the name of a dtype") from None
    is_of_numbers = np.issubdtype(dtype, np.number) or dtype == np.bool_ or dtype.name in dir(ml_dtypes)
    if dtype.name != it.value or not is_of_numbers:
        raise it.wrong("the name of a dtype of numbers")
    return dtype.name
