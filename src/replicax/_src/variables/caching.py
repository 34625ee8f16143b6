"""``cache_variable_reads``: inside, a variable is read once. Pure: what a read is, the variable says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from replicax._src.errors import InvalidArgumentError


class _Local(threading.local):
    def __init__(self) -> None:
        # By the ids of variable and program; both are kept alive, so that no other object gets their ids.
        self.reads: dict[tuple[int, int], tuple[Any, Any, Any]] | None = None


_local = _Local()


@contextlib.contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Inside, the first read of a variable on parameter servers is what all later ones give.

    Also after the variable has been assigned, here or elsewhere. It holds for this thread, until the context is left.

    Raises:
      InvalidArgumentError: The context is open already.

    Source: TensorFlow, ``tensorflow.python.distribute.distribute_utils.cache_variable_reads``.
    """
    if _local.reads is not None:
        raise InvalidArgumentError(
            "cache_variable_reads scope cannot be nested: it is open already in this thread. Leave the inner one out."
        )
    _local.reads = {}
    try:
        yield
    finally:
        _local.reads = None


def cached_read(variable: Any, read: Callable[[], Any], program: Any = None) -> Any:
    """``read()``, or in ``cache_variable_reads`` what it gave first for this variable.

    Args:
      variable: By its identity.
      read: Reads it.
      program: What is being traced, or None: a traced value is of no use elsewhere.
    """
    reads = _local.reads
    if reads is None:
        return read()
    key = (id(variable), id(program))
    if key not in reads:
        reads[key] = (variable, program, read())
    return reads[key][2]
