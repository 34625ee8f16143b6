"""``RoundRules``: has the parameter servers apply the gradients of each complete round."""

from __future__ import annotations

from typing import Final, final

from replicax._ps.job.procedures import Operation, Pause, Procedure
from replicax._ps.job.rounds import Round, Rounds
from replicax._ps.job.server_side import ServerSide
from replicax._ps.job.shared_state import JobState
from replicax._src.program_kit.errors import StaleCoordinatorError, UnavailableError

_PAUSE_S: Final = 0.2
_KEY: Final = "rounds"


@final
class RoundRules:
    """Sends complete rounds to the servers. All get the same closures, so all apply the same gradients.

    An unreachable server is asked again until it is back, or lost, and the others with it: each applies a round once.
    A server that restarted and lost gradients applies the mean of those that it has.

    Args:
      state: The state of the job.
      servers: The parameter servers' side, which learns which one is unreachable.
    """

    def __init__(self, state: JobState, servers: ServerSide):
        self._state, self._queue, self._servers = state, state.queue, servers

    def look(self) -> None:
        """Begins to apply a round if one is complete, after each event."""
        rounds = self._queue.rounds
        if rounds is not None and rounds.complete is not None and _KEY not in self._state.procedures:
            self._state.procedures.start(_KEY, self._apply_all(rounds), self._state.now)

    def _apply_all(self, rounds: Rounds) -> Procedure[None]:
        while (complete := rounds.complete) is not None:
            yield from self._apply(rounds, complete)

    def _apply(self, rounds: Rounds, complete: Round) -> Procedure[None]:
        arguments = complete.number, rounds.low, tuple(complete.ended)
        while rounds.is_due(complete):
            try:
                yield Operation("apply_round", arguments)
                yield Operation("renew")  # before any function of the next round is sent
            except UnavailableError as error:
                self._servers.note_failure(error.task or None, self._state.now)
                yield Pause(_PAUSE_S)
            except StaleCoordinatorError as error:
                self._state.broke(error)
            except Exception as error:
                if rounds.is_due(complete):  # otherwise the job broke meanwhile
                    self._state.settle(self._queue.round_failed(complete, error))
            else:
                rounds.applied(complete)
