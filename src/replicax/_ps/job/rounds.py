"""Rounds of synchronous training, which decide whose gradients are averaged. Pure: events in, decisions out.

- Closures that update the same variables by gradients have the same *key*. The closures of a key form one round after
  another. A round is complete with the gradients of the first ``num_gradients`` of its closures that end. These are
  then applied as one update. Until that is done, no closure of the key is taken.
- Any workers take ``num_gradients`` closures of a round. Others are taken only as backups, one each, by workers that
  have none of the round.
- A closure that ends after its round is complete is *late*: its gradients are dropped. A worker that has such a closure
  takes none of a round.
- A closure that is requeued, for example because its worker is lost, belongs to the round in which it is taken again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(eq=False, slots=True)
class Round:
    """One update.

    Attributes:
      number: The number of the round. A later round of any key has a higher number.
      key: The key of its closures.
      in_flight: The numbers of the closures that have been taken and have not ended.
      workers: The workers that have taken some.
      ended: The numbers of the closures whose gradients are averaged, in the order in which they ended.
    """

    number: int
    key: Hashable
    in_flight: set[int] = field(default_factory=set)
    workers: set[Hashable] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)

    @property
    def num_taken(self) -> int:
        return len(self.in_flight) + len(self.ended)


@final
class Rounds:
    """The rounds that are not over, at most one for each key.

    Args:
      num_gradients: The number of gradients that are averaged, at least 1.
      first_number: The number of the first round.

    Attributes:
      next_number: The number of the next round.
      num_applied: The number of rounds that are over.
      num_dropped: The number of closures that ended after their round was complete.
    """

    def __init__(self, num_gradients: int, first_number: int = 0):
        self.num_gradients, self.next_number = num_gradients, first_number
        self.num_applied = self.num_dropped = 0
        self._rounds: dict[Hashable, Round] = {}

    @property
    def low(self) -> int:
        """A number below which all rounds are over."""
        return min((each.number for each in self._rounds.values()), default=self.next_number)

    @property
    def complete(self) -> Round | None:
        """A round that can be applied; None if there is none."""
        return next((each for each in self._rounds.values() if self._is_complete(each)), None)

    @property
    def num_waiting(self) -> int:
        """The number of gradients that wait for others of their round."""
        return sum(len(each.ended) for each in self._rounds.values() if not self._is_complete(each))

    def is_open(self, key: Hashable, num_here: int) -> bool:
        """True if ``may_take`` is true for some worker, perhaps; ``num_here`` workers are connected."""
        found = self._rounds.get(key) if key is not None else None
        if found is None:
            return True
        return not self._is_complete(found) and found.num_taken < max(self.num_gradients, num_here)

    def may_take(
        self, worker: Hashable, key: Hashable, rounds: Collection[int | None], num_idle: int, num_here: int
    ) -> bool:
        """True if a worker may take a closure.

        Args:
          worker: The worker.
          key: The key of the closure; None if it has no gradients.
          rounds: The round of each closure that the worker has in flight; None for one without gradients.
          num_idle: The number of workers that have nothing in flight.
          num_here: The number of connected workers.
        """
        if key is None:
            return True
        if rounds:
            numbers = {each.number for each in self._rounds.values()}
            if any(number is not None and number not in numbers for number in rounds):
                return False
        found = self._rounds.get(key)
        if found is None:
            return not rounds or self.num_gradients > num_idle
        if self._is_complete(found):
            return False
        num_left = self.num_gradients - found.num_taken
        if num_left > 0:
            return not rounds or num_left > num_idle
        is_backup = found.num_taken < num_here and worker not in found.workers
        return is_backup and not rounds

    def take(self, worker: Hashable, key: Hashable, closure: int) -> int | None:
        """Records that a worker takes a closure, and returns the number of its round."""
        if key is None:
            return None
        found = self._rounds.get(key)
        if found is None:
            found = self._rounds[key] = Round(self.next_number, key)
            self.next_number += 1
        found.in_flight.add(closure)
        found.workers.add(worker)
        return found.number

    def left(self, key: Hashable, closure: int) -> None:
        """Records that a closure has no gradients, or is requeued."""
        found = self._rounds.get(key)
        if found is not None:
            found.in_flight.discard(closure)

    def ended(self, key: Hashable, number: int | None, closure: int) -> None:
        """Records that all servers have the gradients of a closure, which was taken in round ``number``."""
        if number is None:
            return
        found = self._rounds.get(key)
        if found is None or found.number != number or self._is_complete(found):
            self.num_dropped += 1
            return
        found.in_flight.discard(closure)
        found.ended.append(closure)

    def applied(self, over: Round) -> None:
        """Records that the servers have applied a round."""
        if self.is_due(over):
            del self._rounds[over.key]
            self.num_applied += 1

    def forget(self, over: Round) -> None:
        """Records that a round will not be applied."""
        if self.is_due(over):
            del self._rounds[over.key]

    def is_due(self, complete: Round) -> bool:
        """True if a round still has to be applied."""
        return self._rounds.get(complete.key) is complete

    def clear(self) -> None:
        """Drops all rounds."""
        self._rounds.clear()

    def _is_complete(self, found: Round) -> bool:
        return len(found.ended) >= self.num_gradients
