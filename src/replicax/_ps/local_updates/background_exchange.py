"""``BackgroundExchange``: carries out a group's rules in threads beside its training. No transport.

One thread owns the rules and the values. The thread that trains, and those that ask servers, hand it events; they read
what it has published last. It never waits for a server, so ``boundary`` does not either.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

from replicax._ps.client.request_threads import RequestThreads
from replicax._ps.local_updates import exchange_actions as actions
from replicax._ps.local_updates.fragment_programs import FragmentPrograms, state_of, stop_mark
from replicax._ps.local_updates.fragment_rules import ExchangeOptions
from replicax._ps.local_updates.group_status import group_status
from replicax._ps.local_updates.int8_blocks import encoded
from replicax._ps.local_updates.member_rules import MemberRules
from replicax._ps.local_updates.owner_thread import OwnerThread
from replicax._ps.local_updates.replay_file import GroupCall, ReplayWriter, checksum_of
from replicax._ps.local_updates.round_state import MemberState, RoundState
from replicax._ps.local_updates.state_values import StateValues
from replicax._ps.local_updates.stored_position import StoredPosition
from replicax._ps.local_updates.unmerged_progress import Rebase, UnmergedProgress, moved
from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.errors import (
    InvalidArgumentError,
    ReplicaxError,
    UnavailableError,
    UnknownProgramError,
    WaitTimeoutError,
)

log = logging.getLogger("replicax")

AskServer = Callable[[Message], Message]
"""Sends a request to a server, and returns its answer. It raises an error if none comes in time."""
_MAX_NUMBER: Final = 2**31 - 1
_WAITING_TICK_S: Final = 0.005
_END_S: Final = 15.0
_FIRST_SAID_S: Final = 10.0  # a wait at the end is logged then, and after twice the time each


@dataclass(frozen=True)
class ExchangedFragment:
    """A fragment, and how it is exchanged.

    Attributes:
      ask: Asks its server.
      programs: Its programs.
      rate, decay: The learning rate and the momentum of the outer optimizer.
    """

    ask: AskServer
    programs: FragmentPrograms
    rate: float = 1.0
    decay: float = 0.0


@final
@dataclass(frozen=True)
class _Published:
    """What threads read that do not own the exchange."""

    fetched: Sequence[int] = ()
    version: int = 0
    stops: bool = False
    outer: Mapping[int, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    error: BaseException | None = None


@final
class BackgroundExchange:
    """The exchange of one process. ``close`` ends its threads.

    Args:
      member: The number of the group.
      num_members: The number of groups.
      fragments: The fragments, in the same order in all groups.
      options: How groups exchange.
      tick_s: The seconds between two looks at the servers.
      place: Puts outer parameters of a fragment where the group has them, in a thread of the exchange.
      move: ``moved``, or a compiled program that does the same.
      log_of: Makes the log for a replay, given the number that stands for this process; None for no log.
    """

    def __init__(
        self,
        member: int,
        num_members: int,
        fragments: Sequence[ExchangedFragment],
        options: ExchangeOptions,
        *,
        tick_s: float = 0.1,
        place: Callable[[int, np.ndarray], Any] = lambda _, outer: outer,
        move: Callable[[Any, Any, Any], Any] = moved,
        log_of: Callable[[int], ReplayWriter] | None = None,
    ):
        self._place, self._move = place, move
        self._member, self._fragments = member, fragments
        self._quorum = options.quorum
        self._owner = 1 + secrets.randbelow(_MAX_NUMBER)
        self._log = None if log_of is None else log_of(self._owner)
        self._claimed: dict[int, str] = {}  # the instance of which the log is
        self._checksums: dict[int, int] = {}  # of the outer parameters
        self._stop_marks: dict[int, int] = {}  # of the instances that have answered last
        self._sent: dict[int, tuple[int, int]] = {}  # the push that was sent last, and its checksum
        self._position = StoredPosition().encoded()  # of the group, at the boundary that it has reached
        self._position_of: dict[int, np.ndarray] = {}  # at the last push of each fragment
        self._stored: dict[int, StoredPosition] = {}  # at the last push of the process before
        # The birth and the checksum of what this process creates.
        self._created: dict[int, tuple[int, int]] = {}
        self._closed_before: dict[tuple[int, str], int] = {}  # the last version that was noted
        self._rules = MemberRules(member, num_members, len(fragments), self._owner, options, time.monotonic())
        self._values: list[Any] = []
        self._progress: list[UnmergedProgress[Any] | StateValues[Any]] = []
        self._outer: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._is_done = self._is_closed = self._has_said_slow = False
        self._counts = {"pushes": 0, "adoptions": 0, "lost_pushes": 0, "silent_servers": 0}
        self._threads = RequestThreads("replicax local updates")
        self._owner_thread = OwnerThread("replicax local updates owner", self, tick_s)
        self._published = _Published()
        self.publish()

    def begin(self, values: Sequence[Any], timeout_s: float) -> list[Any]:
        """Waits for the outer parameters, and returns them. The first group creates them from its values.

        Args:
          values: A float32 [n] for each fragment.

        Raises:
          UnavailableError: No server has answered in time.
          InvalidArgumentError: The fragments of another group differ.
        """
        self._values = list(values)
        self._progress = [
            StateValues(each) if fragment.programs.is_state else UnmergedProgress(each)
            for fragment, each in zip(self._fragments, values, strict=True)
        ]
        self._owner_thread.start()  # it owns all from here on
        if not self._wait(lambda: self._rules.has_begun, timeout_s):
            raise UnavailableError(
                f"No outer parameters after {timeout_s:g} s: a server of this job does not answer. Start the servers, "
                "or correct their addresses."
            )
        return self._owner_thread.call(lambda: list(self._values))

    def note_call(self, steps: int, call: GroupCall) -> None:
        """Notes for a replay that the group exchanges now, after so many steps."""
        log = self._log
        if log is not None:
            self._owner_thread.post(lambda: log.called(steps, call))

    @property
    def position(self) -> StoredPosition:
        """The position of the group at its last push before this process began."""
        return self._owner_thread.call(
            lambda: max(self._stored.values(), key=lambda each: each.steps, default=StoredPosition())
        )

    def note_position(self, position: StoredPosition) -> None:
        """Notes the position that the next pushes have."""
        encoded = position.encoded()  # now: it may be wrong, and data may change what it returned
        self._owner_thread.post(lambda: setattr(self, "_position", encoded))

    def boundary(self, fragment: int, values: Any, tokens: int) -> Any:
        """Exchanges a fragment after the steps between two boundaries. Returns its values to go on with; never waits.

        If nothing was fetched, the values stay as they are, and the thread that owns the rules does the rest later.

        Args:
          fragment: Its number.
          values: Its values now, float32 [n].
          tokens: The rows since its last boundary.
        """
        adopts = fragment in self._checked().fetched

        def exchanged() -> Any:
            now = time.monotonic()
            return self._exchanged(
                fragment, values, lambda: self._rules.boundary(fragment, tokens, now, adopts=adopts)
            )

        if adopts:
            return self._owner_thread.call(exchanged)
        self._owner_thread.post(exchanged)
        return values

    def adopt(self, fragment: int, values: Any) -> Any:
        """Adopts what was fetched of a fragment, between two boundaries. Returns its values to go on with; never waits.

        Args:
          fragment: Its number.
          values: Its values now, float32 [n].
        """
        return self._owner_thread.call(
            lambda: self._exchanged(fragment, values, lambda: self._rules.adopt(fragment))
        )

    def rebase(self, fragment: int) -> Rebase[Any] | None:
        """Like ``adopt``, for values that the caller then applies it to. Returns None if nothing was fetched."""
        return self._owner_thread.call(lambda: self._rebased(fragment))

    def wait(self, timeout_s: float) -> None:
        """Waits until outer parameters were fetched that have all pushes of this group. Then adopt them.

        Raises:
          WaitTimeoutError: It took longer.
        """
        if not self._wait(lambda: self._rules.is_merged, timeout_s, _WAITING_TICK_S):
            raise WaitTimeoutError(
                f"The open round did not close within {timeout_s:g} s. Wait longer, or see which group is silent with "
                "`replicax top`, and which server in the log."
            )

    def outer(self) -> list[Any]:
        """Returns the outer parameters that were fetched last: a float32 [n] for each fragment."""
        published = self._checked()
        return [published.outer[fragment] for fragment in range(len(self._fragments))]

    @property
    def fetched(self) -> Sequence[int]:
        """The fragments of which outer parameters were fetched, and not adopted yet: see ``adopt``."""
        return self._published.fetched

    @property
    def version(self) -> int:
        """The number of rounds that all adopted outer parameters have."""
        return self._published.version

    def stop(self) -> None:
        """Asks all groups to end at their next boundary."""
        self._owner_thread.post(self._rules.stop)

    @property
    def stops(self) -> bool:
        """True if all groups shall end at their next boundary."""
        return self._published.stops

    def finish(self, timeout_s: float) -> list[Any]:
        """Pushes what is left, waits until all live groups have ended, and returns the outer parameters.

        All rows must have been in a boundary. Logs which groups it waits for.

        Raises:
          WaitTimeoutError: It took longer.
        """
        self._owner_thread.call(lambda: self._end_of_training())
        begin, say_after_s = time.monotonic(), min(_FIRST_SAID_S, timeout_s)
        while not self._wait(lambda: self._is_done, begin + say_after_s - time.monotonic()):
            awaited = self._owner_thread.call(self._awaited_at_end)
            if say_after_s >= timeout_s:
                raise WaitTimeoutError(
                    f"The last exchange took longer than {timeout_s:g} s. It waits for {awaited} Wait longer, or see in the "
                    "log whether a group or a server has failed."
                )
            log.warning(
                "Group %d has sent its last progress, and has waited %.0f s for %s",
                self._member,
                say_after_s,
                awaited,
            )
            say_after_s = min(2 * say_after_s, timeout_s)
        return self._owner_thread.call(lambda: list(self._values))

    @property
    def finished(self) -> Sequence[int]:
        """The groups that have finished, in order."""
        return self._owner_thread.call(lambda: self._rules.finished)

    def close(self) -> None:
        """Ends the threads, each after its request."""
        self._owner_thread.call(self._note_close)
        self._threads.close()
        self._threads.join(time.monotonic() + _END_S)
        self._owner_thread.end()
        if self._log is not None:
            self._log.close()

    def statistics(self) -> Mapping[str, int]:
        """Returns how often this process has pushed and adopted, what it lost, and how often a server fell silent."""
        return self._published.counts

    def status(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Returns what this group knows of all, for ``show_groups``.

        Args:
          counts: The statistics of ``LocalUpdates``.
        """

        def described() -> dict[str, Any]:
            now, rules = time.monotonic(), self._rules
            return group_status(
                self._member, self._quorum, rules.rounds, lambda each: rules.is_live(each, now), counts
            )

        return self._owner_thread.call(described)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float, tick_s: float | None = None) -> bool:
        came = self._owner_thread.wait(lambda: is_so() or self._error is not None, timeout_s, tick_s)
        self._checked()
        return came

    def _checked(self) -> _Published:
        published = self._published
        if published.error is not None:
            raise published.error
        return published

    # --- in the thread that owns the state ----------------------------------------------------------

    def tick(self) -> None:
        """Some time has passed. Private, as ``publish`` and ``fail``."""
        if not self._is_closed and not self._is_done:
            self._do(self._rules.tick(time.monotonic()))

    def publish(self) -> None:
        """Publishes what other threads read."""
        rules = self._rules
        self._published = _Published(
            tuple(rules.fetched),
            rules.version,
            rules.stops,
            dict(self._outer),
            dict(self._counts),
            self._error,
        )

    def fail(self, error: BaseException) -> None:
        """Keeps the first error, for the next call."""
        self._error = self._error or error

    def _exchanged(self, fragment: int, values: Any, event: Callable[[], Sequence[actions.Action]]) -> Any:
        self._checked()
        self._values[fragment] = values
        self._do(event())
        return self._values[fragment]

    def _rebased(self, fragment: int) -> Rebase[Any] | None:
        self._checked()
        rebase = None
        for action in self._rules.adopt(fragment):
            assert isinstance(action, actions.AdoptOuter)
            rebase = self._rebase(action)
        return rebase

    def _rebase(self, action: actions.AdoptOuter) -> Rebase[Any]:
        fragment, keeps, returns, drops = action.fragment, action.keeps, action.returns, action.drops
        if self._log is not None:
            checksum = self._checksums[fragment]
            self._log.adopted(fragment, action.version, checksum, keeps=keeps, returns=returns, drops=drops)
        self._counts["adoptions"] += 1
        return self._progress[fragment].rebase(
            self._outer[fragment], keeps=keeps, returns=returns, drops=drops
        )

    def _end_of_training(self) -> None:
        self._checked()
        self._do(self._rules.finish(time.monotonic()))

    def _awaited_at_end(self) -> str:
        awaited = self._rules.awaited(time.monotonic())
        if not awaited:
            return "an answer of the servers."
        return (
            f"group {', '.join(map(str, awaited))}, which may still train. A group that sends nothing for patience_s is no "
            "longer waited for."
        )

    def _note_close(self) -> None:
        self._is_closed = True

    def _do(self, some: Sequence[actions.Action]) -> None:
        for action in some:
            match action:
                case actions.TakeProgress(fragment, number):
                    self._progress[fragment].take(number, self._values[fragment])
                    self._position_of[fragment] = self._position
                    self._counts["pushes"] += 1
                    if self._log is not None:
                        self._log.taken(fragment, number, self._rules.tokens_of(fragment, number))
                case actions.AdoptOuter(fragment):
                    rebase = self._rebase(action)
                    self._values[fragment] = rebase.applied(self._values[fragment], self._move)
                case actions.LostPushes(fragment, first, last, is_refused):
                    self._counts["lost_pushes"] += last - first + 1
                    log.warning(_LOST[is_refused], self._member, first, last, fragment)
                case actions.ServerSilent(fragment):
                    self._counts["silent_servers"] += 1
                    log.warning(
                        "The server of fragment %d does not answer. Training goes on without it.", fragment
                    )
                case actions.ExchangeSlow(fragment, num_boundaries, period_s):
                    if not self._has_said_slow:
                        self._has_said_slow = True
                        log.warning(_SLOW, self._member, fragment, num_boundaries * period_s, period_s)
                case actions.SlotReplaced():
                    self.fail(InvalidArgumentError(_REPLACED.format(self._member)))
                case actions.ExchangeDone():
                    self._is_done = True
                case actions.NoteLanding(fragment, number, version):
                    if self._log is not None:
                        checksum = self._sent[fragment][1]
                        self._log.landed(fragment, number, version, checksum)
                case _ if not self._is_closed:
                    self._submit(action)

    def _submit(self, action: actions.Action) -> None:
        payload = self._payload(action)
        if not self._threads.call(lambda: self._carry_out(action, payload)):  # the system has no more threads
            self._owner_thread.post(lambda: self._answered(action, None, None, is_absent=False))

    def _payload(self, action: actions.Action) -> Any:
        """What a request sends of the state, as it is now."""
        match action:
            case actions.SendPush(fragment, number):
                values = self._progress[fragment].pushes[number]
                return values, self._position_of[fragment], self._stop_marks[fragment]
            case actions.ClaimSlot(fragment):
                return self._progress[fragment].start
        return None

    def _answered(
        self, action: Any, answer: Message | None, outer: tuple[Any, int] | None, *, is_absent: bool
    ) -> None:
        """Hands the outcome of a request to the rules.

        Args:
          action: The request.
          answer: The answer; None if there is none.
          outer: The outer parameters in it, where the group has them, and their checksum.
          is_absent: True if the server does not have the fragment.
        """
        fragment = action.fragment
        if answer is None:
            self._do(self._rules.failed(fragment, is_absent=is_absent))
            return
        instance: str = answer.header["versions"][0][0]
        mark = self._stop_marks[fragment] = stop_mark(instance)
        state = state_of(np.asarray(answer.arrays[0])).in_instance(mark)
        self._note_claimed(action, instance, state)
        if outer is not None:
            self._outer[fragment], self._checksums[fragment] = outer
            self._note_closed(fragment, instance, answer.arrays[2:])
        self._do(self._rules.answered(fragment, instance, state, time.monotonic()))

    def _note_claimed(self, action: Any, instance: str, state: RoundState) -> None:
        """Logs that this process has created a fragment, or has its slot in another instance of the server's store."""
        if self._log is None:
            return
        fragment = action.fragment
        if self._created.get(fragment, (None,))[0] == state.birth:
            self._log.created(fragment, self._created.pop(fragment)[1])
        me = state.members[self._member]
        if me.owner == self._owner and self._claimed.get(fragment) != instance:
            self._claimed[fragment] = instance
            before = action.expected if isinstance(action, actions.ClaimSlot) else MemberState()
            self._log.claimed(fragment, instance, me.pushed, state.birth, before)

    def _note_closed(self, fragment: int, instance: str, fetched: Sequence[Any]) -> None:
        """Logs the rounds that have closed since the last fetch."""
        if self._claimed.get(fragment) != instance:
            return
        for history in fetched:
            before = self._closed_before.get((fragment, instance), 0)
            rows = sorted(row for row in np.asarray(history).tolist() if row[0] > before)
            for row in rows:
                assert self._log is not None
                self._log.closed(fragment, row)
                self._closed_before[fragment, instance] = row[0]

    # --- in threads that ask servers ----------------------------------------------------------------

    def _carry_out(self, action: Any, payload: Any) -> None:
        """Carries out one request, and hands its outcome to the thread that owns the state."""
        post, answer, outer, is_absent = self._owner_thread.post, None, None, False
        try:
            answer = self._answer(action, payload)
            if isinstance(action, actions.FetchOuter):
                fetched = np.array(answer.arrays[1])
                checksum = 0 if self._log is None else checksum_of(fetched)
                outer = self._place(action.fragment, fetched), checksum
        except BaseException as error:
            answer, is_absent = None, isinstance(error, InvalidArgumentError)
            differs = is_absent and isinstance(action, actions.ClaimSlot)  # from the fragment of other groups
            if differs or not isinstance(error, ReplicaxError):  # raised at the next call
                failure = error
                post(lambda: self.fail(failure))
                return
            log.debug("The exchange of fragment %d failed: %s", action.fragment, error)
        post(lambda: self._answered(action, answer, outer, is_absent=is_absent))

    def _answer(self, action: actions.Action, payload: Any) -> Message:
        match action:
            case actions.ClaimSlot(fragment, expected):
                self._create(fragment, payload)
                programs = self._fragments[fragment].programs
                operands = programs.claim_operands(self._member, expected, self._owner)
                answer = self._step(fragment, programs.claim, operands, ("rounds", "positions"))
                stored = StoredPosition.decoded(np.asarray(answer.arrays[1])[self._member])
                self._owner_thread.post(lambda: self._stored.setdefault(fragment, stored))
                return answer
            case actions.SendPush(fragment, number, after, tokens, is_last, stops):
                programs = self._fragments[fragment].programs
                values, position, mark = payload
                values = np.asarray(values, np.float32)
                if self._log is not None:
                    sent = {fragment: (number, checksum_of(values))}
                    self._owner_thread.post(lambda: self._sent.update(sent))
                operands = programs.push_operands(
                    self._member, self._owner, number, after, tokens,
                    encoded(values) if programs.is_compressed else [values],
                    is_last=is_last, stops=mark if stops else 0, position=position,
                )  # fmt: skip
                return self._step(fragment, programs.push, operands)
            case actions.SendClose(fragment, version, quorum, is_flush):
                each = self._fragments[fragment]
                operands = each.programs.close_operands(
                    version, quorum, each.rate, each.decay, is_flush=is_flush
                )
                return self._step(fragment, each.programs.close, operands)
            case actions.FetchOuter(fragment):
                names = ("rounds", "theta") if self._log is None else ("rounds", "theta", "history")
                return self._step(fragment, None, [], names)
            case actions.ReadRound(fragment):
                return self._step(fragment, None, [])
        raise AssertionError(action)

    def _step(
        self,
        fragment: int,
        program: UpdateProgram | None,
        operands: Sequence[np.ndarray],
        names: Sequence[str] = ("rounds",),
    ) -> Message:
        """Runs a program, and reads shards."""
        each = self._fragments[fragment]
        shards = each.programs.shards
        pull = [[shards[name][0], None] for name in names]
        header = {"op": "step", "closure": None, "program": program and program.digest, "pull": pull}
        try:
            return each.ask(Message(header, list(operands)))
        except UnknownProgramError:
            assert program is not None
            send_program(each.ask, program)
            return each.ask(Message(header, list(operands)))

    def _create(self, fragment: int, payload: Any) -> None:
        """Creates the fragment if it is absent."""
        each = self._fragments[fragment]
        wanted = [[key, list(shape), dtype.name] for key, shape, dtype in each.programs.shards.values()]
        found = each.ask(Message({"op": "find", "keys": [key for key, _, _ in wanted]})).header["found"]
        if found:
            differing = next((pair for pair in zip(found, wanted) if pair[0] != pair[1]), None)
            if differing is None:
                return
            raise InvalidArgumentError(
                f"Group {self._member} has the shard {differing[1]}, and another group has created it as {differing[0]}. "
                "Give all groups the same parameters, number of groups and number of fragments."
            )
        theta, birth = np.asarray(payload, np.float32), 1 + secrets.randbelow(_MAX_NUMBER)
        if self._log is not None:
            created = {fragment: (birth, checksum_of(theta))}
            self._owner_thread.post(lambda: self._created.update(created))
        create_fragment(each, theta, birth)


