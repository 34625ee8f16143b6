"""``Resources``: the resources that all workers make, such as datasets, and the outcome on each worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np

from replicax._ps.coordinator.closures import MAX_DEATHS, MAX_DEATHS_OF_PROVEN
from replicax._src.program_kit.errors import ClosureInputError, WaitTimeoutError


@final
@dataclass(frozen=True, eq=False)
class Resource:
    """A dataset or value that every worker makes.

    Attributes:
      name: A name that is never reused.
      kind: "dataset", which is iterated, or "value".
      pickle: The pickled function that makes it, as uint8.
      function: The name of that function, for messages.
    """

    name: str
    kind: Literal["dataset", "value"]
    pickle: np.ndarray
    function: str = ""


@dataclass
class _State:
    """The state of a resource.

    Attributes:
      specs, errors: The answers of connected workers, by worker.
      num_deaths: The number of workers that were lost while they made it.
      is_proven: True if a worker has made it.
      killer: The error because of which no worker is asked again to make it.
    """

    resource: Resource
    specs: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    num_deaths: int = 0
    is_proven: bool = False
    killer: ClosureInputError | None = None


@final
class Resources:
    """All resources. Thread-safe.

    Attributes:
      dropped: The names of unreachable resources. Garbage collection appends to it, so it needs no lock.
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
        """Returns the resource of that name.

        Raises:
          ClosureInputError: There is none, or it was dropped.
        """
        return self._state(name).resource

    def all(self) -> list[Resource]:
        """Returns the resources that workers must make, oldest first."""
        with self._changed:
            while self.dropped:
                self._states.pop(self.dropped.popleft(), None)
            return [state.resource for state in self._states.values() if state.killer is None]

    def back(self, worker: str) -> None:
        """Records that a worker is connected, and has made nothing yet."""
        self._forget(worker, is_here=True)

    def lost(self, worker: str) -> None:
        """Records that a worker is lost, with all resources that it has made."""
        self._forget(worker, is_here=False)

    def made(self, name: str, worker: str, spec: Any) -> None:
        """Records that a worker has made a resource."""
        with self._changed:
            if name in self._states:
                self._states[name].specs[worker] = spec
                self._states[name].errors.pop(worker, None)
                self._states[name].is_proven = True
            self._changed.notify_all()

    def killed(self, name: str, worker: str) -> None:
        """Records that a worker was lost while it made a resource. After several losses no worker is asked for it
        again.
        """
        with self._changed:
            state = self._states.get(name)
            if state is None:
                return
            state.num_deaths += 1
            if state.num_deaths >= (MAX_DEATHS_OF_PROVEN if state.is_proven else MAX_DEATHS):
                state.killer = _killer(state, worker)
            self._changed.notify_all()

    def failed(self, name: str, worker: str, error: BaseException) -> None:
        """Records that a worker could not make a resource."""
        with self._changed:
            if name in self._states:
                self._states[name].errors[worker] = error
            self._changed.notify_all()

    def error(self, names: Sequence[str], worker: str) -> ClosureInputError | None:
        """Returns the error because of which a worker lacks one of ``names``; None if there is none."""
        for name in names:
            state = self._states.get(name)
            if state is not None and state.killer is not None:
                return state.killer
            if state is not None and worker in state.errors:
                return _input_error(state, worker)
        return None

    def spec(self, name: str, timeout_s: float) -> Any:
        """Waits for the first worker that has made a resource, and returns its spec.

        Raises:
          ClosureInputError: No connected worker could make it.
          WaitTimeoutError: ``timeout_s`` has passed.
        """
        with self._changed:
            state = self._state(name)
            if not self._changed.wait_for(lambda: self._is_decided(state), timeout_s):
                raise WaitTimeoutError(
                    f"No worker has made {state.resource.kind} {name!r} within {timeout_s:g} s; {len(self._workers)} "
                    "workers are connected. Look at their logs, and at coordinator.statistics()."
                )
            if state.specs:
                return next(iter(state.specs.values()))
            if state.killer is not None:
                raise state.killer
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
                f"There is no {name!r} on the workers: its iterator was dropped, or belongs to a "
                "ClusterCoordinator that was closed. Make a new one."
            )
        return state

    def _is_decided(self, state: _State) -> bool:
        return (
            bool(state.specs)
            or self._is_closed
            or state.killer is not None
            or bool(state.errors and self._workers <= set(state.errors))
        )

    def _forget(self, worker: str, is_here: bool) -> None:
        with self._changed:
            (self._workers.add if is_here else self._workers.discard)(worker)
            for state in self._states.values():
                state.errors.pop(worker, None)
            self._changed.notify_all()


def _killer(state: _State, worker: str) -> ClosureInputError:
    return ClosureInputError(
        f"The function '{state.resource.function}' of {state.resource.kind} {state.resource.name!r} probably kills "
        f"workers: {state.num_deaths} of them died or were silent for too long while they called it, last {worker}. "
        "See their logs. Too little memory is a common reason."
    )


def _input_error(state: _State, worker: str) -> ClosureInputError:
    resource, cause = state.resource, state.errors[worker]
    error = ClosureInputError(
        f"{worker} could not make {resource.kind} {resource.name!r}, which a scheduled function takes: {cause}"
    )
    error.__cause__ = cause
    return error
