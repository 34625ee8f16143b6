"""What the logs of a run of groups say that happened: pushes, adoptions, calls, processes and rounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from replicax._ps.local_updates.replay_file import GroupCall


@final
class ServedVersion(NamedTuple):
    """A version of a fragment on one of the servers that it had, one after the other.

    Attributes:
      restarts: The number of restarts of its server before. A server that was restarted has the versions until its
        snapshot, and makes the later ones again.
      version: The number of rounds that it has.
    """

    restarts: int
    version: int

    def __str__(self) -> str:
        return str(self.version) + (
            f" (after {self.restarts} restarts of its server)" if self.restarts else ""
        )


@final
@dataclass(frozen=True)
class LoggedPush:
    """A push that a process took.

    Attributes:
      group: The number of its group.
      process: The number of its process among those of the group.
      fragment, number, tokens: As in the log.
    """

    group: int
    process: int
    fragment: int
    number: int
    tokens: int

    @property
    def order(self) -> tuple[int, int, int]:
        """The order in which a server has added the pushes of one group; of different groups it does not matter."""
        return self.group, self.process, self.number


@final
@dataclass(frozen=True)
class LoggedAdoption:
    """Outer parameters that a process adopted: see ``UnmergedProgress.adopt``."""

    fragment: int
    served: ServedVersion
    keeps: tuple[int, ...]
    returns: tuple[int, ...]
    drops: bool


@final
@dataclass(frozen=True)
class LoggedCall:
    """A call of a group's program in which it exchanged.

    Attributes:
      call: The method; None for ``attach``.
      step: The steps that the process had counted.
      events: What it did, in order.
    """

    call: GroupCall | None
    step: int
    events: list[LoggedPush | LoggedAdoption]


@final
@dataclass(frozen=True)
class LoggedProcess:
    """A process of a group.

    Attributes:
      group: The number of the group.
      process: Its number among those of the group.
      header: That of the log.
      calls: Where it exchanged, in order. The first is ``attach``.
      created: The fragments that it has created.
    """

    group: int
    process: int
    header: Mapping[str, Any]
    calls: Sequence[LoggedCall]
    created: frozenset[int]

    @property
    def finish_step(self) -> int | None:
        """The number of steps after which it called ``finish``; None if it did not."""
        return next((each.step for each in self.calls if each.call is GroupCall.FINISH), None)

    @property
    def name(self) -> str:
        """Its name in errors."""
        return f"group {self.group}" + (f" (process {self.process + 1})" if self.process else "")


@final
@dataclass(frozen=True)
class LoggedRound:
    """A round of a fragment: ``served`` is the version that it made."""

    fragment: int
    served: ServedVersion
    is_flush: bool
    pushes: Sequence[LoggedPush]
