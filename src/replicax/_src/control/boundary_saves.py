"""The controller's rules by which survivors of a failure agree who saves the newest boundary. No sockets or clocks.

A *boundary* is a moment at which a program's state is consistent; see ``checkpoint/boundary_keeper.py``. Each member
that keeps boundaries counts them. This count is the *version*, equal in all members at the same boundary. The rules:

- A member that keeps boundaries says so (``keeps``) before its first one, and again when it stops (``keeps_none``).
- At the first failure of the run, all members that keep boundaries are told to *freeze*: each answers with the version
  that it has, None if it has none, and keeps this boundary from then on. There is one such round in a run, because the
  job then restarts as a whole.
- When all have answered, the member with the highest version *saves* it, and says if it could. Of several members the
  one with the lowest number saves. One is enough: each has the full state.
- If the saver's connection ends, or it could not save, the next of the others saves, at the highest version that is
  left. A partial checkpoint has no name, so another attempt never meets it.
- A member that raised an error, or that gave up because of the failure, still counts: only the end of its connection,
  or no answer within ``answer_s``, takes it out.
- The round is *over* when a boundary is saved, when nobody is left who could, or after ``limit_s``. All are told; until
  then they do not end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

Message = Mapping[str, Any]
Outbox = list[tuple[int, Message]]
KINDS: Final = frozenset({"keeps", "keeps_none", "frozen", "boundary_saved"})


@dataclass
class _Round:
    """The one round.

    Attributes:
      members: The members that can still save, or have not answered.
      versions: The answers.
      saver: The member that saves now.
    """

    began: float
    members: set[int]
    versions: dict[int, int | None] = field(default_factory=dict)
    saver: int | None = None
    is_over: bool = False


@final
class BoundarySaves:
    """The round of a cluster.

    Args:
      answer_s: The seconds within which a member must answer.
      limit_s: The longest time that a round may take.
    """

    def __init__(self, *, answer_s: float = 5.0, limit_s: float = 600.0):
        self._answer_s, self._limit_s = answer_s, limit_s
        self._keeping: set[int] = set()
        self._round: _Round | None = None

    @property
    def is_active(self) -> bool:
        """True while members freeze or save."""
        return self._round is not None and not self._round.is_over

    def begin(self, now: float, silent: int | None = None) -> Outbox:
        """Notes a failure, after which the run cannot continue. Returns the messages to send.

        Args:
          silent: The member that went silent, if that is the failure. Its connection is still open.
        """
        members = self._keeping - {silent}
        if self._round is not None or not members:
            return []
        self._round = _Round(now, members)
        return [(number, {"kind": "freeze"}) for number in sorted(members)]

    def receive(self, number: int, message: Message) -> Outbox:
        """Takes a message of a kind in ``KINDS``. Returns the messages to send."""
        match message["kind"]:
            case "keeps" if self._round is None:
                self._keeping.add(number)
            case "keeps_none" if self._round is None:
                self._keeping.discard(number)
            case "frozen" if self.is_active:
                return self._answered(number, message["version"])
            case "boundary_saved" if self.is_active:
                return self._saved(number, message["is_saved"])
        return []

    def lose(self, number: int) -> Outbox:
        """Notes that the connection of a member has ended. Returns the messages to send."""
        self._keeping.discard(number)
        return self._without({number})

    def tick(self, now: float) -> Outbox:
        """Advances the time. Returns the messages to send."""
        current = self._round
        if current is None or current.is_over:
            return []
        if now - current.began > self._limit_s:
            return self._end(None, None)
        if now - current.began > self._answer_s:
            return self._without(current.members - current.versions.keys())
        return []

    def _answered(self, number: int, version: int | None) -> Outbox:
        assert self._round is not None
        if number not in self._round.members:
            return []
        self._round.versions[number] = version
        return self._choose()

    def _saved(self, number: int, is_saved: bool) -> Outbox:
        current = self._round
        assert current is not None
        if number != current.saver:
            return []
        if is_saved:
            return self._end(current.versions[number], number)
        return self._without({number})

    def _without(self, lost: set[int]) -> Outbox:
        """Continues the round without some members."""
        current = self._round
        if current is None or current.is_over or not lost:
            return []
        current.members -= lost
        if current.saver in lost:
            current.saver = None
        return self._choose()

    def _choose(self) -> Outbox:
        """Chooses the member that saves, once all have answered."""
        current = self._round
        assert current is not None
        if current.saver is not None or current.members - current.versions.keys():
            return []
        having = {n: version for n in current.members if (version := current.versions[n]) is not None}
        if not having:
            return self._end(None, None)
        current.saver = min(having, key=lambda n: (-having[n], n))
        return [(current.saver, {"kind": "save_boundary"})]

    def _end(self, version: int | None, saver: int | None) -> Outbox:
        assert self._round is not None
        self._round.is_over = True
        message = {"kind": "boundaries_over", "version": version, "saver": saver}
        return [(number, message) for number in sorted(self._keeping)]
