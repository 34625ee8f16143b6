"""How tasks agree after which step all of them save, for the controller: without sockets, threads or clocks.

A task that is to be taken away gives *notice*. A member *watches* while it counts its steps and can save. The rules:

- Of a notice all are told. From who only looks whether there are any (*told*) that is all.
- A notice begins a *round* as soon as all members watch and no other round is on. Every member is told to *hold*: it
  says how many steps it has begun, and begins none until it hears more. When all have said so, all are told to *stop*
  after the largest of these numbers: who is below it runs up to it, and everybody saves before the step that follows.
- That cannot wait for itself: a hold keeps a step only from beginning, and a step that any member has begun is one that
  all others run too. So whoever is inside of a collective gets out of it.
- A round is *final*, and all end after having saved; or it is not: then they go on, and say that they have saved.
- Of several notices the first counts. A final one outlives a round that is not final: its own round comes next.
- When a member goes, or no longer watches, there is nothing to agree on: a hold ends, and what was noticed is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

Message = Mapping[str, Any]
KINDS: Final = frozenset({"watching", "closed", "signal", "told", "paused", "saved"})


@dataclass
class _Round:
    number: int
    is_final: bool
    started: dict[int, int] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)
    is_stopping: bool = False


@final
class SaveRounds:
    """The rounds of a cluster.

    Args:
      num_members: How many tasks there are. All have to watch before a round begins.
    """

    def __init__(self, num_members: int):
        self._num_members = num_members
        self._watching: set[int] = set()
        self._round: _Round | None = None
        self._signaled: bool | None = None  # is_final of the signal that waits for a round; None: none waits
        self._num_rounds = 0

    def receive(self, number: int, message: Message) -> list[tuple[int, Message]]:
        """A member says something of a kind in ``KINDS``; returns who is to be told what."""
        match message["kind"]:
            case "watching":
                self._watching.add(number)
                return self._begun()
            case "closed":
                return self.lose(number)
            case "signal":
                told = {"kind": "preempted", "member": number, "text": message["text"]}
                return [*self._to_all(told), *self._signal(message["is_final"])]
            case "told":
                return self._to_all({"kind": "preempted", "member": number, "text": message["text"]})
            case "paused" if self._is_current(message):
                return self._paused(number, message["started"])
            case "saved" if self._is_current(message):
                return self._saved(number)
        return []

    def lose(self, number: int) -> list[tuple[int, Message]]:
        """A member is gone, or no longer watches."""
        self._watching.discard(number)
        self._signaled, ended, self._round = None, self._round, None
        if ended is None or ended.is_stopping:
            return []
        return [(n, {"kind": "resume", "round": ended.number}) for n in sorted(self._watching)]

    def _is_current(self, message: Message) -> bool:
        return self._round is not None and self._round.number == message["round"]

    def _signal(self, is_final: bool) -> list[tuple[int, Message]]:
        if self._round is not None and (self._round.is_final or not is_final):
            return []
        self._signaled = is_final or bool(self._signaled)
        return self._begun()

    def _begun(self) -> list[tuple[int, Message]]:
        """The next round, if it can begin."""
        if self._signaled is None or self._round is not None or len(self._watching) < self._num_members:
            return []
        self._num_rounds += 1
        self._round, self._signaled = _Round(self._num_rounds, self._signaled), None
        return self._to_all({"kind": "pause", "round": self._num_rounds})

    def _paused(self, number: int, started: int) -> list[tuple[int, Message]]:
        now = self._round
        assert now is not None
        now.started[number] = started
        if now.is_stopping or len(now.started) < self._num_members:
            return []
        now.is_stopping = True
        after = max(now.started.values())
        return self._to_all({"kind": "stop", "round": now.number, "after": after, "is_final": now.is_final})

    def _saved(self, number: int) -> list[tuple[int, Message]]:
        now = self._round
        assert now is not None
        now.saved.add(number)
        if now.is_final or len(now.saved) < self._num_members:
            return []
        self._round = None
        return self._begun()

    def _to_all(self, message: Message) -> list[tuple[int, Message]]:
        return [(number, message) for number in range(self._num_members)]
