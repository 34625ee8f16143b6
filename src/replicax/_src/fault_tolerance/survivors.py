"""``Survivors``: the training thread of a process among others, which goes on after the death of some of them.

It owns the process's ``EpochMember``, whose rules are in ``control/epoch_member.py``, and carries out its actions:
reports, worlds of connections (``collectives/host_sums``), the sums of a step for a member that is one step behind, the
whole state for a replacement. All of it happens in this one thread, wherever it waits; the thread of the control
channel only ends worlds.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol, final

import numpy as np

from replicax._src.cluster.admission import DescribedArrays
from replicax._src.cluster.failures import ClusterFailureError, PeerFailureError, again, lost_error
from replicax._src.cluster.task_versions import check_versions, versions
from replicax._src.collectives.host_sums.errors import EpochEnded
from replicax._src.collectives.host_sums.members import Member
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.collectives.host_sums.world import World
from replicax._src.control.epoch_member import Action, Await, Begin, Data, EpochMember, Give, Send, Stop
from replicax._src.control.epochs import replicas_of
from replicax._src.fault_tolerance.first_step import FirstStep
from replicax._src.fault_tolerance.given_state import GivenState
from replicax._src.fault_tolerance.recovery import OpenRecovery
from replicax._src.fault_tolerance.step_counts import StepCounts
from replicax._src.fault_tolerance.stepped_program import CombineRound, RoundArrays, SteppedProgram
from replicax._src.fault_tolerance.values_of_chief import ValuesOfChief
from replicax._src.status.job import hand_status_over, take_status_over
from replicax._src.untrusted.strict_json import TextError
from replicax._src.vocabulary.errors import UnsupportedError

log = logging.getLogger("replicax")
_FIRST_LINE_S: Final = 60.0
"""The seconds of waiting after which the log names the awaited members. The interval doubles with each line."""
_FIRST_OF_COMPARISON: Final = 2**31
"""The number of the first exchange of a comparison in its step, after those of all rounds."""


class EpochChannel(Protocol):
    """The control channel, as this thread uses it.

    Attributes:
      is_newcomer: True if the others had begun when this process joined.
      standing: This process's member, by which all-gathers are dated.
      epoch_messages: The messages of the controller about epochs, in their order. None if the connection has ended.
      on_end: Called with an epoch that has ended, in the channel's thread.
      serve: Called in the thread that waits for an all-gather, when messages are queued.
    """

    is_newcomer: bool
    standing: Any
    epoch_messages: queue.SimpleQueue[Mapping[str, Any] | None]
    on_end: Callable[[int], None]
    serve: Callable[[], None] | None

    def wait_for_message(self, timeout_s: float) -> bool:
        """Waits until ``epoch_messages`` has one. Returns False if none comes in time.

        Raises:
          ClusterFailureError: The members cannot continue together, and no message is there.
        """
        ...

    def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the controller."""
        ...

    def report_error(self, text: str) -> None:
        """Tells the controller that this process ends with an error."""
        ...

    @property
    def missing_reports(self) -> str:
        """The tasks whose reports the next epoch needs, in words."""
        ...


