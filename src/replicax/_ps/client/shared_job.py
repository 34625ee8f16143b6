"""Programs that share parameter servers agree on one session id, which the chief chooses."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

from replicax._ps.client.tasks import Share, Tasks, ask_each
from replicax._ps.client.wait_rules import Awaited
from replicax._ps.client.waiting import wait_for
from replicax._src.program_kit.errors import StaleCoordinatorError

log = logging.getLogger("replicax")
_PREFIX: Final = "shared-"


def join_shared(tasks: Tasks, share: Share, limit_s: float) -> list[Mapping[str, Any]]:
    """Joins the session of the programs that share the parameter servers. Logs which task it waits for.

    The chief resumes the session of earlier programs, or of an earlier chief, if all servers have it. Otherwise it
    starts a
    new session, and the servers drop the data of others. All other programs wait for the chief.

    Args:
      tasks: The tasks; this sets their session id.
      share: This program among those that share the parameter servers.
      limit_s: The longest wait.

    Returns:
      The answer of each parameter server, in order.

    Raises:
      UnavailableError: A parameter server does not answer, or the chief has not started the session.
      UnauthenticatedError: The servers have other credentials.
    """
    greeted: list[Mapping[str, Any]] = []
    with tasks.clients("ps") as clients:

        def missing() -> Awaited | None:
            told: dict[int, Mapping[str, Any]] = {}
            lacking = ask_each(clients, "status", {}, told)
            if lacking:
                return tasks.awaited(lacking)
            incarnation = _agreed(told.values(), share)
            if incarnation is None:
                return _awaited_chief(told.values(), share)
            tasks.incarnation = incarnation
            try:
                greeted.extend(tasks.greet_ps(limit_s))
            except StaleCoordinatorError as error:  # the session has ended in the meantime
                log.debug("%s", error)
                return _awaited_chief(told.values(), share)
            return None

        wait_for(missing, share.member, limit_s)
    return greeted


def _agreed(told: Iterable[Mapping[str, Any]], share: Share) -> str | None:
    """Returns the session id that all use; None if the chief has not started a session."""
    there = {answer["incarnation"] for answer in told}
    if len(there) == 1 and _is_shared(*there):
        return there.pop()
    return f"{_PREFIX}{uuid.uuid4().hex}" if share.is_chief else None


def _is_shared(incarnation: str | None) -> bool:
    return incarnation is not None and incarnation.startswith(_PREFIX)


def _awaited_chief(told: Iterable[Mapping[str, Any]], share: Share) -> Awaited:
    why = "it creates the variables, and has not started. Check that it runs the program."
    if any(answer["incarnation"] is not None and not _is_shared(answer["incarnation"]) for answer in told):
        why = (
            "the parameter servers serve a coordinator. If this task is one of its workers, run `replicax "
            f"server` here. If every worker should run the program, let {share.chief} make "
            "ParameterServerStrategy(is_coordinator=False)."
        )
    return Awaited(share.chief, why, share.chief)
