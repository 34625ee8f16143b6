"""The seam between the two sides of a job: the parameter servers' side, and what it gets from the job."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from replicax._ps.job.procedures import Procedures
from replicax._ps.job.setup import Setup


class ServerSide(Protocol):
    """The rules for the parameter servers. Its procedures' keys begin with "ps"; it starts and stops no others."""

    def start(self, now: float) -> None:
        """Starts its procedures. ``Job.start`` calls it, once."""
        ...

    def close(self) -> None:
        """The job is closed. Its procedures are stopped by the job, before."""
        ...

    def note_failure(self, task: str | None, now: float) -> bool:
        """A function, or a round, could not use a parameter server; None if it is unknown which.

        Returns True if the server or its other copy may come back. The function is then retried more often.
        """
        ...

    def statistics(self) -> dict[str, Any]:
        """Returns ``ps``, the statistics of each parameter server by name, and ``replication``, which may be None."""
        ...

    def primaries_for_workers(self) -> Sequence[Mapping[str, Any]] | None:
        """Returns the views that workers are told; None without groups."""
        ...


class JobHooks(Protocol):
    """What the parameter servers' side, and other rules, get from the job."""

    @property
    def setup(self) -> Setup:
        """The tasks and the options."""
        ...

    @property
    def procedures(self) -> Procedures:
        """The procedures of the whole job."""
        ...

    @property
    def now(self) -> float:
        """The time of the event that is being handled. A procedure looks at it after each ``yield``."""
        ...

    def pause(self, why: Hashable) -> None:
        """Stops giving functions to workers, until ``resume`` with the same reason. May be called again."""
        ...

    def resume(self, why: Hashable) -> None:
        """Removes a reason to pause, if it is one. Workers get functions again if there is no other reason."""
        ...

    def broke(self, error: BaseException, why: Hashable = None) -> None:
        """Fails all functions, because what all need is lost, until ``mended`` with the same reason."""
        ...

    def mended(self, why: Hashable) -> None:
        """Ends a breakage for this reason, if it is one. The job resumes if nothing else is broken."""
        ...

    @property
    def is_quiet(self) -> bool:
        """True if no function is in flight and no round waits to be applied.

        Variables may still change: a worker that counts as lost may go on with its function.
        """
        ...

    @property
    def has_half_done(self) -> bool:
        """True if a function that has not ended was taken from its worker, so some servers may have its updates, and
        others not yet. Once it has ended on another worker all have them, and what comes later changes nothing.
        """
        ...

    @property
    def num_in_flight(self) -> int:
        """The number of functions that workers have taken and that have not ended."""
        ...

    @property
    def is_over(self) -> bool:
        """True if the job is closed, or broken now: then ``is_quiet`` may never come."""
        ...

    @property
    def next_number(self) -> int:
        """The number of the next function: at most as many were scheduled, in all jobs of the session."""
        ...

    @property
    def unfinished(self) -> Sequence[int]:
        """The numbers of the functions of this job that have not ended, in their order."""
        ...

    @property
    def num_finished(self) -> int:
        """The number of functions that have finished in this job."""
        ...

    @property
    def num_made(self) -> int:
        """The number of variables that were created in the session."""
        ...

    def log(self, level: int, text: str, *arguments: Any, error: BaseException | None = None) -> None:
        """Writes ``text % arguments`` into the log."""
        ...

    def tell_workers_primaries(self) -> None:
        """Tells all connected workers ``primaries_for_workers``, soon. Does not wait."""
        ...
