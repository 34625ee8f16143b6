"""``Resources``: what all workers are to make for themselves, datasets say, and what has come of it on each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np

from replicax._src.ps.errors import ClosureInputError, WaitTimeoutError


@final
@dataclass(frozen=True, eq=False)
class Resource:
    """What every worker is to make.

    Attributes:
      name: Never given twice.
      kind: A dataset, which is iterated, or a value.
      pickle: What makes it, as uint8.
    """

    name: str
    kind: Literal["dataset", "value"]
    pickle: np.ndarray


@dataclass
class _State:
    resource: Resource
    specs: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)


@final
class Resources:
    """All that there are. Thread-safe.

    Attributes:
      dropped: Names of those nobody can use any more. Garbage collection adds to it, so no lock is taken for that.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._states: dict[str, _State] = {}
        self._workers: set[str] = set()
        self._is_closed = False
        self.dropped: deque[str] = deque()

    def add(self, resource: Resource) -> None:
        with self._changed:
            self._states[resource.name] = _State(resource)

    def get(self, name: str) -> Resource:
        """Returns the one of that name.

        Raises:
          ClosureInputError: There is none (any more).
        """
        return self._state(name).resource

    def all(self) -> list[Resource]:
        """Returns those in use, oldest first."""
        with self._changed:
            while self.dropped:
                self._states.pop(self.dropped.popleft(), None)
            return [state.resource for state in self._states.values()]

    def back(self, worker: str) -> None:
        """A worker is there, and has made nothing yet."""
        self._forget(worker, is_here=True)

    def lost(self, worker: str) -> None:
        """What a worker has made is gone."""
        self._forget(worker, is_here=False)

    def made(self, name: str, worker: str, spec: Any) -> None:
        """A worker has made one."""
        with self._changed:
            if name in self._states:
                self._states[name].specs[worker] = spec
                self._states[name].errors.pop(worker, None)
            self._changed.notify_all()

    def failed(self, name: str, worker: str, error: BaseException) -> None:
        """A worker could not make one."""
        with self._changed:
            if name in self._states:
                self._states[name].errors[worker] = error
            self._changed.notify_all()

    def error(self, names: Sequence[str], worker: str) -> ClosureInputError | None:
        """Why a worker does not have all of ``names``: it could not make one of them."""
        for name in names:
            state = self._states.get(name)
            if state is not None and worker in state.errors:
                return _input_error(state, worker)
        return None

    def spec(self, name: str, timeout_s: float) -> Any:
        """Waits for the first worker that has made one, and returns what it says of it.

        Raises:
          ClosureInputError: No worker that is there could make it.
          WaitTimeoutError: The time is over.
        """
        with self._changed:
            state = self._state(name)
            if not self._changed.wait_for(lambda: self._is_decided(state), timeout_s):
                raise WaitTimeoutError(
                    f"No worker has made {state.resource.kind} {name!r} within {timeout_s:g} s; {len(self._workers)} workers "
                    "are connected. Look at their logs, and at coordinator.statistics()."
                )
            if state.specs:
                return next(iter(state.specs.values()))
            if state.errors:
                raise _input_error(state, next(iter(state.errors)))
            raise ClosureInputError(
                f"The coordinator was closed before a worker had made {state.resource.kind} {name!r}."
            )

    def close(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _state(self, name: str) -> _State:
        state = self._states.get(name)
        if state is None:
            raise ClosureInputError(
                f"There is no {name!r} on the workers: nobody has its iterator any more, or it is of a ClusterCoordinator that was "
                "closed. Make a new one."
            )
        return state

    def _is_decided(self, state: _State) -> bool:
        return (
            bool(state.specs) or self._is_closed or bool(state.errors and self._workers <= set(state.errors))
        )

    def _forget(self, worker: str, is_here: bool) -> None:
        with self._changed:
            (self._workers.add if is_here else self._workers.discard)(worker)
            for state in self._states.values():
                state.errors.pop(worker, None)
            self._changed.notify_all()


def _input_error(state: _State, worker: str) -> ClosureInputError:
    resource, cause = state.resource, state.errors[worker]
    error = ClosureInputError(
        f"What a scheduled function takes could not be made on {worker} ({resource.kind} {resource.name!r}): {cause}"
    )
    error.__cause__ = cause
    return error
