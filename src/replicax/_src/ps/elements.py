"""The elements that closures take of iterators, some before their closure has come."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol, final

import numpy as np

Leaves = Sequence[np.ndarray]
"""Of one element."""
Elements = Sequence[Sequence[Leaves]]
"""For each iterator, for each call of ``next``."""


class LeafIterator(Protocol):
    """What elements are taken from: ``resources.DatasetResource``."""

    @property
    def is_ready(self) -> bool:
        """Whether ``next`` need not wait."""
        ...

    def next(self) -> Leaves:
        """The leaves of the next element; after the last one it raises OutOfRangeError."""
        ...


@final
class ElementQueue:
    """Takes elements in order. Those that it has looked at are taken first."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[LeafIterator, deque[Leaves | Exception]]
        self._seen = weakref.WeakKeyDictionary()

    def take(self, iterators: Sequence[LeafIterator], counts: Sequence[int]) -> Elements:
        """Takes so many elements of each iterator, and waits for them.

        Raises:
          OutOfRangeError: An iterator has no more. What was taken of the others is lost.
        """
        pairs = zip(iterators, counts, strict=True)
        return [[self._next(iterator) for _ in range(count)] for iterator, count in pairs]

    def look_ahead(self, iterators: Sequence[LeafIterator], counts: Sequence[int]) -> Elements | None:
        """What ``take`` will give, if that is known without waiting, and is no error."""
        if len(set(iterators)) < len(iterators):
            return None
        elements: list[list[Leaves]] = []
        for iterator, count in zip(iterators, counts, strict=True):
            seen = self._seen.setdefault(iterator, deque())
            while len(seen) < count and iterator.is_ready:
                try:
                    seen.append(iterator.next())
                except Exception as error:  # of the closure that takes it
                    seen.append(error)
            leaves = [each for each in list(seen)[:count] if not isinstance(each, Exception)]
            if len(leaves) < count:
                return None
            elements.append(leaves)
        return elements

    def _next(self, iterator: LeafIterator) -> Leaves:
        seen = self._seen.get(iterator)
        if not seen:
            return iterator.next()
        leaves = seen.popleft()
        if isinstance(leaves, Exception):
            raise leaves
        return leaves


def are_same(some: Elements, others: Elements) -> bool:
    """Whether they are the very same arrays."""
    return list(map(id, leaves_of(some))) == list(map(id, leaves_of(others)))


def leaves_of(elements: Elements) -> list[np.ndarray]:
    """All leaves, in order."""
    return [leaf for calls in elements for leaves in calls for leaf in leaves]
