"""The hub of the control channel, without sockets or clocks: what a member says goes in, what others are told comes out.

Every task of a cluster is a *member* of the channel, numbered as its process is. The rules:

- A member *joins* once, and is *gone* when it has left (an orderly end), raised, died (its connection ended without a
  word) or gone silent (no message for ``silence_s``). Who is gone stays gone: a job is restarted as a whole.
- A *gathering* is a key for which each member offers a value; when all have, each is told all values. It never
  completes once somebody is gone; whoever waits in it hears of that.
- Members *beat* once a second, with the number of the program that they run, and how many they have run before it
  (their *position*). All run the same programs in the same order. Two that are at one position with different programs,
  or one that waits for the others to agree on a new program while another has passed that position, do not: that is a
  *mismatch*, which all are told.
- Who waits in a gathering is told every ``reminder_s`` whom it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

Message = Mapping[str, Any]
Outbox = list[tuple[int, Message]]


@dataclass
class _Member:
    """What the hub knows of a task.

    Attributes:
      status: Of its last beat: ``position``, ``program`` (its name and number), ``doing``.
      gone: How it went, once it has.
    """

    name: str
    is_here: bool = False
    heard_at: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)
    gone: str | None = None


@dataclass
class _Gathering:
    values: dict[int, Any]
    position: int | None
    reminded_at: float


@final
class Hub:
    """The state of the channel.

    Args:
      names: Of the members, by number: ``"worker 0"``.
      silence_s: After how many seconds without a message a member counts as gone.
      reminder_s: How often those who wait are told for whom.
    """

    def __init__(self, names: Sequence[str], *, silence_s: float = 60.0, reminder_s: float = 1.0):
        self._members = [_Member(name) for name in names]
        self._silence_s, self._reminder_s = silence_s, reminder_s
        self._gatherings: dict[str, _Gathering] = {}
        self._has_mismatch = False

    @property
    def is_over(self) -> bool:
        """Whether somebody was here, and all who were are gone."""
        known = [member for member in self._members if member.is_here]
        return bool(known) and all(member.gone for member in known)

    def join(self, number: int, now: float) -> str | None:
        """A member connects.

        Returns:
          Why it may not, if so.
        """
        member = self._members[number]
        if member.is_here and not member.gone:
            return f"another process is {member.name} already. Each task of the cluster is one process; give each its own index."
        if member.gone:
            return (
                f"{member.name} has been here before, and {_HOW[member.gone]}. A job is started again as a whole: end the "
                "other tasks first."
            )
        member.is_here, member.heard_at = True, now
        return None

    def receive(self, number: int, message: Message, now: float) -> Outbox:
        """A member says something."""
        member = self._members[number]
        member.heard_at = now
        if member.gone:
            return []
        match message["kind"]:
            case "beat":
                member.status = dict(message["status"])
                return self._compared(number)
            case "offer":
                return self._offered(number, message["key"], message["value"], message.get("position"), now)
            case "raised":
                return self._go(number, "raised", message["text"])
            case "left":
                return self._go(number, "left", "")
        return []

    def disconnect(self, number: int) -> Outbox:
        """A member's connection has ended."""
        return self._go(number, "died", "")

    def tick(self, now: float) -> Outbox:
        """Time passes: call it about every second."""
        outbox: Outbox = []
        for number, member in enumerate(self._members):
            if member.is_here and not member.gone:
                if now - member.heard_at > self._silence_s:
                    outbox += self._go(number, "silent", f"{now - member.heard_at:.0f}")
                else:
                    outbox.append((number, {"kind": "pulse"}))
        for key, gathering in self._gatherings.items():
            if now - gathering.reminded_at >= self._reminder_s:
                gathering.reminded_at = now
                missing = [n for n in range(len(self._members)) if n not in gathering.values]
                statuses = {n: self._members[n].status for n in missing if self._members[n].is_here}
                reminder = {
                    "kind": "reminder",
                    "key": key,
                    "missing": missing,
                    "statuses": _as_pairs(statuses),
                }
                outbox += [(number, reminder) for number in gathering.values]
        return outbox

    # --- inside -------------------------------------------------------------------------------------

    def _offered(self, number: int, key: str, value: Any, position: int | None, now: float) -> Outbox:
        if position is not None:
            # Where it is, for people; it has not begun to run it.
            self._members[number].status["next"] = [position, value[1]]
        gathering = self._gatherings.setdefault(key, _Gathering({}, position, now))
        gathering.values[number] = value
        if len(gathering.values) < len(self._members):
            return self._passed(key, gathering)
        del self._gatherings[key]
        values = [gathering.values[n] for n in range(len(self._members))]
        return self._to_all({"kind": "gathered", "key": key, "values": values})

    def _go(self, number: int, how: str, text: str) -> Outbox:
        member = self._members[number]
        if member.gone or not member.is_here:
            return []
        member.gone = how
        message = {"kind": "gone", "member": number, "how": how, "text": text, "status": member.status}
        return self._to_all(message)

    def _to_all(self, message: Message) -> Outbox:
        here = (n for n, member in enumerate(self._members) if member.is_here and not member.gone)
        return [(number, message) for number in here]

    def _compared(self, number: int) -> Outbox:
        """Whether a member that has just beaten is where another is, with another program; or past an agreement."""
        status = self._members[number].status
        for other, member in enumerate(self._members):
            there = member.status
            is_same_place = other != number and there.get("position") == status.get("position") is not None
            if is_same_place and there.get("program") != status.get("program"):
                return self._mismatch(number, other)
        for key, gathering in self._gatherings.items():
            found = self._passed(key, gathering)
            if found:
                return found
        return []

    def _passed(self, key: str, gathering: _Gathering) -> Outbox:
        if gathering.position is None:
            return []
        for number, member in enumerate(self._members):
            is_past = member.status.get("position", -1) >= gathering.position
            if number not in gathering.values and member.is_here and not member.gone and is_past:
                return self._mismatch(next(iter(gathering.values)), number)
        return []

    def _mismatch(self, one: int, other: int) -> Outbox:
        if self._has_mismatch:
            return []
        self._has_mismatch = True
        pair = {n: self._members[n].status for n in sorted((one, other))}
        return self._to_all({"kind": "mismatch", "statuses": _as_pairs(pair)})


_HOW = {
    "left": "has ended its program",
    "raised": "raised an error",
    "died": "died",
    "silent": "went silent",
}


def _as_pairs(statuses: Mapping[int, Any]) -> list[list[Any]]:
    """A mapping with numbers as keys, as JSON has it."""
    return [[number, status] for number, status in statuses.items()]
