"""``ServerWatch``: the heartbeats of one parameter server: it is here, silent, lost, another process, or back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol, final

from replicax._ps.job.procedures import Pause, Procedure, Request
from replicax._ps.job.server_side import JobHooks
from replicax._ps.job.server_state import ServerState
from replicax._src.program_kit.errors import StaleCoordinatorError, UnavailableError


class RestartRules(Protocol):
    """What a job does when a parameter server is lost, restarts, or is back. No method waits."""

    def start(self) -> None:
        """The job starts."""
        ...

    def silent(self, watch: ServerWatch) -> None:
        """The server missed a heartbeat."""
        ...

    def lost(self, watch: ServerWatch, error: UnavailableError) -> UnavailableError | None:
        """The server is lost. Returns an error for the job; None if the job can go on without the server, or waits."""
        ...

    def given_up(self, watch: ServerWatch) -> None:
        """A lost server answers, but has ended this coordinator's session; at each heartbeat."""
        ...

    def restarted(self, watch: ServerWatch) -> None:
        """The server is another process, or may be as old as one; at each heartbeat until one is accepted."""
        ...

    def here(self, watch: ServerWatch, statistics: Mapping[str, Any] | None) -> None:
        """The accepted process answers; the statistics are None if it was accepted now."""
        ...


