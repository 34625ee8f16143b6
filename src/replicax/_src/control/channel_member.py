"""``ChannelMember``: the state of one task in the controller, from its heartbeats. No sockets or clocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from replicax._src.control.dates import date_of
from replicax._src.control.moments import NUM_KEPT, Report

QUIET_S: Final = 5.0
"""The seconds without a message after which the others are told for how long a member has been silent."""


class Run(NamedTuple):
    """A program, the position from which it has run, and the line of code there, if it is known."""

    position: int
    program: str
    at: str | None


Runs = list[Run]


@final
@dataclass
class ChannelMember:
    """The state of one task.

    Attributes:
      status: The status of its last heartbeat: ``position``, ``program`` (name and number), ``doing``, and possibly
        ``at``, a line of code, and ``callback``, one that a program calls.
      since: The time at which it reached its position.
      behind_at: The last time at which others had not reached its position.
      warned_s: The time that it had waited there when it was last told for which members.
      next: If it waits in an all-gather of the sequence: the position, and the purpose or the name of the program to
        agree on; see ``failures.describe_status``.
      next_date: The date of this all-gather.
      reads: The number of batches that it has read together with others, at least.
      reading: If it waits for a batch: the position before, the number of reads before, and the dataset.
      has_threads: True once it has run programs in several threads.
      runs: The programs that it has run. Those that were compared with all members are dropped.
      gone: The way in which it ended; None while it is present.
      text: Its ending in words, if it failed before it joined.
      reports: The figures of its last heartbeats, oldest first; see ``cluster/figures.py`` and ``moments.py``.
      has_twin: True once another process has said that it is this task.
      incarnation: The number of processes that were this task before.
      is_solo: True in a newcomer that has not said yet that it has committed a step.
      takes_part_since: The date from which on it takes part; see ``dates.py``.
      entered_at: The time at which it entered, if it was a newcomer.
    """

    name: str
    incarnation: int = 0
    is_here: bool = False
    has_twin: bool = False
    heard_at: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)
    since: float = 0.0
    behind_at: float = 0.0
    warned_s: float = 0.0
    next: tuple[int, dict[str, str]] | None = None
    next_date: int = 0
    reads: int = 0
    reading: tuple[int, int, str] | None = None
    has_threads: bool = False
    runs: Runs = field(default_factory=list)
    gone: str | None = None
    text: str = ""
    is_solo: bool = False
    takes_part_since: int = 0
    entered_at: float = 0.0
    reports: deque[Report] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))

    @property
    def is_present(self) -> bool:
        return self.is_here and self.gone is None

    @property
    def is_in_program(self) -> bool:
        return self.status.get("doing") == "in"

    @property
    def position(self) -> int:
        return self.status.get("position", -1)

    @property
    def reached(self) -> int:
        """The position of the last program that it has begun, or before which it waits."""
        return self.position if self.next is None else max(self.position, self.next[0])

    @property
    def reached_program(self) -> int:
        """The position of the last program that it has begun, or waits to agree on."""
        return self.reached if self.next is not None and "program" in self.next[1] else self.position

    @property
    def takes_part(self) -> bool:
        """True once it has reached a program that it runs together with the others."""
        return not self.is_solo and date_of(self.reached) >= self.takes_part_since

    def enter(self, version: int, now: float) -> None:
        """Notes that it has entered as a newcomer, at a version. What it ran before was its own."""
        self.is_solo, self.takes_part_since, self.entered_at = True, version + 1, now
        self.status, self.since, self.warned_s, self.next = {}, now, 0.0, None
        self.reads, self.reading, self.has_threads = 0, None, False
        self.runs.clear()

    def heartbeat(self, status: dict[str, Any], now: float) -> None:
        """Takes a status. An earlier position than the known one is stale and ignored."""
        position, program = status["position"], status["program"]
        if position < self.position:
            return
        self.is_solo = status.pop("is_solo", False)
        self.reads = max(self.reads, status.pop("reads", 0))
        self.has_threads |= status.pop("has_threads", False)
        reading = status.get("reading")
        self.reading = None if reading is None else (reading[0], reading[1], reading[2])
        if (position, status["doing"]) != (self.position, self.status.get("doing")):
            self.since, self.warned_s = now, 0.0
        self.status = status
        is_common = not self.is_solo and date_of(position) >= self.takes_part_since
        if is_common and program is not None and (not self.runs or self.runs[-1].program != program):
            self.runs.append(Run(position, program, status.get("at")))

    def status_at(self, now: float) -> dict[str, Any]:
        """Returns its status for messages to other members."""
        more: dict[str, Any] = {"for_s": int(now - self.since)} if self.status else {}
        if now - self.heard_at > QUIET_S:
            more["silent_s"] = int(now - self.heard_at)
        if self.next is not None and self.next[0] > self.position:
            more["next"] = [self.next[0], self.next[1]]
        return {**self.status, **more}
