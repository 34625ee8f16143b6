"""Integers of 64 bits that do not fit into the 32 that JAX has by default: it keeps the lower ones without a word.

Another row of a table is looked up then, and another one trained.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np

log = logging.getLogger("replicax")

_said: set[str] = set()


def narrowed_dtype(array: np.ndarray, what: str) -> Any:
    """The dtype that an array has in JAX. Warns, once for each ``what``, where integers change with it.

    >>> narrowed_dtype(np.arange(3), "the argument")
    dtype('int32')
    """
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if (
        array.dtype.kind in "iu"
        and dtype.itemsize < array.dtype.itemsize
        and array.size
        and what not in _said
    ):
        bounds = np.iinfo(dtype)
        for number in (array.max(), array.min()):
            if not bounds.min <= int(number) <= bounds.max:
                _say(what, number, dtype)
                break
    return dtype


def _say(what: str, number: np.generic, dtype: np.dtype) -> None:
    _said.add(what)
    log.warning(
        "%s has %d, which does not fit into %s: it becomes %d, as JAX does it by default. Ids of rows: bring them into the table "
        "first, ids %% num_rows, in NumPy. Numbers that have to stay: set JAX_ENABLE_X64=1 in all tasks.",
        what,
        number,
        dtype,
        number.astype(dtype),
    )
