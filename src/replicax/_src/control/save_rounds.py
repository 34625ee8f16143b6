"""The controller's rules by which tasks agree after which step all of them save. No sockets, threads or clocks.

A preempted task sends a *signal*. A member *watches* while it counts its steps and can save. The rules:

- All members are told about a signal. A member that only watches for signals reports *told* and starts no round.
- A signal starts a *round* as soon as all members watch and no other round is active. The controller tells every member
  to *pause*: the member answers with the number of steps that it has started, and starts no further step. When all have
  answered, the controller tells them to *stop* after the largest of these numbers. Members below that number run up to
  it. All save before the next step.
- A round cannot deadlock. A pause only keeps a step from starting, and every member runs each step that any member has
  started. So a member inside a collective always gets out of it.
- After a *final* round all members end. After any other round they continue, and report that they have saved.
- Only the first signal counts. A final signal that arrives during a round that is not final starts the next round.
- When a member is gone or stops watching, the round is dropped: the pause ends, and waiting signals are discarded.
- Where the others continue without a member that is gone (``epochs.py``), the signal and the round stay: the members of
  the next epoch complete it. Nobody enters during a round, because a newcomer could begin a step before it hears of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    def forget(self, number: int) -> None:
        self.started.pop(number, None)
        self.saved.discard(number)


@final
class SaveRounds:
    """The rounds of a cluster.

    Args:
      num_members: The number of tasks. All must watch before a round starts.
    """

    def __init__(self, num_members: int):
        self._members = set(range(num_members))
        self._watching: set[int] = set()
        self._round: _Round | None = None
        self._signaled: bool | None = None  # is_final of the signal that waits for a round; None: none waits
        self._num_rounds = 0

    @property
    def is_active(self) -> bool:
        """True during a round."""
        return self._round is not None

    def receive(self, number: int, message: Message) -> list[tuple[int, Message]]:
        """Takes a message of a kind in ``KINDS``. Returns the messages to send."""
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
        """Notes that a member is gone, or no longer watches. Returns the messages to send."""
        self._watching.discard(number)
        self._signaled, ended, self._round = None, self._round, None
        if ended is None or ended.is_stopping:
            return []
        return [(n, {"kind": "resume", "round": ended.number}) for n in sorted(self._watching)]

    def forget(self, number: int) -> None:
        """Notes that a member is gone, and that the others will continue without it."""
        self._watching.discard(number)
        if self._round is not None:
            self._round.forget(number)

    def continue_with(self, members: Iterable[int]) -> list[tuple[int, Message]]:
        """Notes that these members continue. Returns the messages to send."""
        self._members = set(members)
        outbox = self._stopped()
        self._end()
        return [*outbox, *self._begun()]

    def _is_current(self, message: Message) -> bool:
        return self._round is not None and self._round.number == message["round"]

    def _signal(self, is_final: bool) -> list[tuple[int, Message]]:
        if self._round is not None and (self._round.is_final or not is_final):
            return []
        self._signaled = is_final or bool(self._signaled)
        return self._begun()

    def _begun(self) -> list[tuple[int, Message]]:
        """Starts the next round, if it can start. Returns the messages to send."""
        if self._signaled is None or self._round is not None or not self._members <= self._watching:
            return []
        self._num_rounds += 1
        self._round, self._signaled = _Round(self._num_rounds, self._signaled), None
        return self._to_all({"kind": "pause", "round": self._num_rounds})

    def _paused(self, number: int, started: int) -> list[tuple[int, Message]]:
        assert self._round is not None
        self._round.started[number] = started
        return self._stopped()

    def _stopped(self) -> list[tuple[int, Message]]:
        """Ends the pause, if all have answered. Returns the messages to send."""
        now = self._round
        if now is None or now.is_stopping or not self._members <= now.started.keys():
            return []
        now.is_stopping = True
        after = max(now.started[number] for number in self._members)
        return self._to_all({"kind": "stop", "round": now.number, "after": after, "is_final": now.is_final})

    def _saved(self, number: int) -> list[tuple[int, Message]]:
        assert self._round is not None
        self._round.saved.add(number)
        self._end()
        return self._begun()

    def _end(self) -> None:
        """Ends a round after which all continue, if all have saved."""
        now = self._round
        if now is not None and not now.is_final and self._members <= now.saved:
            self._round = None

    def _to_all(self, message: Message) -> list[tuple[int, Message]]:
        return [(number, message) for number in sorted(self._members)]
