"""A member's rules in an epoch; ``epochs.py`` has the controller's. No sockets, threads or clocks.

The training thread owns an ``EpochMember``: it alone hands events to it, carries out the actions that it returns, in
their order, and commits. So no commit can follow the report that says which version this process has. The thread that
reads the control connection only queues messages for the owner, with one exception: on ``end`` it also closes the
connections of that epoch's world at once, which wakes the owner where it waits for a sum. ``end`` may come before the
owner has made that world, so that thread keeps the highest epoch that has ended, and a world compares when it is made.

- The owner takes queued messages before each step, and wherever it waits: for a sum, a batch, an all-gather, the
  others' end, a pause before a save. If it did not, all others would wait for its report. The wait for ``form`` is
  bounded, like every wait.
- The owner runs the rounds of a step while ``may_step``. It commits only after the sums of the *last* round, and then
  at once. If a sum does not come, or ``may_step`` becomes false, it drops what it has of the step, and begins at its
  first round when it may step again, with the same batch. Only the program after the last sums changes the state, so a
  failed step has destroyed nothing.
- It keeps the sums of all rounds of its last step, its own or those of a source, until it has those of the next one:
  ``Give`` sends them.
- All-gathers belong to epochs too: ``Offers`` has the rule.
- A member that has entered at a version is *solo* until it commits its first step. The *participants* are the others;
  the lowest of them is the chief. So the chief is the same in all members at one version.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

Message = Mapping[str, Any]
ENDINGS: Final = frozenset({"over", "lost", "given_up"})


class Data(enum.Enum):
    """The data that a source gives."""

    SUMS = "sums"  # of the step that led to the version
    STATE = "state"  # and these sums with their digest, because a newcomer may be the next source


@final
@dataclass(frozen=True)
class Send:
    """Send a message to the controller. To a report the owner first adds the fields that it has: ``digest``, a text
    that depends on the bits of the last sums; and ``address``, at which its peers reach it.
    """

    message: Message


@final
@dataclass(frozen=True)
class Begin:
    """Leave the world of the last epoch, and make the one of this epoch: connections between its members.

    Attributes:
      epoch: The number of the epoch.
      members: The numbers of its members.
      addresses: Their addresses, in this order.
      gone: For the log, each process that is gone since the last epoch: its number, the way in which it ended, a text.
      entering: The newcomers that enter with this epoch, and get the state.
      giver: The source, if some members need its data. It gives all of it before it exchanges.
    """

    epoch: int
    members: tuple[int, ...]
    addresses: tuple[str, ...]
    gone: tuple[tuple[int, str, str], ...]
    entering: tuple[int, ...] = ()
    giver: int | None = None


@final
@dataclass(frozen=True)
class Give:
    """Send data of this version to a member, which waits for it. No step can change the data meanwhile, because that
    needs a sum of the receiver. If the epoch ends first, stop giving: the next epoch may do without the receiver.
    """

    receiver: int
    data: Data
    version: int


@final
@dataclass(frozen=True)
class Await:
    """Wait for data of this version from the source, and call ``catch_up`` or ``fail``. After sums, run the own update
    first.
    """

    source: int
    data: Data
    version: int


@final
@dataclass(frozen=True)
class Stop:
    """End this process. It must not compute any more.

    Attributes:
      reason: ``"over"`` is the agreed end of the program. ``"lost"`` and ``"given_up"`` are sent by the controller, and
        ``"cut_off"`` means that the connection to it has ended. All but the first are errors: ``failures.lost_error``.
      message: The controller's message.
    """

    reason: str
    message: Message


Action = Send | Begin | Give | Await | Stop


class _Phase(enum.Enum):
    OUTSIDE = "outside"
    REPORTED = "reported"  # waits for the next epoch
    CATCHING_UP = "catching_up"
    STEPPING = "stepping"
    STOPPED = "stopped"


@final
class EpochMember:
    """The state of one process in the protocol.

    Attributes:
      number: The number of its task.
      version: The number of steps that it has committed. None until it has the state.
      epoch: The number of the epoch that it is in, or was in last.
      members: The numbers of that epoch's members, ascending.
      waiting: The tasks of newcomers that wait until a source is open.
      awaited_data: The data that it waits for; None if it waits for none, or not any more.
      participants: The members without those that are solo, ascending: they have committed a step since they entered,
        or began with all tasks. Any thread may read it.
      last_entry: The version at which a member entered last that has committed a step since; None if there is none. It
        is equal in all participants of one version.
    """

    def __init__(self, number: int):
        self.number = number
        self.version: int | None = None
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.participants: tuple[int, ...] = ()
        self.last_entry: int | None = None
        self.waiting: tuple[int, ...] = ()
        self._phase = _Phase.OUTSIDE
        self.awaited_data: Await | None = None
        self._ended = 0  # the highest epoch of which the end is known
        self._is_finished = False
        self._begun_at: int | None = None  # the version of the last epoch when it was formed

    @property
    def is_chief(self) -> bool:
        """True in the participant with the lowest number."""
        return self.participants[:1] == (self.number,)

    @property
    def is_solo(self) -> bool:
        """True in a newcomer until it has committed its first step."""
        return self.version is None or (bool(self.epoch) and self.number not in self.participants)

    @property
    def must_compare(self) -> bool:
        """True while the next step is the first one of a member, so that all compare what they run."""
        return self.participants != self.members

    @property
    def reference(self) -> int:
        """The member with which the others compare what they run: the lowest participant."""
        return (self.participants or self.members)[0]

    @property
    def may_step(self) -> bool:
        """True while it may compute a step, and commit it."""
        return self._phase is _Phase.STEPPING and not self._is_finished

    @property
    def has_stopped(self) -> bool:
        """True once the process must end."""
        return self._phase is _Phase.STOPPED

    # --- events of the program ----------------------------------------------------------------------

    def enter(self, version: int | None) -> list[Action]:
        """Asks to be in the next epoch.

        Args:
          version: The version with which all tasks begin; None for a newcomer.
        """
        if self.has_stopped:  # the run has ended before
            return []
        assert self._phase is _Phase.OUTSIDE
        self.version = version
        return self._report()

    def commit(self) -> None:
        """Notes that the step's update has run. Call it in the owner, right after the last sums are here."""
        assert self.may_step
        assert self.version is not None
        self._note_first_steps()
        self.version += 1
        self.participants = self.members

    def catch_up(self) -> list[Action]:
        """Notes that ``awaited_data`` is here, and that the update has run if it is sums. Call it right after the data
        has come, as ``commit``. If ``awaited_data`` is None, the data is too late, and changes nothing.
        """
        assert self.awaited_data is not None
        self.version, self.awaited_data = self.awaited_data.version, None
        return self._step()

    def fail(self, blamed: int | None = None) -> list[Action]:
        """Notes that a sum or other data of this epoch will not come.

        Args:
          blamed: The peer that did not answer in time, or could not be reached. None if a connection ended, because its
            peer may have closed it for the same reason.
        """
        return self._report(blamed=blamed) if self._is_inside else []

    def open(self) -> list[Action]:
        """Lets the newcomers enter. Call it in the chief, if some wait, where a newcomer may begin: after a step, with
        no part of a save or an all-gather done that the newcomer does not make too.
        """
        return self._report(is_open=True) if self.may_step else []

    def finish(self) -> list[Action]:
        """Notes that the program needs no more steps. Wait for ``Stop`` then, and serve the others until it comes."""
        self._is_finished = True
        return self._finished() if self._phase is _Phase.STEPPING else []

    # --- events of the control channel --------------------------------------------------------------

    def receive(self, message: Message) -> list[Action]:
        """Takes a message of the controller."""
        if self.has_stopped:
            return []
        match message["kind"]:
            case "form":
                return self._form(message)
            case "end":
                self._ended = max(self._ended, message["epoch"])
                return self._report() if self._is_inside and self._ended >= self.epoch else []
            case "waits":
                self.waiting = tuple(message["members"])
            case kind if kind in ENDINGS:
                return self._stop(kind, message)
        return []

    def disconnect(self) -> list[Action]:
        """Notes that the connection to the controller has ended: it has given this process up, or is gone."""
        return [] if self.has_stopped else self._stop("cut_off", {})

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _is_inside(self) -> bool:
        return self._phase in (_Phase.CATCHING_UP, _Phase.STEPPING)

    def _report(self, **more: Any) -> list[Action]:
        self._phase, self.awaited_data = _Phase.REPORTED, None
        return [Send({"kind": "report", "epoch": self.epoch, "version": self.version, **more})]

    def _form(self, message: Message) -> list[Action]:
        if message["epoch"] <= self.epoch:
            return []
        if self.number in message["behind"] and self._begun_at == self.version:
            self._note_first_steps()  # the source has committed a step with all members of the last epoch
        self._begun_at = message["version"]
        self.epoch, self.members = message["epoch"], tuple(message["members"])
        self.participants = tuple(number for number in self.members if number not in message["solo"])
        self.waiting = ()
        if self.epoch <= self._ended:
            return self._report()
        gone = tuple((number, how, text) for number, how, text in message["gone"])
        addresses, entering = tuple(message["addresses"]), tuple(message["entering"])
        source, version = message["source"], message["version"]
        data = dict.fromkeys(message["behind"], Data.SUMS) | dict.fromkeys(entering, Data.STATE)
        begin = Begin(self.epoch, self.members, addresses, gone, entering, source if data else None)
        if self.number in data:
            self._phase, self.awaited_data = _Phase.CATCHING_UP, Await(source, data[self.number], version)
            return [begin, self.awaited_data]
        gifts = [Give(n, each, version) for n, each in data.items() if source == self.number]
        return [begin, *gifts, *self._step()]

    def _note_first_steps(self) -> None:
        if self.must_compare:
            self.last_entry = self.version

    def _stop(self, reason: str, message: Message) -> list[Action]:
        self._phase, self.awaited_data = _Phase.STOPPED, None
        return [Stop(reason, message)]

    def _step(self) -> list[Action]:
        self._phase = _Phase.STEPPING
        return self._finished() if self._is_finished else []

    def _finished(self) -> list[Action]:
        return [Send({"kind": "finished", "epoch": self.epoch, "version": self.version})]


@final
class Offers:
    """The all-gathers that a process waits in. The control channel owns it, not the training thread.

    An all-gather completes in one epoch, over that epoch's members. The controller drops the offers of an epoch that
    has ended, so all live members have got the values before they hear of the end, or none has. Those that wait offer
    again when the next epoch is formed.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._waiting: dict[str, Message] = {}

    def offer(self, message: Message) -> Message:
        """Returns the offer to send now."""
        self._waiting[message["key"]] = message
        return {**message, "epoch": self._epoch}

    def gathered(self, key: str) -> None:
        """Notes that an all-gather has ended here: with its values, or because the wait was given up."""
        self._waiting.pop(key, None)

    def form(self, epoch: int) -> list[Message]:
        """Notes that an epoch is formed. Returns the offers to send."""
        self._epoch = epoch
        return [{**message, "epoch": epoch} for message in self._waiting.values()]