def create_fragment(each: ExchangedFragment, theta: np.ndarray, birth: int) -> None:
    """Creates the shards of a fragment on its server, unless they are there.

    Args:
      each: The fragment.
      theta: The outer parameters, float32 [n].
      birth: A number that was not used before.
    """
    values = {"theta": theta, "rounds": each.programs.first_rounds(birth)}
    described: list[dict[str, Any]] = []
    for name, (key, shape, dtype) in each.programs.shards.items():
        initial = "array"
        if name not in values:
            zeros = each.programs.initial(name)
            send_program(each.ask, zeros)
            initial = zeros.digest
        described.append({"key": key, "shape": list(shape), "dtype": dtype.name, "initial": initial})
    arrays = [values[name] for name in each.programs.shards if name in values]
    each.ask(Message({"op": "create", "shards": described, "if_absent": True}, arrays))


def send_program(ask: AskServer, program: UpdateProgram) -> None:
    """Sends a program to a server."""
    blob = np.frombuffer(program.blob, np.uint8)
    ask(Message({"op": "program", "digest": program.digest, "described": program.described()}, [blob]))


_LOST: Final = (
    "Group %d: pushes %d to %d of fragment %d are lost: the server went back to a snapshot that lacks them.",
    "Group %d: pushes %d to %d of fragment %d were not finite, and the server refused them. The group adopts the outer "
    "parameters.",
)
_SLOW: Final = (
    "Group %d: its server has not answered a push of fragment %d for %.2g s, and boundaries come every %.2g s. Groups that "
    "exchange so late drift apart, and the loss is higher. Choose a larger `every`, or start more syncers."
)
_REPLACED: Final = (
    "Another process exchanges as group {0}. Give each group a number of its own, and end the other process."
)
