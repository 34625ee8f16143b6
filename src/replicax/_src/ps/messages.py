"""Messages between tasks: a header and arrays. Pure: how they become bytes, and what may come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Message:
    """A header of JSON values, and arrays of any dtype that JAX has (bfloat16 and its kin by ``ml_dtypes``).

    Attributes:
      header: ``op`` says what is asked. An answer that failed has ``error``: ``type``, ``text`` and ``details``.
      arrays: C-contiguous; of a received message valid until the next one is received, unless copied.
    """

    header: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = field(default_factory=tuple)