class SurvivingPeers(Protocol):
    """The tasks of the cluster, as this thread uses them."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def number(self) -> int: ...

    @property
    def channel(self) -> Any: ...

    def state_for_newcomers(self) -> dict[str, Any]: ...

    def take_state(self, state: Any) -> None: ...


@final
class Survivors:
    """This process's part in a training that goes on after failures. The thread that makes it owns it.

    Args:
      peers: The tasks of the cluster, and the control channel.
      rendezvous: Connects the members of each epoch. This object closes it.
      num_replicas: The number of replicas, which is the number of tasks.
      timeout_s: The longest wait for other members: for an exchange, and for their reports after a failure.
    """

    def __init__(
        self,
        peers: SurvivingPeers,
        rendezvous: Rendezvous,
        num_replicas: int,
        timeout_s: float,
    ):
        self._peers, self._names, self._number = peers, peers.names, peers.number
        self._channel: EpochChannel = peers.channel
        self._rendezvous, self._num_replicas, self._timeout_s = rendezvous, num_replicas, timeout_s
        self._member = self._channel.standing = EpochMember(peers.number)
        self._owner = threading.get_ident()
        self._world: World | None = None
        self._holders = dict(
            enumerate(range(num_replicas))
        )  # at the last commit, or without an open recovery
        self._last_sums: Sequence[RoundArrays] = ()
        self._recovery: OpenRecovery | None = None
        self._step: SteppedProgram | None = None  # while `run` is in it
        self._outputs: tuple[Any] | None = None  # those of a step whose sums another member gave
        self._has_exchanged = False  # in this step
        self._target = 0  # the version to which it leads
        self._what = ""  # its purpose
        self._counts = StepCounts()
        self._failure: ClusterFailureError | None = None
        self._num_recoveries, self._num_replacements, self._recovery_s = 0, 0, None
        self._is_chief = False  # as the status of the job has it
        self._given: DescribedArrays | None = None  # while `admit` gives it
        self._taken: DescribedArrays | None = None  # until `enter` returns it

    # --- the life of the training thread --------------------------------------------------------------

    def start(self) -> None:
        """Enters the first epoch, together with all tasks. It blocks. A replacement of a dead task enters later, in
        ``enter``.

        Raises:
          ClusterFailureError: A task is gone, or did not come in time.
        """
        self._channel.on_end = lambda epoch: self._rendezvous.end(epoch, "the controller has ended it")
        self._channel.serve = self.serve
        if self._channel.is_newcomer:
            return
        self._do(self._member.enter(0))
        self._wait_to_step("to start")

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas that this process computes now."""
        held = replicas_of(self._num_replicas, self._member.members or range(self._num_replicas))
        return tuple(sorted(held[self._number]))

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the tasks that compute now."""
        return self._member.members

    def run(self, step: SteppedProgram, what: str) -> Any:
        """Runs a step, again from its first round until it is committed, and returns its outputs. It blocks.

        All members run the same steps in the same order. A step without rounds needs no others.

        Args:
          step: The step.
          what: The purpose, for messages: ``"to run train_step"``.

        Raises:
          ClusterFailureError: The members cannot continue together.
          ProgramMismatchError: Two members run different steps.
          StateMismatchError: This process is a replacement, and has other values than the others.
          UnsupportedError: Another thread runs steps, or this process is a replacement that has not entered.
        """
        self.serve()
        if not step.reductions:
            return step.update(())
        if self.is_newcomer:
            raise self._not_entered(what)
        self._step, self._outputs, self._has_exchanged = step, None, False
        self._target, self._what = self._version + 1, what
        try:
            return self._committed(step, what)
        except BaseException as error:
            if self._has_exchanged:
                self._leave(error)
            raise
        finally:
            self._step, self._outputs, self._has_exchanged = None, None, False

    def broadcast(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Returns the chief's arrays in all members, bit for bit. All call it, with the same shapes and dtypes.

        It is a step of its own: a chief that dies meanwhile is replaced by the next one. A replacement that has not
        entered gets its own arrays.
        """
        if self.is_newcomer:
            return [np.asarray(array) for array in arrays]
        return self.run(
            ValuesOfChief(arrays, lambda: self._member.is_chief), "to take the values of the chief"
        )

    def serve(self) -> None:
        """Handles what the controller has sent: reports, meets the others again, gives sums to one that is behind.

        Call it in the training thread, wherever that waits.

        Raises:
          ClusterFailureError: The members cannot continue together.
        """
        self._check_thread()
        if self._failure is not None:
            raise again(self._failure)
        while True:
            try:
                message = self._channel.epoch_messages.get_nowait()
            except queue.Empty:
                return
            try:
                self._handle(message)
            except BaseException as error:  # the member has noted actions that are not carried out
                self._leave(error)
                raise

    def finish(self) -> None:
        """Waits until all members have finished the same number of steps, and serves them meanwhile.

        Call it last, in any thread: it owns this object from then on.

        Raises:
          ClusterFailureError: The members cannot continue together, or not with this process, which has left a step
            with an error.
        """
        self._owner = threading.get_ident()
        try:
            if self._member.epoch:
                self.serve()
                self._do(self._member.finish())
                if not self._wait_until(
                    lambda: self._member.has_stopped, "at the end of the program", awaited="the others"
                ):
                    log.warning(
                        "%s has waited %g s at the end of the program for the others, and ends.",
                        self._name,
                        self._timeout_s,
                    )
        finally:
            self._rendezvous.close()

    # --- replacements: see `cluster/admission.py` -----------------------------------------------------

    @property
    def is_newcomer(self) -> bool:
        """True if this process is a replacement, and has not got the state of the others yet."""
        return self._channel.is_newcomer and self._member.version is None

    @property
    def is_asked(self) -> bool:
        """True if replacements wait, and this process is the chief. Serves queued messages first."""
        self.serve()
        return bool(self._member.waiting) and self._member.is_chief and self._member.may_step

    def admit(self, take: Callable[[], DescribedArrays]) -> None:
        """Lets the waiting replacements enter, between two steps of the program. Call it in the training thread of the
        chief. It blocks until this process may step again.

        Args:
          take: Returns the state of the program. It is called once, before the others are interrupted.

        Raises:
          ClusterFailureError: The members cannot continue together.
        """
        self._check_thread()
        what = f"to let the replacement of {self._named(self._member.waiting)} enter"
        self._given = take()
        try:
            self._note_end("a replacement was to enter", is_opening=True)
            self._do(self._member.open())
            self._wait_to_step(what)
        finally:
            self._given = None

    def enter(self) -> DescribedArrays:
        """Waits until the chief gives the state of the program, and returns it. Call it in the training thread of a
        replacement. It waits for as long as the others train.

        Raises:
          ClusterStartError: The others have other versions of JAX or Python.
          ClusterFailureError: The run is lost.
          SystemExit: The others have finished.
        """
        self._check_thread()
        assert self.is_newcomer
        self._do(self._member.enter(None))
        self._wait_until(
            lambda: self._taken is not None or self._member.has_stopped,
            "to take its replica back",
            awaited="the end of the others' next save, where a replacement enters",
            timeout_s=math.inf,
        )
        if self._taken is None:
            log.warning("The others have finished; this replacement of %s is not needed.", self._name)
            raise SystemExit(0)
        taken, self._taken = self._taken, None
        return taken

    def _not_entered(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"This process is a replacement of {self._name}, which has died. It needs the state of the others {what}, and gets it "
            "where the program restores its checkpoint: call manager.restore_or_initialize() of an rx.CheckpointManager "
            "before the first step, and manager.save() after each iteration; in fit, pass "
            "rx.keras.callbacks.CheckpointCallback."
        )

    # --- what it does, for others ---------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Returns the epoch, its members, the adopted replicas with their members, and figures of recoveries, as JSON.

        Any thread may call it.
        """
        members = self._member.members
        held = replicas_of(self._num_replicas, members) if members else {}
        adopted = {replica: n for n, replicas in held.items() for replica in replicas if replica != n}
        return {
            "epoch": self._member.epoch,
            "members": list(members),
            "adopted": {str(replica): n for replica, n in sorted(adopted.items())},
            **self._figures,
        }

    @property
    def _figures(self) -> dict[str, Any]:
        return {
            "num_recoveries": self._num_recoveries,
            "num_replacements": self._num_replacements,
            "recovery_s": self._recovery_s,
        }

    def _handle(self, message: Mapping[str, Any] | None) -> None:
        if message is not None and message["kind"] == "end" and message["epoch"] >= self._member.epoch:
            self._note_end("the controller has ended it")
        self._do(self._member.disconnect() if message is None else self._member.receive(message))

    # --- a step ---------------------------------------------------------------------------------------

    def _committed(self, step: SteppedProgram, what: str) -> Any:
        while True:
            self._wait_to_step(what)
            if self._outputs is not None:
                return self._outputs[0]
            world = self._world
            try:
                if self._member.must_compare:
                    self._compare(step, what)
                sums = step.sums(self.replicas, self._combine(step))
            except EpochEnded as ended:
                self._fail(ended)
                continue
            if self._world is not world or not self._member.may_step:  # it reported meanwhile
                continue
            self._member.commit()
            self._last_sums = sums  # before the update, in which this process may have to give them
            self._note_commit(step)
            return step.update(sums)

    def _compare(self, step: SteppedProgram, what: str) -> None:
        """Compares the step of replacements, for which it is the first one, with that of the others.

        Raises:
          ProgramMismatchError, StateMismatchError: This process is a replacement that differs.
          EpochEnded: Another one does.
        """
        member, digests = self._member, step.digests()
        reference = member.reference
        entered = [number for number in member.members if number not in member.participants]
        summary = digests.summary()
        table = np.zeros((len(self._names), len(summary)), np.uint64)
        table[self._number] = summary
        table = self._summed(table, 0).reshape(table.shape)
        first = FirstStep(self._names, what, reference, entered, table)
        if not first.differing:
            return
        details = None
        if first.has_details:
            own = digests.details()
            details = self._summed(own if self._number == reference else np.zeros_like(own), 1)
        error = first.error_of(self._number, digests, details)
        if error is not None:
            self._channel.report_error(f"{type(error).__name__}: {error}")
            raise error
        raise EpochEnded(member.epoch, first.reason)

    def _summed(self, own: np.ndarray, number: int) -> np.ndarray:
        """Returns the sum of an array of each member, in an exchange of the comparison."""
        world = self._world
        assert world is not None
        self._has_exchanged = True
        others = [np.zeros_like(own)] * (len(self.replicas) - 1)
        return world.all_reduce(
            "sum", [own, *others], step=self._version + 1, round=_FIRST_OF_COMPARISON + number
        )

    def _combine(self, step: SteppedProgram) -> CombineRound:
        world, version = self._world, self._version + 1
        assert world is not None
        starts = [0]
        for reductions in step.reductions:
            starts.append(starts[-1] + len(reductions))

        def combine(round_index: int, parts: Sequence[RoundArrays]) -> RoundArrays:
            # An all-gather inside of the step may have served the others.
            if not self._member.may_step:
                raise EpochEnded(world.epoch, "this process has left it")
            self._has_exchanged = True
            return [
                world.all_reduce(
                    reduction,
                    [arrays[at] for arrays in parts],
                    step=version,
                    round=starts[round_index] + at,
                    rows=step.num_rows or 0,
                )
                for at, reduction in enumerate(step.reductions[round_index])
            ]

        return combine

    def _leave(self, error: BaseException) -> None:
        """Notes that an error has ended something here in which the others need this process. They may commit the step,
        so this process cannot continue. It tells them at once, because it may end much later.
        """
        if self._failure is not None:
            return
        if isinstance(error, ClusterFailureError):
            self._failure = error
        else:
            place = "a step" if self._has_exchanged else "an agreement of the tasks"
            self._failure = PeerFailureError(
                f"{self._name} has left {place} with an error, and the others continue without it. End this process."
            )
        self._rendezvous.end(self._member.epoch, "this process has raised an error")
        if error is not self._failure:
            self._channel.report_error("".join(traceback.format_exception(error)))

    # --- the member's actions -------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        """Carries out actions. If the epoch ends meanwhile, the rest is void."""
        try:
            for action in actions:
                match action:
                    case Send(message):
                        self._send(message)
                    case Begin():
                        self._begin(action)
                    case Give(receiver, data, version):
                        self._give(receiver, data, version)
                    case Await(source, data, version):
                        self._take(source, data, version)
                    case Stop(reason, message):
                        self._stop(reason, message)
            if self._world is not None and any(isinstance(action, Give) for action in actions):
                self._world.end_gifts()
        except EpochEnded as ended:
            self._fail(ended)

    def _fail(self, ended: EpochEnded) -> None:
        if ended.epoch == self._member.epoch:
            self._note_end(ended.reason)
            self._do(self._member.fail(ended.blamed))

    def _send(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "report":
            digest = _digest(self._last_sums)
            message = {**message, "address": self._rendezvous.address, "digest": digest}
        self._channel.tell(message)

    def _begin(self, begin: Begin) -> None:
        if self.is_newcomer:  # also one that has entered before, and not got the state
            self._recovery = OpenRecovery(
                time.monotonic(), None, None, self._member.reference, is_opening=True
            )
        elif begin.epoch > 1:
            self._note_end("the controller has ended it")
        if self._recovery is not None:
            self._recovery.begin(begin)
        held = replicas_of(self._num_replicas, begin.members)
        members = [
            Member(number, self._names[number], address, tuple(sorted(held[number])))
            for number, address in zip(begin.members, begin.addresses, strict=True)
        ]
        self._world = self._rendezvous.meet(begin.epoch, members, self._number, self._timeout_s)
        self._world.giver = None if begin.giver == self._number else begin.giver
        self._follow_role()
        if self._recovery is not None and self._recovery.is_over_between_steps:
            self._note_recovery(None)

    def _give(self, receiver: int, data: Data, version: int) -> None:
        assert self._world is not None
        if data is Data.STATE:
            self._world.give(receiver, *self._state_at(version).packed())
            return
        content = {"version": version, "rounds": [len(arrays) for arrays in self._last_sums]}
        arrays = [array for of_round in self._last_sums for array in of_round]
        self._world.give(receiver, content, arrays)

    def _state_at(self, version: int) -> GivenState:
        if self._given is None or version != self._version:  # a change of the program may have begun since
            raise EpochEnded(self._member.epoch, "this process has left the boundary at which it was open")
        return GivenState(
            version,
            self._last_sums,
            {**self._figures, "steps": self._counts.as_json()},
            self._peers.state_for_newcomers(),
            versions(),
            *self._given,
        )

    def _take(self, source: int, data: Data, version: int) -> None:
        assert self._world is not None
        if data is Data.STATE:
            self._take_state(source, version)
        else:
            self._take_sums(source, version)

    def _take_state(self, source: int, version: int) -> None:
        """Takes the state of the training, as a replacement."""
        assert self._world is not None
        gift = self._world.take(source)
        try:
            given = GivenState.unpacked(gift.content, gift.arrays)
        except TextError as error:
            reason = f"{self._names[source]} gave something else than a state ({error})"
            raise EpochEnded(self._member.epoch, reason, source, source) from error
        check_versions([(self._names[source], given.versions), (self._name, versions())])
        if given.version != version:
            raise EpochEnded(
                self._member.epoch, f"{self._names[source]} gave the state of another step", source, source
            )
        self._last_sums, self._taken = given.sums, (given.content, given.arrays)
        self._num_recoveries, self._num_replacements, self._recovery_s = (
            given.figures[name] for name in ("num_recoveries", "num_replacements", "recovery_s")
        )
        self._counts.take(given.figures["steps"])
        self._peers.take_state(given.peers)
        self._holders = self._current_holders()
        self._do(self._member.catch_up())

    def _take_sums(self, source: int, version: int) -> None:
        """Takes the sums of the step that `run` is in, and runs the update."""
        assert self._world is not None
        step = self._step
        assert step is not None, "only a process that is inside of a step can be behind"
        assert version == self._version + 1
        gift, num_arrays = self._world.take(source), list(map(len, step.reductions))
        described = {"version": version, "rounds": num_arrays}
        if gift.content != described or len(gift.arrays) != sum(num_arrays):
            raise EpochEnded(
                self._member.epoch, f"{self._names[source]} gave the sums of another step", source, source
            )
        arrays = iter(gift.arrays)
        self._last_sums = [[next(arrays) for _ in range(number)] for number in num_arrays]
        self._outputs = (step.update(self._last_sums),)
        actions = self._member.catch_up()
        self._note_commit(step, source)
        self._do(actions)

    def _stop(self, reason: str, message: Mapping[str, Any]) -> None:
        self._rendezvous.close()
        if reason != "over":
            why = message["reason"] if reason == "lost" else reason
            self._failure = lost_error(self._names, self._number, why, message)
            raise self._failure

    # --- waiting --------------------------------------------------------------------------------------

    def _wait_to_step(self, what: str) -> None:
        if not self._wait_until(lambda: self._member.may_step or self._outputs is not None, what):
            self._give_up(what)

    def _wait_until(
        self,
        is_true: Callable[[], bool],
        what: str,
        awaited: str | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Serves until something is true. Returns False if it does not become true in time.

        Args:
          awaited: Those it waits for, in words; None for those whose reports the next epoch needs.
          timeout_s: The longest wait; None for the limit of all waits for other members.
        """
        started = time.monotonic()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        says_at = started + _FIRST_LINE_S
        while True:
            self.serve()
            if is_true():
                return True
            now = time.monotonic()
            if now - started >= limit_s:
                return False
            if now >= says_at:
                says_at = now + (now - started)
                log.warning(
                    "%s has been waiting %.0f s %s for %s.",
                    self._name,
                    now - started,
                    what,
                    awaited or self._channel.missing_reports,
                )
            self._channel.wait_for_message(min(says_at, started + limit_s) - now)

    def _give_up(self, what: str) -> NoReturn:
        self._failure = PeerFailureError(
            f"{self._name} waited {self._timeout_s:g} s {what} for {self._channel.missing_reports}. Each task must come back to "
            "replicax within this time: allow more with CommunicationOptions(timeout_seconds=...). End this process, and "
            "start the job again."
        )
        raise self._failure

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise UnsupportedError(
                "With fault tolerance, all steps run in the thread that made the strategy, and another thread asks for "
                "one. Call fit, evaluate and predict in that thread, or use save_on_failure=True instead of fault "
                "tolerance."
            )

    # --- what happened, for the log and statistics ----------------------------------------------------

    @property
    def _version(self) -> int:
        assert self._member.version is not None
        return self._member.version

    @property
    def _name(self) -> str:
        return self._names[self._number]

    def _named(self, numbers: Sequence[int]) -> str:
        return " and ".join(self._names[number] for number in numbers)

    def _current_holders(self) -> dict[int, int]:
        held = replicas_of(self._num_replicas, self._member.members)
        return {replica: n for n, replicas in held.items() for replica in replicas}

    def _note_end(self, reason: str, *, is_opening: bool = False) -> None:
        if self._recovery is None and self._member.epoch:
            is_in_step = self._has_exchanged and self._version < self._target
            step = self._counts.next(self._what) if is_in_step else None
            chief = self._member.reference
            self._recovery = OpenRecovery(
                time.monotonic(), step, self._counts.last, chief, is_opening=is_opening
            )
            self._recovery.reason = reason

    def _note_commit(self, step: SteppedProgram, source: int | None = None) -> None:
        self._counts.commit(self._what)
        if self._recovery is not None:
            self._note_recovery(step.num_rows, source)
        self._follow_role()  # a replacement with the lowest number becomes the chief with its first step

    def _follow_role(self) -> None:
        was_chief, self._is_chief = self._is_chief, self._member.is_chief
        if self._is_chief and not was_chief and self._member.epoch > 1:
            take_status_over()
        if was_chief and not self._is_chief:
            hand_status_over()

    def _note_recovery(self, num_rows: int | None, source: int | None = None) -> None:
        recovery, self._recovery = self._recovery, None
        assert recovery is not None
        before, self._holders = self._holders, self._current_holders()
        seconds = time.monotonic() - recovery.since
        step = self._counts.last or "the first step"
        lines = [
            recovery.describe_return(self._names, number, step, before, self._holders, seconds)
            for number in recovery.entered
        ]
        self._num_replacements += len(lines)
        if recovery.is_of_failure:
            self._num_recoveries, self._recovery_s = self._num_recoveries + 1, seconds
            held = {r: before[r] if n in recovery.entered else n for r, n in self._holders.items()}
            line = recovery.describe(self._names, before, held, num_rows, source, seconds)
            lines.insert(0, line)
        members = self._member.members
        if self._number == (recovery.chief if recovery.chief in members else self._member.reference):
            for line in lines:
                log.warning("%s", line)


def _digest(sums: Sequence[RoundArrays]) -> str | None:
    """Returns a text that depends on all bits of the sums; None if there are none."""
    if not sums:
        return None
    total = 0
    for arrays in sums:
        for array in arrays:
            total = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, total)
    return f"{total:08x}"
