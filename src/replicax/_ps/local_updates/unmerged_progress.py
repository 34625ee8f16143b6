"""``UnmergedProgress``: the one invariant of local updates, for a fragment of a group. Pure, for values of any kind.

What a group has computed and not yet pushed is ``w - base``: ``w`` are its parameters, ``base`` is where that work
began. A push is ``base - w``, a pseudo-gradient. So late, lost and overlapping pushes are one case: the group keeps
each push until it adopts outer parameters that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, final


class Summable(Protocol):
    """Numbers or arrays."""

    def __add__(self, other: Self, /) -> Self: ...

    def __sub__(self, other: Self, /) -> Self: ...


V = TypeVar("V", bound=Summable)


def moved(w: V, base: V, outer: V) -> V:
    """Returns parameters ``w`` whose base is now another one: ``outer``, and what was computed since ``base``."""
    return outer + (w - base)


@final
@dataclass(frozen=True)
class Rebase(Generic[V]):
    """How parameters ``w`` adopt outer parameters.

    Attributes:
      before, base: The base until now, and from now on.
      returned: The pushes that count as not pushed.
      drops: True to forget the work that was not pushed.
    """

    before: V
    base: V
    returned: Sequence[V] = ()
    drops: bool = False

    @property
    def is_move(self) -> bool:
        """True if the new parameters are ``moved(w, before, base)``."""
        return not self.drops and not self.returned

    def applied(self, w: V, move: Callable[[V, V, V], V] = moved) -> V:
        """Returns the new parameters. ``move`` is ``moved``, or a compiled program that does the same."""
        w = self.base if self.drops else move(w, self.before, self.base)
        for push in self.returned:
            w = w - push
        return w


@final
class UnmergedProgress(Generic[V]):
    """What a group has computed beyond the outer parameters that it has adopted.

    Args:
      base: The outer parameters that it begins with.

    Attributes:
      base: Where the work that was not pushed began.
      pushes: The pushes by number that are in no adopted outer parameters.
    """

    def __init__(self, base: V):
        self.base = base
        self.pushes: dict[int, V] = {}

    @property
    def start(self) -> V:
        """The outer parameters to which all pushes are changes."""
        start = self.base
        for push in self.pushes.values():
            start = start + push
        return start

    def take(self, number: int, w: V) -> V:
        """Returns the next push: all that was not pushed."""
        push = self.pushes[number] = self.base - w
        self.base = w
        return push

    def adopt(
        self, w: V, outer: V, *, keeps: Sequence[int], returns: Sequence[int] = (), drops: bool = False
    ) -> V:
        """Returns the new parameters: outer parameters and this group's work that they lack.

        Args:
          w: The parameters until now.
          outer: The outer parameters.
          keeps: The numbers of pushes that a later version has.
          returns: The numbers of pushes that a server has lost. They count as not pushed.
          drops: True to forget the work that was not pushed.
        """
        return self.rebase(outer, keeps=keeps, returns=returns, drops=drops).applied(w)

    def rebase(
        self, outer: V, *, keeps: Sequence[int], returns: Sequence[int] = (), drops: bool = False
    ) -> Rebase[V]:
        """Like ``adopt``, for parameters that follow: ``Rebase.applied`` returns the new ones."""
        before, self.base = self.base, outer
        for number in keeps:
            self.base = self.base - self.pushes[number]
        returned = [self.pushes[number] for number in returns]
        self.pushes = {number: self.pushes[number] for number in keeps}
        return Rebase(before, self.base, returned, drops)
