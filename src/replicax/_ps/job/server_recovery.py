"""``ServerRecovery``: a parameter server that restarts with a snapshot of this session resumes, as old as it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from replicax._ps.job.procedures import Operation, Procedure, Request
from replicax._ps.job.server_side import JobHooks
from replicax._ps.job.server_state import ServerState
from replicax._ps.job.server_watch import ServerWatch
from replicax._src.program_kit.errors import UnavailableError

STATUS_S: Final = 10.0


@final
class ServerRecovery:
    """The rules of ``on_ps_restart="continue"``.

    The server gets its programs again, and workers read all values again. The other servers are unchanged.
    """

    def __init__(self, job: JobHooks):
        self._job = job

    def start(self) -> None:
        """Does nothing."""

    def silent(self, watch: ServerWatch) -> None:
        """Does nothing: the job is paused until the server answers."""

    def lost(self, watch: ServerWatch, error: UnavailableError) -> UnavailableError | None:
        """Returns the error, because no other server has the variables."""
        return error

    def given_up(self, watch: ServerWatch) -> None:
        """Does nothing: the variables are dropped."""

    def here(self, watch: ServerWatch, statistics: Mapping[str, Any] | None) -> None:
        """Does nothing."""

    def restarted(self, watch: ServerWatch) -> None:
        """Resumes with the server, in a procedure that heartbeats do not wait for."""
        key = "ps", "recovery", watch.index
        if key not in self._job.procedures:
            self._job.procedures.start(key, self._resume(watch), self._job.now)

    def _resume(self, watch: ServerWatch) -> Procedure[None]:
        job, state = self._job, watch.state
        try:
            described = yield from restored_state(job, watch)
            if described is None:
                return
            instance, restored = described["instance"], described["restored"]
            missing = yield Operation("restored", (watch.index, tuple(restored["keys"])))
            names = yield Operation("names_on", (watch.index,))
            # Programs that went to another process than the snapshot's keys came from prove nothing.
            again = yield Request(watch.name, "status", {}, STATUS_S)
        except Exception as error:
            watch.not_resumed(error)
            return
        watch.answered(again["instance"])
        # An answer may come late, after a heartbeat of the next process.
        if not again["instance"] == instance == state.last_instance:
            watch.probe()
            return
        if missing:
            watch.breaks(incomplete(state, missing))
            return
        job.log(
            logging.WARNING,
            "%s restarted from its last snapshot%s: about %d updates that it had acknowledged are lost. "
            "%sThe other parameter servers are unchanged.",
            watch.name,
            snapshot_age(restored),
            max(state.num_updates - restored["updates"], 0),
            snapshot_contents(names, restored, job.next_number),
        )
        state.num_updates = restored["updates"]  # it may be lost again before a heartbeat counts them
        watch.accept(instance)


def restored_state(job: JobHooks, watch: ServerWatch) -> Procedure[Mapping[str, Any] | None]:
    """Returns the status of a restarted server that has a snapshot of this session.

    Returns None if the server is not another process, or has no such snapshot. The job is broken then.

    Raises:
      Exception: The server does not answer.
    """
    state = watch.state
    if not state.comes_back_s:
        watch.breaks(not_the_same(state, f"its variables are lost.{state.hint}"))
        return None
    status = yield Request(watch.name, "status", {}, STATUS_S)
    watch.answered(status["instance"])
    if state.knows(status["instance"]):
        return None
    restored = status["restored"]
    if restored is None or restored["incarnation"] != job.setup.incarnation:
        why = "it has no snapshot of this coordinator's session, so its variables are lost."
        watch.breaks(not_the_same(state, why))
        return None
    return status


def snapshot_age(restored: Mapping[str, Any]) -> str:
    """Returns the age of a snapshot, for a message."""
    age_s = restored.get("age_s")
    return "" if age_s is None else f", taken {age_s:.0f} s before"


def snapshot_contents(names: Sequence[str], restored: Mapping[str, Any], num_scheduled: int) -> str:
    """Says which variables are older now, and how many functions their values include."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    first, stop = restored.get("applied", (0, 0))
    some = f", and some of the next {stop - first}" if stop > first else ""
    included = f"of {num_scheduled} scheduled functions they include the updates of the first {first}{some}"
    return f"Its variables are as they were then: {shown}; {included}. " if names else ""


def not_the_same(state: ServerState, why: str) -> UnavailableError:
    """Returns the error of a server that cannot go on because it is another process."""
    return UnavailableError(
        f"{state.name} is another process than before: {why} Restart the program from a checkpoint.",
        state.name,
    )


def incomplete(state: ServerState, missing: Sequence[str]) -> UnavailableError:
    """Returns the error of a server whose snapshot lacks variables."""
    names = ", ".join(sorted(missing)[:5])
    return not_the_same(state, f"its snapshot was taken before these variables were created: {names}.")
