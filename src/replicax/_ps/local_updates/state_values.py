"""``StateValues``: what a group exchanges of arrays that no gradient changes, as the statistics of BatchNorm. Pure.

Groups push these values themselves, and not their changes: changes of groups that began at different outer values may
add up to a negative variance, and a mean of values cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, final

from replicax._ps.local_updates.unmerged_progress import Rebase, Summable

V = TypeVar("V", bound=Summable)


@final
class StateValues(Generic[V]):
    """The state of a fragment in one group, with the methods of ``UnmergedProgress``.

    Args:
      base: The outer values that it begins with.

    Attributes:
      pushes: The pushes by number that are in no adopted outer values.
    """

    def __init__(self, base: V):
        self._outer = base
        self.pushes: dict[int, V] = {}

    @property
    def start(self) -> V:
        """The outer values that were adopted last."""
        return self._outer

    def take(self, number: int, w: V) -> V:
        """Returns the next push."""
        self.pushes[number] = w
        return w

    def adopt(
        self, w: V, outer: V, *, keeps: Sequence[int], returns: Sequence[int] = (), drops: bool = False
    ) -> V:
        """Returns the new values: the outer ones. What the group has computed since its last push is dropped."""
        return self.rebase(outer, keeps=keeps, returns=returns, drops=drops).applied(w)

    def rebase(
        self, outer: V, *, keeps: Sequence[int], returns: Sequence[int] = (), drops: bool = False
    ) -> Rebase[V]:
        """Like ``adopt``, for values that follow."""
        del returns, drops
        before, self._outer = self._outer, outer
        self.pushes = {number: self.pushes[number] for number in keeps}
        return Rebase(before, outer, drops=True)
