"""The controller of the control channel, without sockets or clocks: what a member says goes in, what others are told
comes out.

Every task of a cluster is a *member* of the channel, numbered as its process is. The rules:

- A member *joins* once, and is *gone* when it has left (an orderly end), raised, died (its connection ended without a
  word) or gone silent (no message for ``silence_s``). Who is gone stays gone: a job is restarted as a whole. Once
  somebody is gone nobody joins; who comes then is of the next run, and is told to try again. Who leaves or raises says
  where it is, as in a heartbeat; who leaves also which program it has ended last (``done``), since the others go on up
  to that.
- The launcher may say that a task has *failed* before all had joined. Then nobody joins any more, and all are told.
- An *all-gather* is a key for which each member offers a value; when all have, each is told all values. It never
  completes once somebody is gone; whoever waits in it hears of that.
- Members *heartbeat* once a second, and when their program is another than before: with the number of the program that
  they run, and how many they have run before it (their *position*). So it is known what each has run at every position.
  All run the same programs in the same order. Two that have run different ones at a position, or one that waits for the
  others to agree on a program while another has passed that position, have not: that is a *mismatch*, which all are
  told.
- Before a program all wait in the same all-gathers: one that waits in another is a mismatch too.
- Who waits in an all-gather is told at each tick whom it waits for.
- Who has been in one program for ``stall_s``, while others have not come to that position, is *stalled*: it is told for
  whom it waits, then again after twice the time each. After ``timeout_s`` its step is over: all are told.
- Which step they all save after, when one is to be taken away, is agreed on in ``save_rounds.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from replicax._src.cluster.save_rounds import KINDS, SaveRounds

Message = Mapping[str, Any]
Outbox = list[tuple[int, Message]]
Runs = list[tuple[int, str]]
_QUIET_S = 5.0


@final
@dataclass(frozen=True)
class Refusal:
    """Why a process may not join.

    Attributes:
      text: For people.
      is_temporary: It may, once this run has ended and the next one's controller is there.
    """

    text: str
    is_temporary: bool = False


@dataclass
class _Member:
    """What the controller knows of a task.

    Attributes:
      status: Of its last heartbeat: ``position``, ``program`` (its name and number), ``doing``, perhaps ``at``, a line
        of code.
      since: When it came to where it is.
      warned_s: How long it had waited there when it was told for whom.
      next: The position and name of the program that it waits to agree on.
      runs: From which positions on it has run which programs. What has been compared with all is dropped.
      gone: How it went, once it has.
      text: How it ended, if it failed before it joined.
    """

    name: str
    is_here: bool = False
    heard_at: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)
    since: float = 0.0
    warned_s: float = 0.0
    next: tuple[int, str] | None = None
    runs: Runs = field(default_factory=list)
    gone: str | None = None
    text: str = ""

    @property
    def is_present(self) -> bool:
        return self.is_here and self.gone is None

    @property
    def position(self) -> int:
        return self.status.get("position", -1)

    def heartbeat(self, status: dict[str, Any], now: float) -> None:
        """It says where it is. What was sent before something that has come already is stale."""
        position, program = status["position"], status["program"]
        if position < self.position:
            return
        if (position, status["doing"]) != (self.position, self.status.get("doing")):
            self.since, self.warned_s = now, 0.0
        self.status = status
        if program is not None and (not self.runs or self.runs[-1][1] != program):
            self.runs.append((position, program))

    def told(self, now: float) -> dict[str, Any]:
        """Its status, as others are told it."""
        more: dict[str, Any] = {"for_s": int(now - self.since)} if self.status else {}
        if now - self.heard_at > _QUIET_S:
            more["silent_s"] = int(now - self.heard_at)
        if self.next is not None and self.next[0] > self.position:
            more["next"] = list(self.next)
        return {**self.status, **more}


@dataclass
class _AllGather:
    values: dict[int, Any]
    position: int | None


@final
class Controller:
    """The state of the channel.

    Args:
      names: Of the members, by number: ``"worker 0"``.
      silence_s: After how many seconds without a message a member counts as gone.
      stall_s: After how many seconds in a program it counts as a wait for those who have not come to it.
      timeout_s: How long that may last.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        silence_s: float = 60.0,
        stall_s: float = 60.0,
        timeout_s: float = 600.0,
    ):
        self._members = [_Member(name) for name in names]
        self._silence_s, self._stall_s, self._timeout_s = silence_s, stall_s, timeout_s
        self._all_gathers: dict[str, _AllGather] = {}
        self._saves = SaveRounds(len(names))
        self._is_failed = False

    @property
    def is_over(self) -> bool:
        """Whether somebody was here, and all who were are gone."""
        known = [member for member in self._members if member.is_here]
        return bool(known) and all(member.gone for member in known)

    @property
    def is_broken(self) -> bool:
        """Whether somebody is gone: this run is ending, and nobody joins it."""
        return any(member.gone for member in self._members)

    def is_silent(self, number: int) -> bool:
        """Whether a member has been given up without having ended its connection."""
        return self._members[number].gone == "silent"

    def join(self, number: int, now: float) -> Refusal | None:
        """A member connects.

        Returns:
          Why it may not, if so.
        """
        member = self._members[number]
        if member.is_present:
            return Refusal(
                f"another process is {member.name} already. Each task of the cluster is one process; give each its own index."
            )
        failed = next((other for other in self._members if other.gone == "failed"), None)
        if failed is not None and failed is not member:
            return Refusal(f"{failed.name} {_HOW['failed']}: {failed.text}")
        gone = member if member.gone else next((other for other in self._members if other.gone), None)
        if gone is not None and gone.gone is not None:
            return Refusal(
                f"{gone.name} has been here before, and {_HOW[gone.gone]}. A job is started again as a whole: end the other "
                "tasks first.",
                is_temporary=True,
            )
        member.is_here, member.heard_at = True, now
        return None

    def fail(self, number: int, text: str) -> Outbox:
        """A task that has not joined has ended, and will not come. Of one that has joined its connection says more.

        Args:
          text: How it ended.
        """
        member = self._members[number]
        if member.is_here:
            return []
        member.gone, member.text = "failed", text
        return self._to_all({"kind": "gone", "member": number, "how": "failed", "text": text, "status": {}})

    def receive(self, number: int, message: Message, now: float) -> Outbox:
        """A member says something."""
        member = self._members[number]
        member.heard_at = now
        if member.gone:
            return []
        match message["kind"]:
            case "heartbeat":
                member.heartbeat(dict(message["status"]), now)
                return self._compared(number, now)
            case "offer":
                return self._offered(number, message["key"], message["value"], message.get("position"), now)
            case "raised" | "left" as how:
                member.heartbeat(dict(message["status"]), now)
                return self._compared(number, now) + self._go(number, how, message.get("text", ""), now)
            case kind if kind in KINDS:
                return self._saves.receive(number, message)
        return []

    def disconnect(self, number: int, now: float) -> Outbox:
        """A member's connection has ended."""
        return self._go(number, "died", "", now)

    def tick(self, now: float) -> Outbox:
        """Time passes: call it about every second."""
        outbox: Outbox = []
        for number, member in enumerate(self._members):
            if member.is_present:
                if now - member.heard_at > self._silence_s:
                    outbox += self._go(number, "silent", f"{now - member.heard_at:.0f}", now)
                else:
                    outbox.append((number, {"kind": "pulse"}))
        for key, gather in self._all_gathers.items():
            missing = {
                number: member.told(now) if member.is_here else None
                for number, member in enumerate(self._members)
                if number not in gather.values
            }
            reminder = {"kind": "reminder", "key": key, "missing": _as_pairs(missing)}
            outbox += [(number, reminder) for number in gather.values]
        for number, member in enumerate(self._members):
            if member.is_present:
                outbox += self._stalled(number, now)
        return outbox

    # --- inside -------------------------------------------------------------------------------------

    def _offered(self, number: int, key: str, value: Any, position: int | None, now: float) -> Outbox:
        if position is not None:
            # Where it is, for people; it has not begun to run it.
            self._members[number].next = (position, value[1])
        gather = self._all_gathers.setdefault(key, _AllGather({}, position))
        gather.values[number] = value
        if len(gather.values) < len(self._members):
            return self._apart(now)
        del self._all_gathers[key]
        if position is not None:
            for member in self._members:
                member.next = None
        values = [gather.values[n] for n in range(len(self._members))]
        return self._to_all({"kind": "gathered", "key": key, "values": values})

    def _go(self, number: int, how: str, text: str, now: float) -> Outbox:
        member = self._members[number]
        if not member.is_present:
            return []
        member.gone = how
        message = {"kind": "gone", "member": number, "how": how, "text": text, "status": member.told(now)}
        return [*self._to_all(message), *self._saves.lose(number)]

    def _to_all(self, message: Message) -> Outbox:
        return [(number, message) for number, member in enumerate(self._members) if member.is_present]

    def _stalled(self, number: int, now: float) -> Outbox:
        """Whether a member waits in a program for others, and has to be told."""
        member = self._members[number]
        waited_s = now - member.since
        if (
            member.status.get("doing") != "in"
            or waited_s < min(self._stall_s, self._timeout_s)
            or self._is_failed
        ):
            return []
        late = {
            n: m.told(now)
            for n, m in enumerate(self._members)
            if m.is_present and m.position < member.position
        }
        if not late:
            return []
        message = {"waited_s": int(waited_s), "waiting": [number, member.told(now)], "late": _as_pairs(late)}
        if waited_s >= self._timeout_s:
            self._is_failed = True
            return self._to_all({"kind": "timeout", **message})
        if waited_s < max(self._stall_s, 2 * member.warned_s):
            return []
        member.warned_s = waited_s
        return [(number, {"kind": "stalled", "timeout_s": self._timeout_s, **message})]

    def _compared(self, number: int, now: float) -> Outbox:
        """Whether a member that has just beaten has run another program than another one, or is past an agreement."""
        member = self._members[number]
        for other, their in enumerate(self._members):
            last = min(member.position, their.position)
            position = _first_difference(member.runs, their.runs, last) if other != number else None
            if position is not None:
                pair = (number, member), (other, their)
                return self._mismatch({n: _at(position, m.runs) for n, m in pair})
        self._drop_compared()
        return self._apart(now)

    def _drop_compared(self) -> None:
        lowest = min((m.position for m in self._members if m.is_present), default=-1)
        for member in self._members:
            while len(member.runs) > 1 and member.runs[1][0] <= lowest:
                member.runs.pop(0)

    def _apart(self, now: float) -> Outbox:
        """Whether some wait in an all-gather before a program that another one has passed, or waits elsewhere for."""
        for gather in self._all_gathers.values():
            for number, member in enumerate(self._members):
                if number in gather.values or not member.is_present or gather.position is None:
                    continue
                is_elsewhere = member.next is not None and member.next[0] == gather.position
                if is_elsewhere or member.position >= gather.position:
                    pair = next(iter(gather.values)), number
                    return self._mismatch({n: self._members[n].told(now) for n in pair})
        return []

    def _mismatch(self, statuses: Mapping[int, Any]) -> Outbox:
        if self._is_failed:
            return []
        self._is_failed = True
        return self._to_all({"kind": "mismatch", "statuses": _as_pairs(dict(sorted(statuses.items())))})


_HOW = {
    "left": "has ended its program",
    "raised": "raised an error",
    "died": "died",
    "silent": "went silent",
    "failed": "ended before all had joined",
}


def _first_difference(one: Runs, other: Runs, last: int) -> int | None:
    """The first position, up to ``last``, at which two members have run different programs, as far as they are
    known.
    """
    if not one or not other:
        return None
    first = max(one[0][0], other[0][0])
    changes = sorted({start for start, _ in (*one, *other) if first <= start <= last})
    return next((p for p in changes if _program_at(p, one) != _program_at(p, other)), None)


def _program_at(position: int, runs: Runs) -> str:
    return next(program for start, program in reversed(runs) if start <= position)


def _at(position: int, runs: Runs) -> dict[str, Any]:
    return {"position": position, "program": _program_at(position, runs), "doing": "in"}


def _as_pairs(statuses: Mapping[int, Any]) -> list[list[Any]]:
    """A mapping with numbers as keys, as JSON has it."""
    return [[number, status] for number, status in statuses.items()]
