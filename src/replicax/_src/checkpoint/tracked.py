"""The types of saved objects: leaves, and objects with parts; and the keys that files use."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping
from typing import Any

from replicax._src.checkpoint.errors import UntrackableError


class Leaf(abc.ABC):
    """An object that has a value and no parts.

    Attributes:
      label: A name for messages.
      of: The object itself. An object that is tracked twice is saved once.
      place: The position in the object, if it has several leaves.
    """

    label: str
    of: Any
    place: int | None = None

    @property
    def identity(self) -> Hashable:
        """The identity of the value, equal wherever it is found."""
        return id(self.of), self.place


Parts = Mapping[str, Any]
"""The parts of an object, by name. Names of users are ``escaped``, and "/" separates names inside a pytree."""


class Trackable(abc.ABC):
    """An object of replicax that lists its parts itself."""

    @abc.abstractmethod
    def parts(self) -> Parts:
        """Its parts, by name."""


class Growing(abc.ABC):
    """An object of replicax that may get more parts."""

    @abc.abstractmethod
    def awaits(self, restoration: Any) -> None:
        """Makes a restoration continue when it gets more parts."""


def escaped(name: str) -> str:
    """Returns a name as a part of a key, in which "/", "." and the empty name are reserved."""
    return "%" if not name else name.replace("%", "%25").replace("/", "%2F").replace(".", "%2E")


def untrackable(path: str, value: Any) -> UntrackableError:
    """Returns the error for an object that cannot be saved."""
    return UntrackableError(
        f"rx.Checkpoint({path}=...) got {type(value).__name__}, which it cannot save: {value!r:.120}. It "
        "saves variables, Keras models, layers, optimizers and metrics, flax.nnx modules, pytrees of arrays "
        "and numbers, iterators of distributed datasets, objects with get_state() and set_state(state) whose "
        "state is JSON, and lists and dicts of these."
    )
