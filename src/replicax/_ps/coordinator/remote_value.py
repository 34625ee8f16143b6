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

from replicax._src.program_kit.captures import current_capture
from replicax._src.program_kit.errors import ContextError, InvalidArgumentError, WaitTimeoutError, user_line
from replicax._src.program_kit.variables import FutureValue

Assemble = Callable[[Sequence[Any]], Any]
_creation = threading.Lock()


@final
class RemoteValue(FutureValue):
    """The future result of a scheduled function. ``ClusterCoordinator.schedule`` returns it at once.

    The result is copied to the coordinator right after the function has run, so it outlives the worker.
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
        self._when_seen = when_seen  # called once when a caller has seen the result
        self._is_ready = False
        self._arrays: Sequence[np.ndarray] = ()
        self._error: BaseException | None = None
        self._latch: threading.Lock | None = None  # held until the result is ready; cheaper than an event

    def __repr__(self) -> str:
        state = "waiting" if not self._is_ready else "ready" if self._error is None else "failed"
        return f"<RemoteValue of {self._name!r}, {state}>"

    def _refused(self, *_: Any) -> Any:
        """Raises InvalidArgumentError: the result was used as a number or a sequence before it was fetched."""
        raise InvalidArgumentError(
            f"The RemoteValue of {self._name!r} was used as if it were the result, which may not be there yet. Write "
            "value.fetch(), which waits for it, or coordinator.fetch(values) for several."
        )

    __float__ = __int__ = __iter__ = __getitem__ = _refused
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused

    def __format__(self, spec: str) -> str:
        return self._refused() if spec else repr(self)

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Waits until the function has run, and returns its result with NumPy arrays.

        Args:
          timeout_s: The longest wait in seconds; None for no limit.

        Raises:
          CancelledError: The function was cancelled, because another function failed or the coordinator was closed.
          ClosureInputError: A per-worker dataset or value that the function takes could not be made.
          WaitTimeoutError: ``timeout_s`` has passed.
          Exception: The function failed with it.
        """
        return self._made(timeout_s)(self._arrays)

    def get(self, timeout_s: float | None = None) -> Any:
        """Does the same as ``fetch``, but returns JAX arrays on the coordinator."""
        return self._made(timeout_s)([jnp.asarray(array) for array in self._arrays])

    def array(self, position: int) -> np.ndarray:
        """Waits for the result, and returns its array number ``position``."""
        self._made(None)
        return self._arrays[position]

    def pytree_of(self, leaf: Callable[[int], Any]) -> Any:
        """Returns the result's pytree with ``leaf(position)`` for each of its arrays. Does not wait."""
        if self._assemble is None:
            return self.fetch()  # the closure was refused
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
        if self._is_ready:  # it may have become ready before there was a latch
            return True
        try:
            latch.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        finally:
            if self._is_ready:
                _open(latch)  # for other threads that wait
        return self._is_ready

    def settle(
        self,
        arrays: Sequence[np.ndarray],
        error: BaseException | None = None,
        assemble: Assemble | None = None,
    ) -> None:
        """Sets the result or the error. Call it once.

        Args:
          arrays: The arrays of the result.
          error: The error; None if the function has run.
          assemble: A function that makes the result of the arrays, if it differs from the expected one.
        """
        self._arrays, self._error = arrays, error
        if assemble is not None:
            self._assemble = assemble
        self._is_ready = True
        latch = self._latch
        if latch is not None:
            _open(latch)


def _open(latch: threading.Lock) -> None:
    """Wakes the next waiting thread, unless another thread has done so."""
    with contextlib.suppress(RuntimeError):
        latch.release()


@final
class _Leaves(Sequence[Any]):
    """A sequence of unlimited length, whose items are computed when they are read."""

    def __init__(self, leaf: Callable[[int], Any]):
        self._leaf = leaf

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, position: Any) -> Any:
        return self._leaf(position)


def check_not_traced(method: str) -> None:
    """Raises ContextError in a function that is being traced: the call would run once, and could wait for itself."""
    if current_capture() is not None:
        raise ContextError(
            f"{method}() was called at {user_line()} in a function that is being traced. It would run once, "
            "at tracing, and not in each call. Call it in the program that schedules the function."
        )


def fetched(pytree: Any) -> Any:
    """Returns a pytree with the results of the RemoteValues in it; other leaves stay."""
    return jax.tree.map(lambda x: x.fetch() if isinstance(x, RemoteValue) else x, pytree)
