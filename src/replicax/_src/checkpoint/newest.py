"""Tracks the latest restore of each object, so that an older, deferred restore cannot overwrite it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable
from typing import Any, final

from replicax._src.checkpoint.tracked import Leaf
from replicax._src.checkpoint.trees import HeldTree


@final
class Newest:
    """The number of the latest restore of each object, for as long as the object exists."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, tuple[weakref.ref[Any], int]] = {}

    def note(self, restored: Leaf | HeldTree, number: int) -> None:
        """Records that the restore of this number has set the object's value."""
        identity = _identity_of(restored)

        def forget(reference: weakref.ref[Any]) -> None:
            known = self._numbers.get(identity)
            if known is not None and known[0] is reference:
                del self._numbers[identity]

        of = restored.of if isinstance(restored, Leaf) else restored
        # A user's object with slots has no weak reference, so its id may be reused unnoticed.
        with contextlib.suppress(TypeError):
            self._numbers[identity] = weakref.ref(of, forget), number

    def is_after(self, restored: Leaf | HeldTree, number: int) -> bool:
        """True if a later restore than this one has set the object's value."""
        known = self._numbers.get(_identity_of(restored))
        return known is not None and known[1] > number


def _identity_of(restored: Leaf | HeldTree) -> Hashable:
    return restored.identity if isinstance(restored, Leaf) else id(restored)
