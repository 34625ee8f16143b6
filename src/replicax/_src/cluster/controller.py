"""The controller of the control channel: takes messages of members, returns messages to send. No sockets or clocks.

Every task of a cluster is a *member* of the channel, with the number of its process. The rules:

- A member *joins* once. It is *gone* when it left (an orderly end), raised, died (its connection ended without a
  message) or went silent (no message for ``silence_s``). A member that is gone stays gone, because a job restarts as a
  whole. From then on no process may join: it belongs to the next run, and is told to try again. A member that leaves or
  raises sends its status, as in a heartbeat. A member that leaves also sends the last program that it finished
  (``done``), because the others may continue up to that one.
- A member that *gave up* waited too long for others, or does not match them. It sends the reason, which names the task
  at fault; all others are told. Its own end is no reason to look for an early return.
- The launcher may report that a task *failed* before all had joined. Then no process may join, and all are told.
- In an *all-gather* each member offers a value for a key. When all have offered, each gets all values. An all-gather
  never completes once a member is gone; the members that wait in it are told.
- Members send a *heartbeat* once a second, and whenever they start a different program. It has the number of the
  program, and the count of programs before it (the *position*). The controller thus knows the program of each member at
  every position. All members must run the same programs in the same order. It is a *mismatch* if two members ran
  different programs at one position, or if one waits to agree on a program at a position that another has passed. All
  are told.
- Programs and the all-gathers that block the thread that runs them are one sequence. Such an all-gather has the
  position of the next program: between two programs all members wait in the same all-gathers, in the same order. It is
  a mismatch if a member waits in one, and another one waits in a different one at that position or has begun the
  program there. An all-gather of another thread (which reads ahead, or writes a checkpoint) has no position, and is not
  in the sequence. Nor are all-gathers and reads of a member that runs programs in several threads, except the agreement
  on a program. A member that is late is no mismatch.
- Batches that members read together are in the sequence too. A member that waits for a batch says after how many reads,
  and after which program. It is a mismatch if another member has gone on to the next program, or waits in an all-gather
  before it, without this read, or if it makes this read elsewhere.
- Each tick tells the members in an all-gather which members are missing, and which have a *twin*: another process that
  says that it is the same task, and was refused.
- A member is *stalled* if it has been in one program for ``stall_s`` while others have not reached that position. It is
  told which members it waits for; the interval doubles each time. After ``timeout_s`` the step fails, and all are told.
- Members are *stuck* if all have reached a program and it does not end: one of them calls back into Python or waits for
  a device or the network without end. Those that run a callback are named, or else all that are in the program. After
  half of ``stuck_s`` since the last one came all are told, and after ``stuck_s`` the step fails.
- A heartbeat may carry *figures* of the process. Each tick sends the figures of all members at one moment to the member
  that asked to *watch*; ``moments.py`` has the rule.
- When a member is preempted, ``save_rounds.py`` decides after which step all save.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from replicax._src.cluster.moments import NUM_KEPT, Report, of_one_moment
from replicax._src.cluster.save_rounds import KINDS, SaveRounds

Message = Mapping[str, Any]
Outbox = list[tuple[int, Message]]
_QUIET_S = 5.0


class _Run(NamedTuple):
    """A program, the position from which it has run, and the line of code there, if it is known."""

    position: int
    program: str
    at: str | None


Runs = list[_Run]


@final
@dataclass(frozen=True)
class Refusal:
    """The reason why a process may not join.

    Attributes:
      text: The reason in words.
      is_temporary: True if the process may join the next run, once that run's controller has started.
    """

    text: str
    is_temporary: bool = False


@dataclass
class _Member:
    """The state of one task.

    Attributes:
      status: The status of its last heartbeat: ``position``, ``program`` (name and number), ``doing``, and possibly
        ``at``, a line of code, and ``callback``, one that a program calls.
      since: The time at which it reached its position.
      behind_at: The last time at which others had not reached its position.
      warned_s: The time that it had waited there when it was last told for which members.
      next: If it waits in an all-gather of the sequence: the position, and the purpose or the name of the program to
        agree on; see ``failures.describe_status``.
      reads: The number of batches that it has read together with others, at least.
      reading: If it waits for a batch: the position before, the number of reads before, and the dataset.
      has_threads: True once it has run programs in several threads.
      runs: The programs that it has run. Those that were compared with all members are dropped.
      gone: The way in which it ended; None while it is present.
      text: Its ending in words, if it failed before it joined.
      reports: The figures of its last heartbeats, oldest first; see ``status/figures.py`` and ``moments.py``.
      has_twin: True once another process has said that it is this task.
    """

    name: str
    is_here: bool = False
    has_twin: bool = False
    heard_at: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)
    since: float = 0.0
    behind_at: float = 0.0
    warned_s: float = 0.0
    next: tuple[int, dict[str, str]] | None = None
    reads: int = 0
    reading: tuple[int, int, str] | None = None
    has_threads: bool = False
    runs: Runs = field(default_factory=list)
    gone: str | None = None
    text: str = ""
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

    def heartbeat(self, status: dict[str, Any], now: float) -> None:
        """Takes a status. An earlier position than the known one is stale and ignored."""
        position, program = status["position"], status["program"]
        if position < self.position:
            return
        self.reads = max(self.reads, status.pop("reads", 0))
        self.has_threads |= status.pop("has_threads", False)
        reading = status.get("reading")
        self.reading = None if reading is None else (reading[0], reading[1], reading[2])
        if (position, status["doing"]) != (self.position, self.status.get("doing")):
            self.since, self.warned_s = now, 0.0
        self.status = status
        if program is not None and (not self.runs or self.runs[-1].program != program):
            self.runs.append(_Run(position, program, status.get("at")))

    def told(self, now: float) -> dict[str, Any]:
        """Returns its status for messages to other members."""
        more: dict[str, Any] = {"for_s": int(now - self.since)} if self.status else {}
        if now - self.heard_at > _QUIET_S:
            more["silent_s"] = int(now - self.heard_at)
        if self.next is not None and self.next[0] > self.position:
            more["next"] = [self.next[0], self.next[1]]
        return {**self.status, **more}


@dataclass
class _AllGather:
    values: dict[int, Any]
    position: int | None = None
    is_agreement: bool = False


@final
class Controller:
    """The state of the channel, and its rules.

    Args:
      names: The names of the members, by number: ``"worker 0"``.
      silence_s: The seconds without a message after which a member counts as gone.
      stall_s: The seconds in one program after which a member counts as stalled.
      timeout_s: The longest time that a member may wait in one program for others to reach it.
      stuck_s: The longest time that a program may take which all have reached.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        silence_s: float = 60.0,
        stall_s: float = 60.0,
        timeout_s: float = 600.0,
        stuck_s: float = 1800.0,
    ):
        self._members = [_Member(name) for name in names]
        self._silence_s, self._stall_s = silence_s, stall_s
        self._timeout_s, self._stuck_s = timeout_s, stuck_s
        self._all_gathers: dict[str, _AllGather] = {}
        self._saves = SaveRounds(len(names))
        self._is_failed = False
        self._watcher: int | None = None

    @property
    def is_over(self) -> bool:
        """True if members have joined and all of them are gone."""
        known = [member for member in self._members if member.is_here]
        return bool(known) and all(member.gone for member in known)

    @property
    def is_broken(self) -> bool:
        """True if a member is gone. The run is then ending, and no process may join."""
        return any(member.gone for member in self._members)

    def is_silent(self, number: int) -> bool:
        """Returns True if a member counts as gone although its connection is still open."""
        return self._members[number].gone == "silent"

    def join(self, number: int, now: float) -> Refusal | None:
        """Lets a member join.

        Returns:
          The reason for a refusal; None if it has joined.
        """
        member = self._members[number]
        if member.is_present:
            self.note_twin(number)
            return Refusal(
                f"another process is already {member.name}. Each task of the cluster is one process; give each its own index."
            )
        failed = next((other for other in self._members if other.gone == "failed"), None)
        if failed is not None and failed is not member:
            return Refusal(f"{failed.name} {_HOW['failed']}: {failed.text}")
        gone = member if member.gone else next((other for other in self._members if other.gone), None)
        if gone is not None and gone.gone is not None:
            return Refusal(
                f"{gone.name} has been here before, and {_HOW[gone.gone]}. A job restarts as a whole: end the other "
                "tasks first.",
                is_temporary=True,
            )
        member.is_here, member.heard_at = True, now
        return None

    def note_twin(self, number: int) -> None:
        """Notes that another process says that it is this task too. A task may then be missing for this reason."""
        self._members[number].has_twin = True

    def fail(self, number: int, text: str) -> Outbox:
        """Notes that a task ended before it joined. Does nothing for a member: the end of its connection says more.

        Args:
          text: Its ending in words.
        """
        member = self._members[number]
        if member.is_here:
            return []
        member.gone, member.text = "failed", text
        return self._to_all({"kind": "gone", "member": number, "how": "failed", "text": text, "status": {}})

    def receive(self, number: int, message: Message, now: float) -> Outbox:
        """Takes a message of a member."""
        member = self._members[number]
        member.heard_at = now
        if member.gone:
            return []
        match message["kind"]:
            case "heartbeat":
                member.heartbeat(dict(message["status"]), now)
                if "figures" in message:
                    member.reports.append(message["figures"])
                return self._compared(number, now)
            case "watch":
                self._watcher = number
            case "offer":
                return self._offered(number, message, now)
            case "raised" | "left" | "gave_up" as how:
                member.heartbeat(dict(message["status"]), now)
                return self._compared(number, now) + self._go(number, how, message.get("text", ""), now)
            case kind if kind in KINDS:
                return self._saves.receive(number, message)
        return []

    def disconnect(self, number: int, now: float) -> Outbox:
        """Notes that a member's connection has ended."""
        return self._go(number, "died", "", now)

    def tick(self, now: float) -> Outbox:
        """Advances the time. Call it about once a second."""
        outbox: Outbox = []
        for number, member in enumerate(self._members):
            if member.is_present:
                if now - member.heard_at > self._silence_s:
                    outbox += self._go(number, "silent", f"{now - member.heard_at:.0f}", now)
                else:
                    outbox.append((number, {"kind": "pulse"}))
        twins = [number for number, member in enumerate(self._members) if member.has_twin]
        for key, gather in self._all_gathers.items():
            missing = {
                number: member.told(now) if member.is_here else None
                for number, member in enumerate(self._members)
                if number not in gather.values
            }
            reminder = {"kind": "reminder", "key": key, "missing": _as_pairs(missing), "twins": twins}
            outbox += [(number, reminder) for number in gather.values]
        for number, member in enumerate(self._members):
            if member.is_present:
                outbox += self._stalled(number, now)
        if self._watcher is not None:
            reports = of_one_moment([member.reports if member.is_present else () for member in self._members])
            tasks = [
                self._figures_of(member, report, now)
                for member, report in zip(self._members, reports, strict=True)
            ]
            outbox.append((self._watcher, {"kind": "figures", "tasks": tasks}))
        return outbox

    # --- inside -------------------------------------------------------------------------------------

    def _figures_of(self, member: _Member, report: Report, now: float) -> dict[str, Any]:
        """Returns the name and the state of a member, and its reported figures while it is present."""
        program = member.status.get("program")
        if not member.is_present:
            state = "awaited" if member.gone is None else "ended" if member.gone == "left" else "lost"
            return {"task": member.name, "state": state}
        if now - member.heard_at > _QUIET_S:
            state = "silent"
        elif member.is_in_program and now - member.since >= self._stall_s:
            state = "stalled"
        else:
            state = "starting" if program is None else "running"
        function = program and program.partition(" ")[2]  # without its number
        return {**report, "task": member.name, "state": state, "function": function}

    def _offered(self, number: int, message: Message, now: float) -> Outbox:
        key, position, member = message["key"], message.get("position"), self._members[number]
        if position is not None:
            member.heartbeat(dict(message["status"]), now)
            member.next = (position, message["purpose"])
        gather = self._all_gathers.setdefault(key, _AllGather({}))
        if position is not None:
            gather.position, gather.is_agreement = position, "program" in message["purpose"]
        gather.values[number] = message["value"]
        if len(gather.values) < len(self._members):
            return self._apart(now)
        del self._all_gathers[key]
        if gather.position is not None:
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
        """Returns messages about a member that waits in a program for others, or is stuck in it with them."""
        member = self._members[number]
        if not member.is_in_program or self._is_failed:
            return []
        present = [(n, other) for n, other in enumerate(self._members) if other.is_present]
        named = [(n, other) for n, other in present if other.position < member.position]
        is_stuck = not named
        if not is_stuck:
            member.behind_at = now
        else:
            inside = [(n, m) for n, m in present if m.is_in_program and m.position == member.position]
            named = [(n, other) for n, other in inside if "callback" in other.status] or inside
        limit_s, first_s = (
            (self._stuck_s, self._stuck_s / 2) if is_stuck else (self._timeout_s, self._stall_s)
        )
        # It is stuck from when the last member has come; until then it waits.
        waited_s = now - (max(member.since, member.behind_at) if is_stuck else member.since)
        message = {
            "waited_s": int(waited_s),
            "waiting": [number, member.told(now)],
            "named": [[n, other.told(now)] for n, other in named],
            "is_stuck": is_stuck,
            "limit_s": limit_s,
        }
        if waited_s >= limit_s:
            self._is_failed = True
            return self._to_all({"kind": "timeout", **message})
        if waited_s < first_s:
            member.warned_s = 0.0
        if waited_s < max(first_s, 2 * member.warned_s):
            return []
        member.warned_s = waited_s
        return [(number, {"kind": "stalled", **message})]

    def _compared(self, number: int, now: float) -> Outbox:
        """Returns a mismatch if the member of the last heartbeat ran different programs than another, or has passed an
        agreement.
        """
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
            while len(member.runs) > 1 and member.runs[1].position <= lowest:
                member.runs.pop(0)

    def _apart(self, now: float) -> Outbox:
        """Returns a mismatch if a member waits where another member has passed, or waits elsewhere."""
        for one, other in (*self._waiting_apart(), *self._reading_apart()):
            return self._mismatch({n: self._members[n].told(now) for n in (one, other)})
        return []

    def _waiting_apart(self) -> Iterator[tuple[int, int]]:
        """Yields members in an all-gather, with members that have reached its position without it."""
        for gather in self._all_gathers.values():
            has_threads = any(self._members[number].has_threads for number in gather.values)
            for number, member in enumerate(self._members):
                if not member.is_present or number in gather.values or gather.position is None:
                    continue
                if has_threads or member.has_threads:
                    has_reached = gather.is_agreement and member.reached_program >= gather.position
                else:
                    has_reached = member.reached >= gather.position
                if has_reached:
                    yield next(iter(gather.values)), number

    def _reading_apart(self) -> Iterator[tuple[int, int]]:
        """Yields members that read a batch, with members that go on without this read or make it elsewhere."""
        present = [
            (number, member)
            for number, member in enumerate(self._members)
            if member.is_present and not member.has_threads
        ]
        for number, member in present:
            if member.reading is None:
                continue
            position, num_reads, _ = member.reading
            for n, other in present:
                goes_on = other.reached > position and other.reads <= num_reads
                is_same_read = other.reading is not None and other.reading[1] == num_reads
                if goes_on or (is_same_read and other.reading != member.reading):
                    yield number, n

    def _mismatch(self, statuses: Mapping[int, Any]) -> Outbox:
        if self._is_failed:
            return []
        self._is_failed = True
        return self._to_all({"kind": "mismatch", "statuses": _as_pairs(dict(sorted(statuses.items())))})


_HOW = {
    "left": "has ended its program",
    "raised": "raised an error",
    "gave_up": "gave up waiting for the others",
    "died": "died",
    "silent": "went silent",
    "failed": "ended before all had joined",
}


def _first_difference(one: Runs, other: Runs, last: int) -> int | None:
    """Returns the first known position, up to ``last``, at which two members ran different programs."""
    if not one or not other:
        return None
    first = max(one[0].position, other[0].position)
    changes = sorted({run.position for run in (*one, *other) if first <= run.position <= last})
    return next((p for p in changes if _run_at(p, one).program != _run_at(p, other).program), None)


def _run_at(position: int, runs: Runs) -> _Run:
    return next(run for run in reversed(runs) if run.position <= position)


def _at(position: int, runs: Runs) -> dict[str, Any]:
    run = _run_at(position, runs)
    at = {} if run.at is None else {"at": run.at}
    return {"position": position, "program": run.program, "doing": "in", **at}


def _as_pairs(statuses: Mapping[int, Any]) -> list[list[Any]]:
    """Returns a mapping with numbers as keys in a form that JSON can hold."""
    return [[number, status] for number, status in statuses.items()]