@final
class ServerWatch:
    """Sends heartbeats to one parameter server, and tells the rules and the job what they show.

    Args:
      state: The server.
      job: The job.
      rules: What to do.
    """

    def __init__(self, state: ServerState, job: JobHooks, rules: RestartRules):
        self.state, self._job, self._rules = state, job, rules
        self._limits = job.setup.limits
        self._num_missed, self._since = 0, 0.0
        self._num_unreached = 0  # the last heartbeats in a row for which there was no connection
        self._num_refused, self._refused_since = 0, 0.0
        self._is_hurried = False

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def index(self) -> int:
        return self.state.index

    @property
    def is_unreachable(self) -> bool:
        """True if the server has missed so many heartbeats that no answer is expected from it."""
        return self.state.num_silent >= self._limits.ps_missed_heartbeats

    @property
    def is_silent(self) -> bool:
        """True if the last heartbeats had no answer, and the server may still have its data."""
        return bool(self._num_missed) and self._num_unreached < self._limits.ps_missed_heartbeats

    @property
    def silent_s(self) -> float:
        """The time in seconds since the first of the heartbeats that had no answer."""
        return self._job.now - self._since if self._num_missed else 0.0

    def start(self) -> None:
        """Starts the heartbeats."""
        self._job.procedures.start(self._key, self._beats(), self._job.now)

    def probe(self) -> None:
        """Sends a heartbeat now; after the answer to another, if that is on its way."""
        self._is_hurried = True
        self._job.procedures.hurry(self._key, self._job.now)

    def pause(self) -> None:
        """Stops the functions until the server is back, if it can come back."""
        if self.state.comes_back_s:
            self._job.pause(self.name)

    def answered(self, instance: str) -> None:
        """Records which process has answered. The job waits for one that is not accepted."""
        self.state.answered(instance, self._job.now)
        if self.state.is_replaced:
            self.pause()

    def accept(self, instance: str) -> None:
        """Takes a process as the server. It is back."""
        self.state.accept(instance)
        self._back(None)

    def breaks(self, error: BaseException) -> None:
        """Ends the job's functions with an error, until the server is back."""
        if not self.state.is_broken:
            self.state.is_lost = self.state.is_broken = True
            self._job.broke(error, self.name)

    def not_resumed(self, error: Exception) -> None:
        """Records that a restarted server could not be used yet. It is lost if that lasts too long."""
        self._num_refused += 1
        self._refused_since = self._job.now if self._num_refused == 1 else self._refused_since
        if self._num_refused >= self._limits.ps_missed_heartbeats:
            limit_s = self._waits_s(is_silent=_is_silent(error))
            may_come_back = self._job.now - self._refused_since < limit_s
            self._lose(self._unavailable(error, limit_s), may_come_back=may_come_back)

    # --- heartbeats --------------------------------------------------------------------------------------

    @property
    def _key(self) -> tuple[str, str, int]:
        return "ps", "watch", self.index

    def _beats(self) -> Procedure[None]:
        limits = self._limits
        while True:
            self._is_hurried = False
            try:
                answer = yield Request(self.name, "heartbeat", {}, limits.heartbeat_timeout_s)
            except StaleCoordinatorError as error:
                self.state.num_silent = 0
                if self.state.is_lost:
                    self._rules.given_up(self)
                self._lose(error)
            except Exception as error:
                self._missed(error)
            else:
                self._num_missed = self.state.num_silent = 0
                self._heard(answer)
            if not self._is_hurried:
                yield Pause(limits.heartbeat_s if not self._num_missed else limits.heartbeat_s / 4)

    def _heard(self, answer: Mapping[str, Any]) -> None:
        state, instance = self.state, answer["instance"]
        self.answered(instance)
        if state.is_replaced:
            if not state.knows(instance):
                self._rules.restarted(self)
        elif instance == state.instance:  # an answer of an earlier process comes late
            self._back(answer.get("statistics") or {})

    def _back(self, statistics: Mapping[str, Any] | None) -> None:
        state = self.state
        self._num_refused = 0
        if statistics is not None and (failure := state.note(statistics)):
            self._job.log(
                logging.WARNING,
                "%s continues without a new snapshot, and will try again: %s",
                self.name,
                failure,
            )
        state.is_lost = state.is_broken = False
        self._rules.here(self, statistics)
        self._job.resume(self.name)
        self._job.mended(self.name)

    def _missed(self, error: Exception) -> None:
        self._num_missed += 1
        self._num_unreached = 0 if _is_silent(error) else self._num_unreached + 1
        self.state.num_silent += 1
        self._since = self._job.now if self._num_missed == 1 else self._since
        self.pause()
        self._rules.silent(self)
        if self._num_missed >= self._limits.ps_missed_heartbeats:
            # A server that is silent may lose a connection, too. It has ended if there is none again and again.
            limit_s = self._waits_s(is_silent=self.is_silent)
            may_come_back = self._job.now - self._since < limit_s
            is_lost = self._lose(self._unavailable(error, limit_s), may_come_back=may_come_back)
            if not is_lost and self._num_missed == self._limits.ps_missed_heartbeats:
                self._job.log(
                    logging.WARNING,
                    "%s does not answer. Waiting up to %g s for it: %s",
                    self.name,
                    limit_s,
                    error,
                )

    def _lose(self, error: UnavailableError | StaleCoordinatorError, *, may_come_back: bool = False) -> bool:
        """Returns True if the server is lost now; False if the job waits for it. Then it is called again."""
        if self.state.is_lost:
            return True
        cause = error
        if isinstance(error, UnavailableError):
            cause = self._rules.lost(self, error)
        if cause is None:
            self.state.is_lost = True
            self._job.resume(self.name)  # if the job has waited for it
        elif may_come_back:
            self._job.pause(self.name)
        else:
            self.breaks(cause)
        return self.state.is_lost

    def _waits_s(self, *, is_silent: bool) -> float:
        """Returns the longest wait for the server."""
        return max(self.state.comes_back_s, self._limits.ps_silence_s if is_silent else 0.0)

    def _unavailable(self, error: Exception, waited_s: float) -> UnavailableError:
        what = "Restart it and the program, from a checkpoint."
        if waited_s:
            what = f"The coordinator waited {waited_s:g} s for it. {what}"
        return UnavailableError(f"{self.name} is lost: {error} {what}{self.state.hint}", self.name)


def _is_silent(error: Exception) -> bool:
    return isinstance(error, UnavailableError) and error.is_silent
