"""``RemoteValue``: the result of a scheduled function, once it has run."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.errors import ContextError
from replicax._src.parameter_servers.errors import WaitTimeoutError
from replicax._src.tracing.capture import current_capture
from replicax._src.user_code import user_line

Assemble = Callable[[Sequence[Any]], Any]
_creation = threading.Lock()


@final
class RemoteValue:
    """The future result of a scheduled function. ``ClusterCoordinator.schedule`` returns it at once.

    The result is copied here right after the function has run: it can be had when the worker is gone.
    """

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_assemble",
        "_error",
        "_is_ready",
        "_latch",
        "_name",
        "_when_seen",
    )

    def __init__(self, name: str, assemble: Assemble | None, when_seen: Callable[[], object] | None = None):
        self._name, self._assemble = name, assemble
        self._when_seen = when_seen  # is told once that somebody knows the result
        self._is_ready = False
        self._arrays: Sequence[np.ndarray] = ()
        self._error: BaseException | None = None
        self._latch: threading.Lock | None = (
            None  # held until it is ready: less to do and to wake than with an event
        )

    def __repr__(self) -> str:
        state = "waiting" if not self._is_ready else "ready" if self._error is None else "failed"
        return f"<RemoteValue of {self._name!r}, {state}>"

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Waits until the function has run, and returns its result with NumPy arrays.

        Args:
          timeout_s: How long to wait; None for as long as it takes.

        Raises:
          CancelledError: It was cancelled, because another function failed or the coordinator was closed.
          ClosureInputError: What it takes could not be made.
          WaitTimeoutError: The time is over.
          Exception: What the function raised.
        """
        return self._made(timeout_s)(self._arrays)

    def get(self, timeout_s: float | None = None) -> Any:
        """Does the same as ``fetch``, with JAX arrays on the coordinator."""
        return self._made(timeout_s)([jnp.asarray(array) for array in self._arrays])

    def array(self, position: int) -> np.ndarray:
        """Does the same as ``fetch``, for the array number ``position`` in the result."""
        self._made(None)
        return self._arrays[position]

    def nest_of(self, leaf: Callable[[int], Any]) -> Any:
        """The result with ``leaf(position)`` for each of its arrays. Does not wait."""
        if self._assemble is None:
            return self.fetch()  # it was refused
        return self._assemble(_Leaves(leaf))

    def _made(self, timeout_s: float | None) -> Assemble:
        check_not_traced("fetch")
        if not self._is_ready and not self._wait(timeout_s):
            raise WaitTimeoutError(
                f"'{self._name}' had not run after {timeout_s:g} s. Wait longer, or look at coordinator.statistics()."
            )
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._assemble is not None
        when_seen, self._when_seen = self._when_seen, None
        if when_seen is not None:
            when_seen()
        return self._assemble

    def _wait(self, timeout_s: float | None) -> bool:
        with _creation:
            latch = self._latch
            if latch is None:
                latch = threading.Lock()
                latch.acquire()
                self._latch = latch
        if self._is_ready:  # it may have become so before there was a latch
            return True
        try:
            latch.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        finally:
            if self._is_ready:
                _open(latch)  # for others who wait
        return self._is_ready

    def settle(
        self,
        arrays: Sequence[np.ndarray],
        error: BaseException | None = None,
        assemble: Assemble | None = None,
    ) -> None:
        """The function has run, or never will. Once.

        Args:
          assemble: Makes its result of the arrays, if that has become another one than was to be expected.
        """
        self._arrays, self._error = arrays, error
        if assemble is not None:
            self._assemble = assemble
        self._is_ready = True
        latch = self._latch
        if latch is not None:
            _open(latch)


def _open(latch: threading.Lock) -> None:
    """Lets the next one through who waits, if nobody else has."""
    with contextlib.suppress(RuntimeError):
        latch.release()


@final
class _Leaves(Sequence[Any]):
    """A sequence that has as many items as are asked for."""

    def __init__(self, leaf: Callable[[int], Any]):
        self._leaf = leaf

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: Any) -> Any:
        return self._leaf(position)


def check_not_traced(method: str) -> None:
    """Raises ContextError in a function that is being traced: it would be done once, and what it waits for may wait for
    it.
    """
    if current_capture() is not None:
        raise ContextError(
            f"{method}() was called at {user_line()} in a function that is being traced, which happens once and not whenever the "
            "function runs. Call it in the program that schedules the function."
        )


def fetched(nest: Any) -> Any:
    """A nest with what each RemoteValue in it has become; other leaves as they are."""
    return jax.tree.map(lambda x: x.fetch() if isinstance(x, RemoteValue) else x, nest)
