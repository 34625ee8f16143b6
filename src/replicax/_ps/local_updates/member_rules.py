"""``MemberRules``: one group among those that train alone and exchange. Pure: events in, actions out.

``fragment_rules.py`` has the rules of one fragment. This file has what all fragments share: who is live, the stop for
all, and the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from replicax._ps.local_updates.exchange_actions import Action, ExchangeDone
from replicax._ps.local_updates.fragment_rules import ExchangeOptions, FragmentRules
from replicax._ps.local_updates.heard_members import HeardMembers
from replicax._ps.local_updates.round_state import RoundState


@final
class MemberRules:
    """The state of one group. Not thread-safe.

    Args:
      member: The number of the group.
      num_members: The number of groups.
      num_fragments: The number of fragments.
      owner: A positive number that no other process of the group has.
      options: How groups exchange.
      now: The time in seconds, on any clock that only goes forward.
    """

    def __init__(
        self,
        member: int,
        num_members: int,
        num_fragments: int,
        owner: int,
        options: ExchangeOptions,
        now: float,
    ):
        heard = self._heard = HeardMembers(member, num_members, options.patience_s, now)
        self._fragments = [
            FragmentRules(fragment, member, owner, options, heard) for fragment in range(num_fragments)
        ]
        self._has_said_done = False

    @property
    def has_begun(self) -> bool:
        """True once the group has adopted outer parameters of all fragments, and may train."""
        return all(each.has_begun for each in self._fragments)

    @property
    def stops(self) -> bool:
        """True if all groups shall end at their next boundary."""
        return any(each.stops for each in self._fragments)

    @property
    def fetched(self) -> list[int]:
        """The fragments of which outer parameters were fetched, and not adopted yet."""
        return [each.fragment for each in self._fragments if each.has_fetched]

    @property
    def is_merged(self) -> bool:
        """True if the outer parameters that were fetched or adopted last have all pushes of the group."""
        return all(each.is_merged for each in self._fragments)

    @property
    def version(self) -> int:
        """The number of rounds that all adopted outer parameters have."""
        return min(each.adopted_version for each in self._fragments)

    def tokens_of(self, fragment: int, number: int) -> int:
        """Returns the rows of a push that is in no adopted version."""
        return self._fragments[fragment].tokens_of(number)

    def adopt(self, fragment: int) -> list[Action]:
        """The group can take values between two boundaries: adopts what was fetched of a fragment."""
        return self._fragments[fragment].adopt()

    def boundary(self, fragment: int, tokens: int, now: float, *, adopts: bool = True) -> list[Action]:
        """The group has reached a boundary of a fragment, with so many rows since the last one. Does not wait.

        Args:
          adopts: False if the group cannot take other values now.
        """
        return self._fragments[fragment].boundary(tokens, now, adopts=adopts)

    def answered(self, fragment: int, instance: str, state: RoundState, now: float) -> list[Action]:
        """The server has answered the request in flight of a fragment, with the state after it."""
        return self._with_end(self._fragments[fragment].answered(instance, state, now))

    def failed(self, fragment: int, *, is_absent: bool = False) -> list[Action]:
        """The request in flight of a fragment has no answer, or its server does not have it."""
        return self._fragments[fragment].failed(is_absent=is_absent)

    def tick(self, now: float) -> list[Action]:
        """Some time has passed. Call it several times between two boundaries; the first call begins."""
        if self._has_said_done:
            return []
        return self._of_all(lambda each: each.tick(now))

    def stop(self) -> None:
        """Asks all groups to end at their next boundary. The next push says so."""
        for each in self._fragments:
            each.stops = True

    def finish(self, now: float) -> list[Action]:
        """The group trains no more, and all its rows have been in a boundary. ``ExchangeDone`` follows."""
        return self._of_all(lambda each: each.finish(now))

    @property
    def rounds(self) -> list[RoundState]:
        """The round of each fragment whose server has answered, as it has described it last."""
        return [each.state for each in self._fragments if each.state is not None]

    def is_live(self, member: int, now: float) -> bool:
        """True if a quorum still counts on a group."""
        return self._heard.is_live(member, now)

    def awaited(self, now: float) -> list[int]:
        """Returns the groups for which the end waits: those that train, and have been heard of not long ago."""
        return sorted({each for fragment in self._fragments for each in fragment.others_that_train(now)})

    @property
    def finished(self) -> list[int]:
        """The groups that have finished all fragments."""
        slots_of_groups = enumerate(zip(*(each.members for each in self.rounds), strict=True))
        return [
            group
            for group, slots in slots_of_groups
            if all(each.owner and each.has_finished for each in slots)
        ]

    def _of_all(self, event: Callable[[FragmentRules], list[Action]]) -> list[Action]:
        return self._with_end([action for each in self._fragments for action in event(each)])

    def _with_end(self, actions: list[Action]) -> list[Action]:
        if not self._has_said_done and all(each.is_done for each in self._fragments):
            self._has_said_done = True
            return [*actions, ExchangeDone()]
        return actions
