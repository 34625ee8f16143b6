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
  program, and the count of programs before it (the *position*). All members must run the same programs in the same
  order, and wait in the same all-gathers and reads between them; ``sequence.py`` has the rules. If two members differ,
  it is a *mismatch*, and all are told.
- Each tick tells the members in an all-gather which members are missing, and which have a *twin*: another process that
  says that it is the same task, and was refused.
- A member is *stalled* if it has been in one program for ``stall_s`` while others have not reached that position. It is
  told which members it waits for; the interval doubles each time. After ``timeout_s`` the step fails, and all are told.
- Members are *stuck* if all have reached a program and it does not end: one of them calls back into Python or waits for
  a device or the network without end. Those that run a callback are named, or else all that are in the program. After
  half of ``stuck_s`` since the last one came all are told, and after ``stuck_s`` the step fails.
- A heartbeat may carry *figures* of the process. Each tick sends the figures of all members at one moment to the member
  that asked to *watch*; ``moments.py`` has the rule.
- When a member is preempted, ``save_rounds.py`` decides after which step all save. When a member raised, died or went
  silent, or a step failed because it took too long, ``boundary_saves.py`` decides which member saves the newest
  boundary.
- If the members *tolerate failures* (``min_workers``), those that live continue; ``epochs.py`` has the rules. A member
  that is gone ends the epoch, and no one else is told. Another process may join in its place, with the next
  *incarnation* of its task. An offer is of one epoch, and an all-gather completes over the members of that epoch: when
  the next one is formed, those that wait offer again. A silent member is told that it was given up, if it ever wakes.
  Only members of the epoch are compared and can be stalled. The dead cannot, nor can newcomers, which run programs of
  their own.
- A member that enters at a version takes part since the next one; ``dates.py`` has the rules. An all-gather completes
  over the members that take part since its date. The member is *solo* and is not compared until it says that it has
  committed a step. If the others have waited ``timeout_s`` in their step for solo members alone, those are given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.control import boundary_saves
from replicax._src.control.agreed_sequence import AgreedSequence
from replicax._src.control.boundary_saves import BoundarySaves
from replicax._src.control.channel_member import QUIET_S, ChannelMember
from replicax._src.control.epochs import KINDS as KINDS_OF_EPOCHS
from replicax._src.control.epochs import EpochAgreement
from replicax._src.control.lags import Lags
from replicax._src.control.moments import Report, reports_of_one_moment
from replicax._src.control.save_rounds import KINDS, SaveRounds
from replicax._src.control.sequence import AllGather, different_programs, first_apart

Message = Mapping[str, Any]
Outbox = list[tuple[int, Message]]


@final
@dataclass(frozen=True)
class JoinRefusal:
    """The reason why a process may not join.

    Attributes:
      text: The reason in words.
      is_temporary: True if the process may join the next run, once that run's controller has started.
    """

    text: str
    is_temporary: bool = False


