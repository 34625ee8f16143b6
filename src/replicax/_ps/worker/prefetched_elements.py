"""The elements that closures take from iterators. Some are read before their closure arrives."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np


@final
@dataclass(frozen=True)
class End:
    """The marker of an element that is missing because the dataset has ended.

    Attributes:
      reason: The reason, as a message.
    """

    reason: str


Leaves = Sequence[np.ndarray]
"""The leaves of one element."""
Elements = Sequence[Sequence[Leaves | End]]
"""The elements of each iterator, one for each call of ``next``."""


class LeafIterator(Protocol):
    """A source of elements: ``resources.DatasetResource``."""

    @property
    def is_ready(self) -> bool:
        """True if ``next`` does not wait."""
        ...

    def next(self) -> Leaves | End:
        """Returns the leaves of the next element; after the last one, the end each time."""
        ...


@final
class ElementQueue:
    """Takes elements in order. Elements that were looked at are taken first."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[LeafIterator, deque[Leaves | End | Exception]]
        self._seen = weakref.WeakKeyDictionary()

    def take(self, iterators: Sequence[LeafIterator], counts: Sequence[int]) -> Elements:
        """Takes ``counts`` elements of each iterator, and waits for them."""
        pairs = zip(iterators, counts, strict=True)
        return [[self._next(iterator) for _ in range(count)] for iterator, count in pairs]

    def put_back(self, iterators: Sequence[LeafIterator], elements: Elements, counts: Sequence[int]) -> None:
        """Puts back the elements of each iterator beyond ``counts``, which were not needed. They are taken next."""
        for iterator, calls, count in zip(iterators, elements, counts, strict=True):
            unused = [leaves for leaves in calls[count:] if not isinstance(leaves, End)]
            if unused:
                self._seen.setdefault(iterator, deque()).extendleft(reversed(unused))

    def peek(self, iterators: Sequence[LeafIterator], counts: Sequence[int]) -> Elements | None:
        """Returns the elements that ``take`` will return; None if they are not ready, or have an error or the end."""
        if len(set(iterators)) < len(iterators):
            return None
        elements: list[list[Leaves]] = []
        for iterator, count in zip(iterators, counts, strict=True):
            seen = self._seen.setdefault(iterator, deque())
            while len(seen) < count and iterator.is_ready:
                try:
                    seen.append(iterator.next())
                except Exception as error:  # the closure that takes it fails
                    seen.append(error)
            leaves = [each for each in list(seen)[:count] if not isinstance(each, End | Exception)]
            if len(leaves) < count:
                return None
            elements.append(leaves)
        return elements

    def _next(self, iterator: LeafIterator) -> Leaves | End:
        seen = self._seen.get(iterator)
        if not seen:
            return iterator.next()
        leaves = seen.popleft()
        if isinstance(leaves, Exception):
            raise leaves
        return leaves


def end_of(elements: Elements) -> End | None:
    """Returns the first end among the elements; None if none is missing."""
    return next((each for calls in elements for each in calls if isinstance(each, End)), None)


def are_same(some: Elements, others: Elements) -> bool:
    """True if both have the same array objects."""
    return list(map(id, _leaves_of(some))) == list(map(id, _leaves_of(others)))


def _leaves_of(elements: Elements) -> list[np.ndarray]:
    return [leaf for calls in elements for leaves in calls if not isinstance(leaves, End) for leaf in leaves]
