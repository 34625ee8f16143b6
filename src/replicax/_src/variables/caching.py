"""``cache_variable_reads``: a context in which a variable is read once. Pure: the caller passes the read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from replicax._src.values.distributed import ArrayLike
from replicax._src.vocabulary.errors import InvalidArgumentError

if TYPE_CHECKING:
    from replicax._src.tracing.capture import Capture

_T = TypeVar("_T")


class _Local(threading.local):
    def __init__(self) -> None:
        # Keyed by the ids of variable and program. Both are kept alive, so that no other object gets their ids.
        self.reads: dict[tuple[int, int], tuple[Any, Any, Any]] | None = None


_local = _Local()


@contextlib.contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Context in which every read of a variable on parameter servers returns the value of the first read.

    This is so even after an assignment here or elsewhere. It applies to this thread, until the context ends.

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


def cached_read(variable: ArrayLike, read: Callable[[], _T], program: Capture | None = None) -> _T:
    """Returns ``read()``, or inside ``cache_variable_reads`` its first result for this variable.

    Args:
      variable: The variable, compared by identity.
      read: Reads the variable.
      program: The program that is being traced, or None. A traced value is valid only in its own trace.
    """
    reads = _local.reads
    if reads is None:
        return read()
    key = (id(variable), id(program))
    if key not in reads:
        reads[key] = (variable, program, read())
    return reads[key][2]
