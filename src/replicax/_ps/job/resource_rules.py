"""``ResourceRules``: the datasets and values that all workers make, and the outcome on each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from replicax._ps.job.closures import MAX_DEATHS, MAX_DEATHS_OF_PROVEN
from replicax._ps.job.events_in import ResourceAdded
from replicax._src.program_kit.errors import ClosureInputError


@dataclass(eq=False, slots=True)
class _Making:
    """A resource, and how its making goes.

    Attributes:
      resource: The resource.
      specs, errors: The answers of workers, by worker. An error is forgotten when its worker is lost.
      num_deaths: The number of workers that were lost while they made it.
      killer: The error because of which no worker is asked again to make it.
    """

    resource: ResourceAdded
    specs: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    num_deaths: int = 0
    killer: ClosureInputError | None = None


class ResourceOutcome(NamedTuple):
    """The end of a wait for a resource: its spec, or an error."""

    spec: Any = None
    error: ClosureInputError | None = None


@final
class ResourceRules:
    """All resources that may be used."""

    def __init__(self) -> None:
        self._makings: dict[str, _Making] = {}
        self._workers: set[str] = set()
        self._is_closed = False
        self._unreachable: Exception | None = None

    @property
    def names(self) -> list[str]:
        """The names of the resources that a worker must make, oldest first."""
        return [name for name, making in self._makings.items() if making.killer is None]

    def add(self, resource: ResourceAdded) -> None:
        self._makings[resource.name] = _Making(resource)

    def drop(self, name: str) -> None:
        """Forgets a resource that nobody can use any more."""
        self._makings.pop(name, None)

    def close(self) -> None:
        """Decides all waits."""
        self._is_closed = True

    def given_up(self, error: Exception) -> None:
        """Decides all waits, because all workers were given up; ``error`` is that of the last one."""
        self._unreachable = error

    # --- workers ---------------------------------------------------------------------------------------

    def back(self, worker: str) -> None:
        """Records that a worker is connected, and has made nothing yet."""
        self._workers.add(worker)

    def lost(self, worker: str) -> None:
        """Records that a worker is lost, with all that it has made."""
        self._workers.discard(worker)
        for making in self._makings.values():
            making.errors.pop(worker, None)

    def made(self, name: str, worker: str, spec: Any) -> None:
        """Records that a worker has made a resource."""
        if (making := self._makings.get(name)) is not None:
            making.specs[worker] = spec
            making.errors.pop(worker, None)

    def failed(self, name: str, worker: str, error: BaseException) -> None:
        """Records that a worker could not make a resource."""
        if (making := self._makings.get(name)) is not None:
            making.errors[worker] = error

    def killed(self, name: str, worker: str) -> None:
        """Records that a worker was lost while it made a resource. After several losses no worker is asked for it."""
        if (making := self._makings.get(name)) is not None:
            making.num_deaths += 1
            if making.num_deaths >= (MAX_DEATHS_OF_PROVEN if making.specs else MAX_DEATHS):
                making.killer = _killer(making, worker)

    # --- answers ---------------------------------------------------------------------------------------

    def error(self, names: Sequence[str], worker: str) -> ClosureInputError | None:
        """Returns the error because of which a worker cannot have all of ``names``; None if it can."""
        for name in names:
            making = self._makings.get(name)
            if making is not None and making.killer is not None:
                return making.killer
            if making is not None and worker in making.errors:
                return _input_error(making, worker)
        return None

    def unknown(self, names: Sequence[str]) -> ClosureInputError | None:
        """Returns an error for one of ``names`` that does not exist, or was dropped; None if there is none."""
        return next((_unknown(name) for name in names if name not in self._makings), None)

    def outcome(self, name: str) -> ResourceOutcome | None:
        """Returns the spec of a resource, or the error because of which there is none; None while it is undecided."""
        making = self._makings.get(name)
        if making is None:
            return ResourceOutcome(error=_unknown(name))
        if making.specs:
            return ResourceOutcome(next(iter(making.specs.values())))
        if making.killer is not None:
            return ResourceOutcome(error=making.killer)
        if making.errors and (self._is_closed or len(making.errors) >= len(self._workers)):
            return ResourceOutcome(error=_input_error(making, next(iter(making.errors))))
        if self._unreachable is not None:
            return ResourceOutcome(error=_no_worker(making, self._unreachable))
        if self._is_closed:
            kind = making.resource.kind
            return ResourceOutcome(
                error=ClosureInputError(
                    f"The coordinator was closed before a worker had made {kind} {name!r}."
                )
            )
        return None


def _unknown(name: str) -> ClosureInputError:
    return ClosureInputError(
        f"There is no {name!r} on the workers: its iterator was dropped, or belongs to a ClusterCoordinator that was "
        "closed. Make a new one."
    )


def _no_worker(making: _Making, cause: Exception) -> ClosureInputError:
    resource = making.resource
    error = ClosureInputError(
        f"No worker is left that could make {resource.kind} {resource.name!r}: all were given up, the last one "
        f"because of this: {cause} Start the workers, and then the program again."
    )
    error.__cause__ = cause
    return error


def _killer(making: _Making, worker: str) -> ClosureInputError:
    resource = making.resource
    return ClosureInputError(
        f"The function '{resource.function}' of {resource.kind} {resource.name!r} probably kills workers: "
        f"{making.num_deaths} of them died or were silent for too long while they called it, last {worker}. "
        "See their logs. Too little memory is a common reason."
    )


def _input_error(making: _Making, worker: str) -> ClosureInputError:
    resource, cause = making.resource, making.errors[worker]
    error = ClosureInputError(
        f"{worker} could not make {resource.kind} {resource.name!r}, which a scheduled function takes: {cause}"
    )
    error.__cause__ = cause
    return error
