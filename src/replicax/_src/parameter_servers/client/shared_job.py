"""How programs that share parameter servers come together: they agree on one incarnation, which the chief begins."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from replicax._src.parameter_servers.client.tasks import Share, Tasks
from replicax._src.parameter_servers.errors import StaleCoordinatorError, UnavailableError

log = logging.getLogger("replicax")
_PREFIX: Final = "shared-"
_ASK_S: Final = 5.0
_PAUSE_S: Final = 0.2
_SAY_EVERY_S: Final = 10.0


def join_shared(tasks: Tasks, limit_s: float) -> list[Mapping[str, Any]]:
    """Takes part in the job of those that share the parameter servers. Says for whom it waits.

    The chief goes on with what is there, if all servers have it: those that came before it, or a chief before it, left
    that. Otherwise it begins anew, and what others have there is dropped. All others wait for that.

    Args:
      tasks: Gets the incarnation.
      limit_s: How long at most.

    Returns:
      What each parameter server tells of itself.

    Raises:
      UnavailableError: A parameter server does not answer, or the chief has not begun.
      UnauthenticatedError: The servers take other credentials.
    """
    assert tasks.share is not None
    addresses = tasks.addresses("ps")
    clients = [tasks.connect("ps", index) for index in range(len(addresses))]
    start = said = time.monotonic()
    try:
        while True:
            told, lacking = _asked(clients)
            incarnation = None if lacking else _agreed(told, tasks.share)
            if incarnation is not None:
                tasks.incarnation = incarnation
                try:
                    return tasks.greet_ps(limit_s)
                except StaleCoordinatorError as error:
                    log.debug("%s", error)  # it ended meanwhile
            awaited, why = _awaited(tasks.share, addresses, told, lacking)
            now = time.monotonic()
            if now - start > limit_s:
                raise UnavailableError(
                    f"{tasks.share.member} waited {limit_s:g} s for {awaited}: {why} REPLICAX_START_TIMEOUT_S sets how long "
                    "to wait.",
                    awaited.split(" (")[0],
                )
            if now - said > _SAY_EVERY_S:
                said = now
                log.warning("%s has waited %.0f s for %s: %s", tasks.share.member, now - start, awaited, why)
            time.sleep(_PAUSE_S)
    finally:
        for client in clients:
            client.close()


def _asked(clients: Sequence[Any]) -> tuple[list[Mapping[str, Any]], dict[int, str]]:
    """What each tells, and why some do not."""
    told: list[Mapping[str, Any]] = []
    lacking: dict[int, str] = {}
    for index, client in enumerate(clients):
        try:
            told.append(client.ask("status", {}, _ASK_S))
        except UnavailableError as error:
            lacking[index] = str(error)
    return told, lacking


def _agreed(told: Sequence[Mapping[str, Any]], share: Share) -> str | None:
    """The incarnation that is to be used; None if the chief has not begun one."""
    there = {answer["incarnation"] for answer in told}
    if len(there) == 1 and _is_shared(*there):
        return there.pop()
    return f"{_PREFIX}{uuid.uuid4().hex}" if share.is_chief else None


def _is_shared(incarnation: str | None) -> bool:
    return incarnation is not None and incarnation.startswith(_PREFIX)


def _awaited(
    share: Share, addresses: Sequence[str], told: Sequence[Mapping[str, Any]], lacking: Mapping[int, str]
) -> tuple[str, str]:
    """For whom it waits, and why."""
    if lacking:
        names = ", ".join(f"ps {index} ({addresses[index]})" for index in lacking)
        return (
            names,
            f"{next(iter(lacking.values()))} Is its server started, with this TF_CONFIG and these REPLICAX_TLS settings?",
        )
    if any(answer["incarnation"] is not None and not _is_shared(answer["incarnation"]) for answer in told):
        return share.chief, (
            "the parameter servers work for a coordinator. If this task is one of its workers, run `replicax server` here; if "
            f"every worker is to run the program, let {share.chief} make ParameterServerStrategy(is_coordinator=False)."
        )
    return share.chief, "it makes the variables, and has not begun. Does it run the program?"
