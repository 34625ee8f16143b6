"""Programs that share parameter servers agree on one incarnation, which the chief begins."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

from replicax._src.parameter_servers.client.tasks import Share, Tasks, ask_each
from replicax._src.parameter_servers.client.waiting import Awaited, wait_for
from replicax._src.parameter_servers.errors import StaleCoordinatorError

log = logging.getLogger("replicax")
_PREFIX: Final = "shared-"


def join_shared(tasks: Tasks, limit_s: float) -> list[Mapping[str, Any]]:
    """Takes part in the job of those that share the parameter servers. Logs for whom it waits.

    The chief goes on with what is there, if all servers have it: those that came before it, or a chief before it, left
    that. Otherwise it begins anew, and what others have there is dropped. All others wait for that.

    Args:
      tasks: Gets the incarnation.
      limit_s: The longest wait.

    Returns:
      The answer of each parameter server, in order.

    Raises:
      UnavailableError: A parameter server does not answer, or the chief has not begun.
      UnauthenticatedError: The servers take other credentials.
    """
    assert tasks.share is not None
    share = tasks.share
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
            except StaleCoordinatorError as error:  # it ended meanwhile
                log.debug("%s", error)
                return _awaited_chief(told.values(), share)
            return None

        wait_for(missing, share.member, limit_s)
    return greeted


def _agreed(told: Iterable[Mapping[str, Any]], share: Share) -> str | None:
    """The incarnation that all use; None if the chief has not begun one."""
    there = {answer["incarnation"] for answer in told}
    if len(there) == 1 and _is_shared(*there):
        return there.pop()
    return f"{_PREFIX}{uuid.uuid4().hex}" if share.is_chief else None


def _is_shared(incarnation: str | None) -> bool:
    return incarnation is not None and incarnation.startswith(_PREFIX)


def _awaited_chief(told: Iterable[Mapping[str, Any]], share: Share) -> Awaited:
    why = "it makes the variables, and has not begun. Does it run the program?"
    if any(answer["incarnation"] is not None and not _is_shared(answer["incarnation"]) for answer in told):
        why = (
            "the parameter servers work for a coordinator. If this task is one of its workers, run `replicax server` here; if "
            f"every worker is to run the program, let {share.chief} make ParameterServerStrategy(is_coordinator=False)."
        )
    return Awaited(share.chief, why, share.chief)
