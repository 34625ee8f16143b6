"""``FragmentRules``: what a group does with one fragment of its parameters. Pure: events in, actions out.

- The group claims its slot, and adopts the outer parameters. From then on it never waits.
- At a boundary, or before or after it, it adopts what was fetched. At a boundary it takes all that was not pushed as
  one push. While a push has no answer, or several are in no adopted version, it takes no other: what waits becomes one
  push, so an outage is not followed by a burst of rounds.
- A push keeps its number until it has an answer. The answer says which version was open, so the group knows which outer
  parameters have it.
- Any member closes a round that has a quorum: at once if all live members have pushed, else after the grace time.
- Versions count only with the instance of the store. If another instance answers, it has gone back to a snapshot:
  pushes that it lacks count as not pushed again if the group still has them. The others are lost, and named. A server
  that comes back without a snapshot begins with the outer parameters of some group; nobody knows which pushes these
  have, so all are named.
- A push that was not finite is refused. The group then forgets its work, and adopts.
- At the end it pushes the rest, and says that it was the last. When no live member trains any more, the open rounds are
  flushed: this is no step of the outer optimizer, whose momentum would amplify a round that is almost empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

from replicax._ps.local_updates.exchange_actions import (
    Action,
    AdoptOuter,
    ClaimSlot,
    ExchangeSlow,
    FetchOuter,
    LostPushes,
    NoteLanding,
    ReadRound,
    SendClose,
    SendPush,
    ServerSilent,
    SlotReplaced,
    TakeProgress,
)
from replicax._ps.local_updates.heard_members import HeardMembers
from replicax._ps.local_updates.round_state import REFUSED, MemberState, RoundState

MAX_UNMERGED: Final = 4
"""The most pushes that are in no adopted version. Each needs the memory of the fragment."""
SLOW_BOUNDARIES: Final = 10
"""So many boundaries may pass while one push has no answer. Groups that exchange later learn less from each other."""
LONG_ROUND: Final = 3
"""A round in which the group has more than so many times the rows of its last rounds is long, as after an outage."""
_NUM_ROUNDS: Final = 8
_SHARE_OF_SLACK: Final = 0.75
_REQUESTS_PER_EXCHANGE: Final = 3  # push, close, fetch


@final
@dataclass(frozen=True)
class ExchangeOptions:
    """How groups exchange.

    Attributes:
      quorum: The number of members that a round waits for, of those that are live or have pushed.
      grace_s: The seconds that a round with a quorum waits for the other live members; None takes it from the slack:
        the time between two boundaries that an exchange does not need.
      patience_s: The seconds after which a member that has pushed nothing no longer counts as live.
    """

    quorum: int
    grace_s: float | None = None
    patience_s: float = 60.0


@final
class FragmentRules:
    """The state of one fragment in one group. Not thread-safe.

    Args:
      fragment: Its number.
      member: The number of the group.
      owner: A number that no other process of the group has.
      options: How groups exchange.
      heard: Which members are live.

    Attributes:
      has_begun: True once the group has adopted outer parameters.
      is_done: True if ``finish`` has done its work. A server that goes back to a snapshot may make it false again.
      is_replaced: True if another process has the slot.
      stops: True if all groups shall stop.
    """

    def __init__(self, fragment: int, member: int, owner: int, options: ExchangeOptions, heard: HeardMembers):
        self.fragment = fragment
        self._member, self._owner, self._options, self._heard = member, owner, options, heard
        self.has_begun = self.is_done = self.is_replaced = self.stops = False
        self._is_finishing = self._is_silent = False
        # The server, as it answered last.
        self._instance: str | None = None
        self._birth: int | None = None
        self._claimed: str | None = None  # the instance in which the slot is this process's
        self._state: RoundState | None = None
        self._in_flight: Literal["request", "push", "fetch"] | None = None
        # Outer parameters: (instance, version).
        self._fetched: tuple[str, int] | None = None
        self._adopted: tuple[str, int] | None = None
        # Own work.
        self._tokens = 0  # of what was not pushed
        self._number = 0  # of the last push
        self._merged: list[tuple[int, int]] = []  # runs of pushes, first and last, that adopted versions have
        self._tokens_of: dict[int, int] = {}  # of each push that is in no adopted version
        self._unanswered: int | None = None
        self._is_refused = False  # the server did not add the push, which waits for a tick
        self._num_passed = 0  # boundaries since that push
        self._last = 0  # the push that says that it is the last
        self._enters: dict[int, int] = {}  # answered pushes: the version that has them
        # Its rows in the last rounds that were not long, and in the open one, by (instance, version).
        self._rounds: dict[tuple[str, int], int] = {}
        self._returned: list[int] = []  # pushes that count as not pushed again
        self._drops = True
        # Times.
        self._boundary_at = 0.0
        self._sent_at: float | None = None
        self._period_s = self._exchange_s = 0.0
        self._grace: tuple[tuple[str, int], float] | None = None  # the round, and since when it has a quorum

    @property
    def state(self) -> RoundState | None:
        """The round, as the server has described it last; None before its first answer."""
        return self._state

    # --- events -------------------------------------------------------------------------------------

    def boundary(self, tokens: int, now: float, *, adopts: bool = True) -> list[Action]:
        """The group has reached the end of its local steps.

        Args:
          tokens: The rows since the last one.
          now: The time.
          adopts: True if the group can take other values now.
        """
        self._period_s, self._boundary_at = now - self._boundary_at, now
        self._tokens += tokens
        actions: list[Action] = []
        if self._fetched is not None and adopts:
            actions.append(self._adopt())
        if self._may_take and self._tokens:
            actions.append(self._take())
        else:
            actions += self._passed()
        return [*actions, *self._advance(now)]

    def adopt(self) -> list[Action]:
        """The group can take values between two boundaries: adopts what was fetched."""
        return [] if self._fetched is None else [self._adopt()]

    def answered(self, instance: str, state: RoundState, now: float) -> list[Action]:
        """The server has answered the request in flight, with the state after it."""
        is_fetch, was_push = self._in_flight == "fetch", self._in_flight == "push"
        self._in_flight = None
        self._is_silent = False
        self._heard.note(self.fragment, state.members, now)
        if instance != self._instance:
            self._instance, self._fetched, self._sent_at = instance, None, None
        self._state = state
        me = state.members[self._member]
        if me.owner != self._owner:
            if self._claimed == instance:
                self.is_replaced = True
                return [SlotReplaced(self.fragment)]
            return self._advance(now)
        self.stops = self.stops or bool(state.is_stopping)
        actions: list[Action] = []
        if self._claimed != instance:
            self._claimed = instance
            actions += self._restored(me.pushed, state.birth)
        if self._unanswered is not None and me.pushed >= self._unanswered:
            actions += self._push_answered(self._unanswered, me, now)
        if was_push:
            self._is_refused = self._unanswered is not None
        if is_fetch:
            self._fetched = instance, state.version
            if not self.has_begun:
                self.has_begun, self._boundary_at = True, now
                actions.append(self._adopt())
        return [*actions, *self._advance(now)]

    def failed(self, *, is_absent: bool = False) -> list[Action]:
        """The request in flight has no answer, or the server does not have the fragment. A later tick repeats it."""
        self._in_flight = None
        if is_absent:
            self._state = None
            return []
        was_silent, self._is_silent = self._is_silent, True
        return [] if was_silent else [ServerSilent(self.fragment)]

    def tick(self, now: float) -> list[Action]:
        """Some time has passed."""
        self._is_refused = False
        return self._advance(now, is_due=True)

    def finish(self, now: float) -> list[Action]:
        """The group trains no more. ``is_done`` follows."""
        self._is_finishing = True
        return self._advance(now)

    # --- questions ----------------------------------------------------------------------------------

    @property
    def has_fetched(self) -> bool:
        """True if outer parameters were fetched, and not adopted yet."""
        return self._fetched is not None

    @property
    def is_merged(self) -> bool:
        """True if the outer parameters that were fetched or adopted last have all pushes of the group."""
        there = self._fetched or self._adopted
        if there is None or self._drops or self._returned or self._unanswered is not None:
            return False
        return there[0] == self._instance and max(self._enters.values(), default=0) <= there[1]

    @property
    def adopted_version(self) -> int:
        """The version of the outer parameters that were adopted last; 0 before the first."""
        return 0 if self._adopted is None else self._adopted[1]

    def tokens_of(self, number: int) -> int:
        """Returns the rows of a push that is in no adopted version."""
        return self._tokens_of[number]

    def others_that_train(self, now: float) -> set[int]:
        """Returns the other members that a quorum still counts on."""
        return set() if self._state is None else self._live(now) - {self._member}

    # --- pushes -------------------------------------------------------------------------------------

    @property
    def _may_take(self) -> bool:
        is_full = len(self._enters) + len(self._returned) >= MAX_UNMERGED
        return self.has_begun and self._unanswered is None and not self._drops and not is_full

    def _passed(self) -> list[Action]:
        """A boundary has passed without a push. The first pushes do not count: the server compiles their programs."""
        if self._unanswered is None or not self._merged or self._is_silent:
            return []
        self._num_passed += 1
        if self._num_passed != SLOW_BOUNDARIES:
            return []
        return [ExchangeSlow(self.fragment, self._num_passed, self._period_s)]

    def _take(self) -> TakeProgress:
        self._number += 1
        self._num_passed = 0
        self._unanswered = self._number
        self._tokens_of[self._number], self._tokens = self._tokens, 0
        if self._is_finishing:
            self._last = self._number
        return TakeProgress(self.fragment, self._number)

    def _push_answered(self, number: int, me: MemberState, now: float) -> list[Action]:
        self._unanswered = None
        if self._sent_at is not None:
            self._exchange_s = _REQUESTS_PER_EXCHANGE * (now - self._sent_at)
        if me.landed == REFUSED:
            del self._tokens_of[number]
            self._drops, self._fetched, self._adopted = True, None, None
            return [LostPushes(self.fragment, number, number, is_refused=True)]
        self._enters[number] = me.landed + 1
        self._note_rows(number, me.landed)
        return [NoteLanding(self.fragment, number, me.landed + 1)]

    def _note_rows(self, number: int, version: int) -> None:
        """A push is in the round that follows a version."""
        assert self._instance is not None
        opened = self._instance, version
        last = next(reversed(self._rounds), opened)
        if last != opened and self._is_long(*last):
            del self._rounds[last]  # it is not what is usual
        self._rounds[opened] = self._rounds.get(opened, 0) + self._tokens_of[number]
        if len(self._rounds) > _NUM_ROUNDS:
            del self._rounds[next(iter(self._rounds))]

    def _is_long(self, instance: str, version: int) -> bool:
        """True if the group has many more rows in a round than in those before."""
        before = [rows for opened, rows in self._rounds.items() if opened != (instance, version)]
        is_known = len(before) >= _NUM_ROUNDS // 2
        return is_known and self._rounds.get((instance, version), 0) > LONG_ROUND * max(before)

    def _restored(self, pushed: int, birth: int) -> list[Action]:
        """Another instance answers, which has the pushes of this process up to a number."""
        lacking = [number for number in self._enters if number > pushed]
        for number in lacking:
            del self._enters[number]
        self._returned += lacking
        runs, self._merged = self._merged, []
        if self._birth not in (None, birth):
            self._unanswered = None
            runs += [(number, number) for number in self._tokens_of]
            self._returned, self._tokens_of = [], {}
        self._birth = birth
        lost: list[Action] = []
        for first, last in runs:
            if first <= pushed:
                self._merged.append((first, min(last, pushed)))
            if last > pushed:
                lost.append(LostPushes(self.fragment, max(first, pushed + 1), last, is_refused=False))
        return lost

    # --- outer parameters ---------------------------------------------------------------------------

    def _adopt(self) -> AdoptOuter:
        assert self._fetched is not None
        (instance, version), self._fetched = self._fetched, None
        self._adopted = instance, version
        for number in [number for number, enters in self._enters.items() if enters <= version]:
            del self._enters[number], self._tokens_of[number]
            self._note_merged(number)
        keeps = [*self._enters] if self._unanswered is None else [*self._enters, self._unanswered]
        returns, self._returned = tuple(self._returned), []
        drops, self._drops = self._drops, False
        if drops:
            self._tokens = 0
        self._tokens += sum(self._tokens_of.pop(number) for number in returns)
        return AdoptOuter(self.fragment, instance, version, tuple(keeps), returns, drops)

    def _note_merged(self, number: int) -> None:
        first = self._merged.pop()[0] if self._merged and self._merged[-1][1] == number - 1 else number
        self._merged.append((first, number))

    @property
    def _has_newest(self) -> bool:
        assert self._state is not None
        return (self._fetched or self._adopted) == (self._instance, self._state.version)

    # --- what is sent next --------------------------------------------------------------------------

    def _advance(self, now: float, *, is_due: bool = False) -> list[Action]:
        actions = []
        if self._is_finishing:
            actions += self._end_of_work(now)
        if self._in_flight is None and not self.is_replaced:
            request = self._request(now, is_due=is_due)
            if request is not None:
                match request:
                    case FetchOuter():
                        self._in_flight = "fetch"
                    case SendPush():
                        self._in_flight = "push"
                    case _:
                        self._in_flight = "request"
                actions.append(request)
        return actions

    def _request(self, now: float, *, is_due: bool) -> Action | None:
        if self._is_silent and not is_due:
            return None
        if self._state is None or self._state.members[self._member].owner != self._owner:
            expected = MemberState() if self._state is None else self._state.members[self._member]
            return ClaimSlot(self.fragment, expected)
        if self._unanswered is not None and not self._is_refused:
            self._sent_at = now
            return SendPush(
                self.fragment,
                self._unanswered,
                self._state.members[self._member].pushed,
                self._tokens_of[self._unanswered],
                self._unanswered == self._last,
                self.stops,
            )
        close = self._close(now)
        if close is not None:
            return close
        if not self._has_newest and not self._waits(now):
            return FetchOuter(self.fragment)
        return ReadRound(self.fragment) if is_due else None

    def _close(self, now: float) -> SendClose | None:
        state = self._state
        assert state is not None
        assert self._instance is not None
        contributors = state.contributors
        if not contributors:
            return None
        live = self._live(now)
        if not live and self._is_finishing:
            return SendClose(self.fragment, state.version, 1, is_flush=True)
        quorum = min(self._options.quorum, len(live | contributors))
        if len(contributors) < quorum:
            return None
        if not live <= contributors:
            open_round = self._instance, state.version
            if self._grace is None or self._grace[0] != open_round:
                self._grace = open_round, now
            if now - self._grace[1] < self._grace_s:
                return None
        is_long = self._is_long(self._instance, state.version)
        return SendClose(self.fragment, state.version, quorum, is_flush=is_long)

    def _live(self, now: float) -> set[int]:
        """The members that train, and have been heard of."""
        assert self._state is not None
        everyone = range(len(self._state.members))
        return {each for each in everyone if self._state.trains(each) and self._heard.is_live(each, now)}

    @property
    def _grace_s(self) -> float:
        if self._options.grace_s is not None:
            return self._options.grace_s
        slack = max(0.0, self._period_s - self._exchange_s)
        return min(_SHARE_OF_SLACK * slack, self._options.patience_s)

    # --- the end ------------------------------------------------------------------------------------

    def _end_of_work(self, now: float) -> list[Action]:
        """The training has ended: adopts and takes at any time."""
        actions: list[Action] = []
        self.is_done = False
        if self._fetched is not None:
            actions.append(self._adopt())
        state = self._state
        if state is None or self._claimed != self._instance:
            return actions
        has_finished = state.members[self._member].has_finished
        if self._may_take and not self._returned and (self._tokens or not has_finished):
            actions.append(self._take())
        elif has_finished and not self._owes and not state.contributors and not self._waits(now):
            self.is_done = self._adopted == (self._instance, state.version)
        return actions

    @property
    def _owes(self) -> bool:
        """True while the group has work that it has not pushed, or must adopt before it can."""
        return bool(self._unanswered is not None or self._tokens or self._returned or self._drops)

    def _waits(self, now: float) -> bool:
        """True while the group has pushed its last, and others train, who change the outer parameters."""
        assert self._state is not None
        has_finished = self._state.members[self._member].has_finished
        return bool(self._is_finishing and has_finished and not self._owes and self._live(now))
