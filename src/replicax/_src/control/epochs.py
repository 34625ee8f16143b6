"""The controller's rules by which the live members continue after a failure. No sockets, threads or clocks.

``epoch_member.py`` has the rules of a member. An *epoch* is one world: a fixed list of members that sum together. The
number of replicas never changes: the live members *adopt* the replicas of the dead ones; see ``replicas_of``.

- An epoch ends in one way. A death, a sum that did not arrive, and a member that opens the world to a newcomer are the
  same event: the epoch *ends*. Each live member then reports its *version* once, which is the number of steps
  that it has committed, and commits nothing more in that epoch. When all have reported, the next epoch is *formed*.
- Epoch 0 is the start. It has all tasks, and no world. All report the version with which they begin, the same one. A
  death in it ends the run, because a start costs nothing to repeat.
- The versions of members that have the state differ by at most one: nobody gets the sums of a step before all have sent
  theirs, which they do after they committed the step before. The *source* has the highest version; of several, the
  lowest number. A member that is one step *behind* gets the sums of that step from the source, and runs its own update.
- A process that joins later is a *newcomer*: it has no state, whatever it reports, and is told nothing of epochs that
  it is not in. The members are told that it *waits*. It *enters* in the next epoch whose source says that it is *open*,
  which means that a newcomer may begin where the source is, and gets the whole state. If that epoch ends before it has
  the state, it is a newcomer again, because the source may no longer be open.
- A member that entered is *solo* at that version: its program is not yet where those of the others are. From the next
  version on it is like the others. A solo member is the source only if nobody else has the highest version.
- The run is *lost* if no live member has the state, if fewer than ``min_workers`` are left, or if two members differ
  where they must be equal. The live members never begin from scratch without being asked.
- If epoch after epoch ends without a new version, and nobody died or entered, members cannot reach each other. The
  member that most of them blame is *given up*, as if it had died; so is a newcomer that has entered several times
  without getting the state. Without anyone to blame the run is lost in the end.
- The end of the program is an agreement too. A member that has *finished* keeps its last sums, because others may need
  them, until all have finished the same version. Then the run is *over*, and all leave.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

Message = Mapping[str, Any]
Outbox = list[tuple[int, Message]]
KINDS: Final = frozenset({"report", "finished"})
"""The kinds of messages that members send. The controller sends ``end``, ``form``, ``waits``, ``over``, ``lost`` and
``given_up``."""

ALL_EPOCHS: Final = 2**62
"""An epoch after all others. With its end a process can be in no epoch any more."""

NUM_BLAMED: Final = 3
"""The number of epochs in a row without a new version after which a member that others cannot reach is given up, and
the number of times that a newcomer may enter without getting the state."""
NUM_VAIN: Final = 50
"""The number of epochs in a row without a new version after which the run is lost, if nobody is to blame."""


def replicas_of(num_replicas: int, members: Sequence[int]) -> dict[int, list[int]]:
    """Returns the replicas that each member computes.

    A member computes the replica with its own number. A replica of a task that is not there goes to the member with the
    fewest replicas; of several, to the one with the lowest number.

    >>> replicas_of(4, [0, 1, 3])
    {0: [0, 2], 1: [1], 3: [3]}
    """
    replicas = {number: [number] for number in members}
    for orphan in range(num_replicas):
        if orphan not in members:
            adopter = min(members, key=lambda number: (len(replicas[number]), number))
            replicas[adopter].append(orphan)
    return replicas


class _Phase(enum.Enum):
    RUNNING = "running"
    ENDING = "ending"  # reports are awaited
    OVER = "over"
    LOST = "lost"


@final
class EpochAgreement:
    """The epochs of a run.

    Args:
      num_tasks: The number of tasks, which is the number of replicas.
      min_workers: The fewest live members with which the run continues.

    Attributes:
      number: The number of the epoch, 0 at the start.
      members: The numbers of its live members, ascending. The first that is not solo is the chief.
      is_closed: True while no newcomer may enter, even if the source is open.
    """

    def __init__(self, num_tasks: int, min_workers: int = 1):
        self.number = 0
        self.members = tuple(range(num_tasks))
        self.is_closed = False
        self._min_workers = min_workers
        self._phase = _Phase.ENDING
        self._reports: dict[int, Message] = {}
        self._newcomers: dict[int, Message] = {}
        self._num_entered = Counter[int]()  # without getting the state
        self._entered_at: dict[int, int] = {}  # the version at which each member entered that did
        self._finished: dict[int, int] = {}  # versions
        self._gone: list[tuple[int, str, str]] = []  # since the last epoch was formed
        self._last_agreed = (-1, self.members)  # version and members
        self._num_vain = 0
        self._ending: Message = {}  # says that the run is over or lost

    @property
    def is_running(self) -> bool:
        """True from when an epoch is formed until it ends."""
        return self._phase is _Phase.RUNNING

    @property
    def has_ended(self) -> bool:
        """True once the run is over or lost. Then nobody may join."""
        return self._phase in (_Phase.OVER, _Phase.LOST)

    @property
    def awaited(self) -> list[int]:
        """The members whose reports the others wait for."""
        is_ending = self._phase is _Phase.ENDING
        return [number for number in self.members if number not in self._reports] if is_ending else []

    def is_solo(self, number: int, version: int) -> bool:
        """Returns True if a member takes no part yet in what has this date, because it entered then or later."""
        return self._entered_at.get(number, -1) >= version

    def takes_part(self, number: int, epoch: int | None) -> bool:
        """Returns True if a member may complete an all-gather that it offered in this epoch. In epoch 0, the start, all
        tasks complete it.
        """
        is_open = self.is_running or (not self.number and not self.has_ended)
        return is_open and epoch == self.number and number in self.members

    def receive(self, number: int, message: Message) -> Outbox:
        """Takes a message of a kind in ``KINDS``. Returns the messages to send."""
        if self.has_ended:  # a newcomer may not have heard of it
            return [(number, self._ending)] if message["kind"] == "report" else []
        if message["kind"] == "report" and number not in self.members:
            self._newcomers[number] = message
            return self._announce_newcomers()
        if message["epoch"] != self.number:
            return []
        if message["kind"] == "report":
            self._reports[number] = message
            return [*self._end(), *self._form()]
        if message["kind"] == "finished" and self.is_running:
            self._finished[number] = message["version"]
            return self._finish()
        return []

    def lose(self, number: int, how: str, text: str = "") -> Outbox:
        """Notes that a process is gone. Returns the messages to send.

        Args:
          number: The task of the process.
          how: The way in which it ended; see controller.py.
          text: More about it.
        """
        has_waited = self._newcomers.pop(number, None) is not None
        self._num_entered.pop(number, None)
        if self.has_ended:
            return []
        if number not in self.members:
            return self._tell_who_waits() if has_waited else []
        if not self.number:
            return self._lose_run("start", [number])
        self.members = tuple(member for member in self.members if member != number)
        self._reports.pop(number, None)
        self._gone.append((number, how, text))
        if not self.members:
            return self._lose_run("state")
        return [*self._end(), *self._form()]

    # --- inside -------------------------------------------------------------------------------------

    def _end(self) -> Outbox:
        if not self.is_running:
            return []
        self._phase = _Phase.ENDING
        return self._to_members({"kind": "end", "epoch": self.number})

    def _form(self) -> Outbox:
        """Forms the next epoch once all have reported."""
        if self._phase is not _Phase.ENDING or len(self._reports) < len(self.members):
            return []
        versions = {n: r["version"] for n, r in self._reports.items() if r["version"] is not None}
        if not versions:
            return self._lose_run("state")
        differing = self._differing(versions)
        if differing:
            return self._lose_run("differs", differing)
        newest = max(versions.values())
        self._note_progress(newest, versions)
        unreachable = self._unreachable()
        if unreachable is not None:
            return [(unreachable, {"kind": "given_up"}), *self.lose(unreachable, "unreachable")]
        if self._num_vain > NUM_VAIN:
            return self._lose_run("unreachable")
        holders = [number for number, version in versions.items() if version == newest]
        source = min(holders, key=lambda number: (self.is_solo(number, newest), number))
        self._newcomers |= {n: r for n, r in self._reports.items() if n not in versions}
        is_open = self._reports[source].get("is_open", False) and not self.is_closed
        entering = self._newcomers if is_open else {}
        reports = {n: self._reports[n] for n in versions} | entering
        if len(reports) < self._min_workers:
            return self._lose_run("few", num_left=len(reports), min_workers=self._min_workers)
        self._phase = _Phase.RUNNING
        self.number += 1
        self.members = tuple(sorted(reports))
        for number in entering:
            self._entered_at[number] = newest
        form = {
            "kind": "form",
            "epoch": self.number,
            "members": list(self.members),
            "version": newest,
            "source": source,
            "behind": sorted(number for number, version in versions.items() if version < newest),
            "entering": sorted(entering),
            "solo": [n for n in self.members if self.is_solo(n, newest)],
            "addresses": [reports[n].get("address", "") for n in self.members],
            "gone": [list(gone) for gone in self._gone],
        }
        self._reports, self._finished, self._gone = {}, {}, []
        self._num_entered.update(entering.keys())
        if entering:
            self._newcomers = {}
        return [*self._to_members(form), *self._announce_newcomers()]

    def _differing(self, versions: Mapping[int, int]) -> list[int]:
        """Returns two members whose versions, or whose digests of one version, cannot both be right; else nothing."""
        most = 1 if self.number else 0
        lowest, highest = min(versions, key=versions.__getitem__), max(versions, key=versions.__getitem__)
        if versions[highest] - versions[lowest] > most:
            return sorted([lowest, highest])
        first: dict[int, int] = {}  # the first member that reported a digest of a version
        for number, version in sorted(versions.items()):
            digest = self._reports[number].get("digest")
            if digest is not None:
                other = first.setdefault(version, number)
                if self._reports[other]["digest"] != digest:
                    return [other, number]
        return []

    def _note_progress(self, newest: int, versions: Mapping[int, int]) -> None:
        """Counts the entries without the state, and the epochs in a row without a new version."""
        for number in versions:
            self._num_entered.pop(number, None)  # it has the state
        is_vain = not self._gone and self._last_agreed == (newest, self.members)
        self._last_agreed = (newest, self.members)
        self._num_vain = self._num_vain + 1 if is_vain else 0

    def _unreachable(self) -> int | None:
        """Returns the member to give up. None if no member must be given up yet."""
        for number, num_entered in self._num_entered.items():
            if number in self.members and num_entered >= NUM_BLAMED:
                return number
        num_blames = Counter(report.get("blamed") for report in self._reports.values())
        blamed = [number for number in self.members if number in num_blames]
        if self._num_vain < NUM_BLAMED or not blamed:
            return None
        return max(blamed, key=lambda number: (num_blames[number], number))

    def _finish(self) -> Outbox:
        if len(self._finished) < len(self.members):
            return []
        versions = self._finished
        lowest, highest = min(versions, key=versions.__getitem__), max(versions, key=versions.__getitem__)
        if versions[lowest] != versions[highest]:
            return self._lose_run("differs", sorted([lowest, highest]))
        return self._leave(_Phase.OVER, {"kind": "over", "epoch": self.number})

    def _lose_run(self, reason: str, numbers: Sequence[int] = (), **figures: int) -> Outbox:
        at_fault = list(numbers) or [number for number, _, _ in self._gone]
        return self._leave(_Phase.LOST, {"kind": "lost", "reason": reason, "members": at_fault, **figures})

    def _leave(self, phase: _Phase, ending: Message) -> Outbox:
        self._phase, self._ending = phase, ending
        return [(number, ending) for number in (*self.members, *sorted(self._newcomers))]

    def _announce_newcomers(self) -> Outbox:
        """Tells the members which newcomers wait, if there are any."""
        return self._tell_who_waits() if self._newcomers else []

    def _tell_who_waits(self) -> Outbox:
        return self._to_members({"kind": "waits", "members": sorted(self._newcomers)})

    def _to_members(self, message: Message) -> Outbox:
        return [(number, message) for number in self.members]