@final
class Controller:
    """The state of the channel, and its rules.

    Args:
      names: The names of the members, by number: ``"worker 0"``.
      silence_s: The seconds without a message after which a member counts as gone.
      stall_s: The seconds in one program after which a member counts as stalled.
      timeout_s: The longest time that a member may wait in one program for others to reach it.
      stuck_s: The longest time that a program may take which all have reached.
      save_s: The longest time in which members may save a boundary after a failure.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        silence_s: float = 60.0,
        stall_s: float = 60.0,
        timeout_s: float = 600.0,
        stuck_s: float = 1800.0,
        save_s: float = 600.0,
    ):
        self._members = [ChannelMember(name) for name in names]
        self._all = range(len(names))
        self._gone: set[int] = set()
        self._agreed = AgreedSequence(self._members)
        self._silence_s, self._stall_s = silence_s, stall_s
        self._timeout_s, self._stuck_s = timeout_s, stuck_s
        self._all_gathers: dict[str, AllGather] = {}
        self._saves = SaveRounds(len(names))
        self._boundaries = BoundarySaves(limit_s=save_s)
        self._is_failed = False
        self._watcher: int | None = None
        self._min_workers: int | None = None
        self._epochs: EpochAgreement | None = None

    @property
    def is_over(self) -> bool:
        """True if members have joined and all of them are gone."""
        known = [member for member in self._members if member.is_here]
        return bool(known) and all(member.gone for member in known)

    @property
    def is_broken(self) -> bool:
        """True if the run is ending, and no process may join: a member is gone without which the others cannot
        continue, or all have finished.
        """
        return self._epochs.has_ended if self._epochs is not None else bool(self._gone)

    @property
    def is_saving(self) -> bool:
        """True while members save a boundary after a failure, also members that count as gone."""
        return self._boundaries.is_active

    def is_silent(self, number: int) -> bool:
        """Returns True if a member counts as gone although its connection is still open."""
        return self._members[number].gone == "silent"

    @property
    def epoch(self) -> int:
        """The number of the epoch; 0 until the first one is formed. A process that joins later is a newcomer."""
        return 0 if self._epochs is None else self._epochs.number

    def incarnation(self, number: int) -> int:
        """Returns the number of processes that were this task before the present one."""
        return self._members[number].incarnation

    def join(self, number: int, now: float, min_workers: int | None = None) -> JoinRefusal | None:
        """Lets a member join.

        Args:
          number: Its task.
          now: The time.
          min_workers: If the live members continue after a failure: the fewest with which they do; see ``epochs.py``.
            The same in all members.

        Returns:
          The reason for a refusal; None if it has joined.
        """
        member = self._members[number]
        if member.is_present:
            self.note_twin(number)
            return JoinRefusal(
                f"another process is already {member.name}. Each task of the cluster is one process; give each its own index.",
                is_temporary=self.epoch > 0,  # it may have died without a word, and not count as gone yet
            )
        refusal = self._refusal_of_mode(member, min_workers)
        if refusal is not None:
            return refusal
        all_gone = [self._members[other] for other in sorted(self._gone)]
        failed = next((other for other in all_gone if other.gone == "failed"), None)
        if failed is not None and failed is not member:
            return JoinRefusal(f"{failed.name} {_HOW['failed']}: {failed.text}")
        gone = member if member.gone else next(iter(all_gone), None)
        if gone is not None and gone.gone is not None and not self._may_replace:
            return JoinRefusal(
                f"{gone.name} has been here before, and {_HOW[gone.gone]}. A job restarts as a whole: end the other "
                "tasks first.",
                is_temporary=True,
            )
        if member.gone:
            member = self._members[number] = ChannelMember(member.name, member.incarnation + 1)
            self._gone.discard(number)
        member.is_here, member.heard_at = True, now
        self._agreed.note(number)
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
        if member.is_here or self.epoch:
            return []
        member.text = text
        self._note_end(number, "failed")
        outbox = self._to_all({"kind": "gone", "member": number, "how": "failed", "text": text, "status": {}})
        return outbox if self._epochs is None else [*outbox, *self._epochs.lose(number, "failed")]

    def receive(self, number: int, message: Message, now: float, incarnation: int = 0) -> Outbox:
        """Takes a message of a member, from the process that joined as this incarnation."""
        member = self._members[number]
        if incarnation != member.incarnation:
            return []
        if message["kind"] in boundary_saves.KINDS:  # a member that gave up may still save
            member.heard_at = now
            return self._boundaries.receive(number, message)
        if member.gone:
            return []
        member.heard_at = now
        match message["kind"]:
            case "heartbeat":
                member.heartbeat(dict(message["status"]), now)
                if "figures" in message:
                    member.reports.append(message["figures"])
                return self._compare(number, now)
            case "watch":
                self._watcher = number
            case "offer":
                return self._offer(number, message, now)
            case "raised" | "left" | "gave_up" as how:
                member.heartbeat(dict(message["status"]), now)
                return self._compare(number, now) + self._lose(number, how, message.get("text", ""), now)
            case kind if kind in KINDS:
                outbox = self._saves.receive(number, message)
                self._note_save()
                return outbox
            case kind if kind in KINDS_OF_EPOCHS and self._epochs is not None:
                return self._follow_epochs(self._epochs.receive(number, message), now)
        return []

    def disconnect(self, number: int, now: float, incarnation: int = 0) -> Outbox:
        """Notes that a member's connection has ended, that of the process that joined as this incarnation."""
        if incarnation != self._members[number].incarnation:
            return []
        return self._boundaries.lose(number) + self._lose(number, "died", "", now)

    def tick(self, now: float) -> Outbox:
        """Advances the time. Call it about once a second."""
        outbox: Outbox = []
        for number, member in enumerate(self._members):
            if member.is_present:
                if now - member.heard_at > self._silence_s:
                    outbox += self._lose(number, "silent", f"{now - member.heard_at:.0f}", now)
                else:
                    outbox.append((number, {"kind": "pulse"}))
        twins = [number for number, member in enumerate(self._members) if member.has_twin]
        for key, gather in self._all_gathers.items():
            missing = {
                number: member.status_at(now) if member.is_here else None
                for number, member in self._participants_at(gather.date)
                if number not in gather.values
            }
            reminder = {"kind": "reminder", "key": key, "missing": _as_pairs(missing), "twins": twins}
            outbox += [(number, reminder) for number in gather.values]
        outbox += self._remind_of_reports(twins, now)
        lags, num_gone = self._lags(), len(self._gone)
        for number, member in self._participants:
            if len(self._gone) != num_gone:  # members that came too late were given up
                lags, num_gone = self._lags(), len(self._gone)
            if member.is_present:
                outbox += self._check_progress(number, lags, now)
        if self._watcher is not None:
            reports = reports_of_one_moment(
                [member.reports if member.is_present else () for member in self._members]
            )
            self._agreed.follow(self._numbers)
            tasks = [self._figures_of(number, report, now) for number, report in enumerate(reports)]
            outbox.append((self._watcher, {"kind": "figures", "tasks": tasks}))
        return outbox + self._boundaries.tick(now)

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _participants(self) -> list[tuple[int, ChannelMember]]:
        """The members that continue together."""
        return [(number, self._members[number]) for number in self._numbers]

    @property
    def _numbers(self) -> Sequence[int]:
        """The numbers of the members that continue together; another object after each change."""
        return self._all if self._epochs is None else self._epochs.members

    def _participants_at(self, date: int) -> list[tuple[int, ChannelMember]]:
        """Those that take part since a date, and complete its all-gathers."""
        return [(number, member) for number, member in self._participants if member.takes_part_since <= date]

    @property
    def _compared(self) -> list[tuple[int, ChannelMember]]:
        """Those that run the same programs."""
        return [(number, member) for number, member in self._participants if member.takes_part]

    @property
    def _may_replace(self) -> bool:
        """True if a process may join in the place of a member that is gone."""
        return self._epochs is not None and not self._epochs.has_ended

    def _refusal_of_mode(self, member: ChannelMember, min_workers: int | None) -> JoinRefusal | None:
        """Takes the mode of the first member. Returns the reason why a member of another mode may not join."""
        first = next((other for other in self._members if other.is_here), None)
        if first is None:
            self._min_workers = min_workers
            self._epochs = None if min_workers is None else EpochAgreement(len(self._members), min_workers)
        elif min_workers != self._min_workers:
            return JoinRefusal(
                f"{first.name} runs with {_mode(self._min_workers)}, and {member.name} with {_mode(min_workers)}. Give the "
                "strategy the same options in all tasks."
            )
        return None

    def _follow_epochs(self, outbox: Outbox, now: float) -> Outbox:
        """Applies a change of the epochs here. Returns its messages and those that follow from it."""
        for number, message in outbox:
            if message["kind"] == "given_up":
                self._note_end(number, "unreachable")
                self._saves.forget(number)
        ending = next((message for _, message in outbox if message["kind"] in ("over", "lost")), None)
        if ending is not None:  # a newcomer may not have reported yet
            told = {number for number, _ in outbox}
            return [*outbox, *((number, ending) for number, _ in self._to_all(ending) if number not in told)]
        form = next((message for _, message in outbox if message["kind"] == "form"), None)
        if form is None:
            return outbox
        for number in form["entering"]:
            self._members[number].enter(form["version"], now)
        self._all_gathers.clear()  # those that wait offer again
        for _, member in self._participants:
            member.next = None
        self._agreed.forget()
        outbox += self._saves.continue_with(number for number, _ in self._participants)
        self._note_save()
        return outbox

    def _note_save(self) -> None:
        """Keeps newcomers out while the members agree on a save."""
        if self._epochs is not None:
            self._epochs.is_closed = self._saves.is_active

    def _remind_of_reports(self, twins: list[int], now: float) -> Outbox:
        """Tells the members that have reported which reports the next epoch still needs."""
        awaited = [] if self._epochs is None else self._epochs.awaited
        if not awaited:
            return []
        missing = {
            number: self._members[number].status_at(now) if self._members[number].is_here else None
            for number in awaited
        }
        reminder = {"kind": "reminder", "key": "next epoch", "missing": _as_pairs(missing), "twins": twins}
        return [(n, reminder) for n, _ in self._participants if n not in missing]

    def _figures_of(self, number: int, report: Report, now: float) -> dict[str, Any]:
        """Returns the name and the state of a member, and its reported figures while it is present."""
        member = self._members[number]
        program = member.status.get("program")
        if not member.is_present:
            state = "awaited" if member.gone is None else "ended" if member.gone == "left" else "lost"
            return {"task": member.name, "state": state}
        if now - member.heard_at > QUIET_S:
            state = "silent"
        elif self._epochs is not None and not self._agreed.has(number):
            state = "entering"
        elif member.is_in_program and now - member.since >= self._stall_s:
            state = "stalled"
        else:
            state = "starting" if program is None else "running"
        function = program and program.partition(" ")[2]  # without its number
        return {**report, "task": member.name, "state": state, "function": function}

    def _offer(self, number: int, message: Message, now: float) -> Outbox:
        key, position, member = message["key"], message.get("position"), self._members[number]
        if self._epochs is not None and not self._epochs.takes_part(number, message.get("epoch")):
            return []
        since = message.get("since", 0)
        self._agreed.follow(self._numbers)
        if not self._agreed.has(number) or member.takes_part_since > since:
            return []
        if position is not None:
            member.heartbeat(dict(message["status"]), now)
            member.next, member.next_date = (position, message["purpose"]), since
            self._agreed.note(number)
            self._agreed.take_runs(number)
        gather = self._all_gathers.setdefault(key, AllGather({}, date=since))
        before = gather.position, gather.is_agreement
        if position is not None:
            gather.position, gather.is_agreement = position, "program" in message["purpose"]
        gather.offer(number, member, message["value"])
        if len(gather.values) < self._agreed.num_at(since):
            is_moved = before != (gather.position, gather.is_agreement)
            if is_moved and self._agreed.may_have_passed(gather):
                return self._compare_all_waits(now)
            return self._compare_waits(number, now)
        participants = self._participants_at(since)
        del self._all_gathers[key]
        if gather.position is not None:
            for _, member in participants:
                member.next = None
            self._agreed.forget()
        values = [gather.values[n] for n, _ in participants]
        if self._epochs is None:
            return self._to_all({"kind": "gathered", "key": key, "values": values})
        gathered = {"kind": "gathered", "key": key, "values": values, "members": [n for n, _ in participants]}
        return [(n, gathered) for n, _ in participants]

    def _lose(self, number: int, how: str, text: str, now: float) -> Outbox:
        member = self._members[number]
        if not member.is_present:
            return []
        self._note_end(number, how)
        if self._epochs is not None:
            self._saves.forget(number)
            given_up: Outbox = [(number, {"kind": "given_up"})] if how in ("silent", "late") else []
            return [*given_up, *self._follow_epochs(self._epochs.lose(number, how, text), now)]
        # First, so that a member freezes its boundary before it hears of the failure.
        silent = number if how == "silent" else None
        freezing = self._boundaries.begin(now, silent) if how in _FAILURES else []
        message = {
            "kind": "gone",
            "member": number,
            "how": how,
            "text": text,
            "status": member.status_at(now),
        }
        return [*freezing, *self._to_all(message), *self._saves.lose(number)]

    def _note_end(self, number: int, how: str) -> None:
        self._members[number].gone = how
        self._gone.add(number)
        self._agreed.note(number)

    def _to_all(self, message: Message) -> Outbox:
        return [(number, message) for number, member in enumerate(self._members) if member.is_present]

    def _lags(self) -> Lags:
        return Lags([(number, member) for number, member in self._participants if member.is_present])

    def _check_progress(self, number: int, lags: Lags, now: float) -> Outbox:
        """Returns messages about a member that waits in a program for others, or is stuck in it with them."""
        member = self._members[number]
        if not member.is_in_program or self._is_failed:
            return []
        behind, newcomers = lags.behind(member), lags.newcomers_behind(member)
        is_stuck = not behind
        if not is_stuck:
            member.behind_at = now
        limit_s, first_s = (
            (self._stuck_s, self._stuck_s / 2) if is_stuck else (self._timeout_s, self._stall_s)
        )
        # It is stuck from when the last member has come; until then it waits.
        waited_s = now - (max(member.since, member.behind_at) if is_stuck else member.since)
        waits_for_newcomers = bool(newcomers) and len(newcomers) == len(behind)
        if waits_for_newcomers:  # which have the whole time from when they entered
            waited_s = min(waited_s, *(now - other.entered_at for _, other in newcomers))
        if waited_s < first_s:
            member.warned_s = 0.0
        if waited_s < min(limit_s, max(first_s, 2 * member.warned_s)):
            return []
        named = lags.stuck_with(member) if is_stuck else behind
        message = {
            "waited_s": int(waited_s),
            "waiting": [number, member.status_at(now)],
            "named": [[n, other.status_at(now)] for n, other in named],
            "is_stuck": is_stuck,
            "limit_s": limit_s,
        }
        if waited_s >= limit_s and waits_for_newcomers:
            return [each for n, _ in newcomers for each in self._lose(n, "late", f"{waited_s:.0f}", now)]
        if waited_s >= limit_s:
            self._is_failed = True
            return self._boundaries.begin(now) + self._to_all({"kind": "timeout", **message})
        member.warned_s = waited_s
        return [(number, {"kind": "stalled", **message})]

    def _compare(self, number: int, now: float) -> Outbox:
        """Returns a mismatch if the member of the last heartbeat ran different programs than another, or has passed an
        agreement.
        """
        self._agreed.follow(self._numbers)
        self._agreed.note(number)
        if not self._agreed.is_compared(number):
            self._members[number].runs.clear()
            return []
        if self._agreed.may_differ(number):
            statuses = different_programs(number, self._compared)
            if statuses:
                return self._mismatch(statuses)
            self._agreed.join_runs()
        if self._agreed.count_heartbeat():
            self._agreed.drop()
        return self._compare_waits(number, now)

    def _compare_waits(self, number: int, now: float) -> Outbox:
        """Returns a mismatch if this member waits where another member has passed, or waits elsewhere; or the other way
        round.
        """
        may_be_apart = not self._is_failed and self._agreed.may_be_apart(number, self._all_gathers.values())
        return self._compare_all_waits(now) if may_be_apart else []

    def _compare_all_waits(self, now: float) -> Outbox:
        """Returns a mismatch if any member waits where another member has passed, or waits elsewhere."""
        apart = first_apart(self._members, self._compared, self._all_gathers.values())
        if apart is None:
            return []
        return self._mismatch({number: self._members[number].status_at(now) for number in apart})

    def _mismatch(self, statuses: Mapping[int, Any]) -> Outbox:
        if self._is_failed:
            return []
        self._is_failed = True
        return self._to_all({"kind": "mismatch", "statuses": _as_pairs(dict(sorted(statuses.items())))})


def _mode(min_workers: int | None) -> str:
    return "no fault tolerance" if min_workers is None else f"fault tolerance and min_workers={min_workers}"


_FAILURES = ("raised", "died", "silent")
_HOW = {
    "left": "has ended its program",
    "raised": "raised an error",
    "gave_up": "gave up waiting for the others",
    "died": "died",
    "silent": "went silent",
    "failed": "ended before all had joined",
    "unreachable": "could not be reached by others",
    "late": "did not come to its first step in time",
}


def _as_pairs(statuses: Mapping[int, Any]) -> list[list[Any]]:
    """Returns a mapping with numbers as keys in a form that JSON can hold."""
    return [[number, status] for number, status in statuses.items()]
