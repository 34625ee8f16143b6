"""What ``replicax top``, the page and the metrics of a group show of all groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from replicax._ps.local_updates.round_state import REFUSED, MemberState, RoundState
from replicax._src.program_kit.own_process import counters

# The names in the status, each with that in the statistics of a group.
_COUNTS: Final = {
    "rows": "tokens",
    **{name: name for name in ("pushes", "adoptions", "lost_pushes", "silent_servers")},
    "sent_bytes": "bytes_out",
    "received_bytes": "bytes_in",
}


def show_groups(describe: Callable[[], Mapping[str, Any]] | None) -> None:
    """Shows groups in the status that this process serves from now on; None: no more.

    Args:
      describe: Returns a ``group_status``. A thread calls it about once a second, so it may not wait for a server.
    """
    counters.groups = describe


def group_status(
    index: int,
    quorum: int,
    rounds: Sequence[RoundState],
    is_live: Callable[[int], bool],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """Returns what a group knows of all groups, as JSON: ``status["groups"]``. Pure.

    Args:
      index: The number of the group that says it.
      quorum: The number of groups that a round waits for.
      rounds: The newest state of each fragment that a server has answered with.
      is_live: Tells if a group still counts, by its number.
      counts: The statistics of ``LocalUpdates``. Missing ones are 0.
    """
    return {
        "index": index,
        "quorum": quorum,
        "versions": [state.version for state in rounds],
        "is_stopping": any(state.is_stopping for state in rounds),
        **{name: counts.get(counted, 0) for name, counted in _COUNTS.items()},
        "members": [
            _described(number, rounds, is_live) for number in range(len(rounds[0].members) if rounds else 0)
        ],
    }


def _described(number: int, rounds: Sequence[RoundState], is_live: Callable[[int], bool]) -> dict[str, Any]:
    slots = [(state.version, state.members[number]) for state in rounds]
    lags = [
        max(0, version - slot.landed) for version, slot in slots if slot.pushed and slot.landed != REFUSED
    ]
    return {
        "state": _state(number, [slot for _, slot in slots], is_live),
        "lag": max(lags, default=None),
        "rows": max(slot.tokens for _, slot in slots),
    }


def _state(number: int, slots: Sequence[MemberState], is_live: Callable[[int], bool]) -> str:
    if not any(slot.owner for slot in slots):
        return "awaited"
    if all(slot.has_finished for slot in slots):
        return "finished"
    return "training" if is_live(number) else "silent"
