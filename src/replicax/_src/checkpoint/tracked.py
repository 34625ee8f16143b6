"""The words for what is saved: leaves, objects with parts, and the keys by which files know them."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Mapping
from typing import Any

from replicax._src.checkpoint.errors import UntrackableError


class Leaf(abc.ABC):
    """Something that has a value, and nothing below it.

    Attributes:
      label: For people.
      of: The object itself; what is tracked twice is saved once.
    """

    label: str
    of: Any

    @property
    def identity(self) -> Hashable:
        """What is the same wherever the object is found."""
        return id(self.of)


Parts = Mapping[str, Any]
"""What an object has below it, by name; names of users are ``escaped``, and "/" stands between those of a nest."""


class Trackable(abc.ABC):
    """An object of replicax that says itself what is below it."""

    @abc.abstractmethod
    def parts(self) -> Parts:
        """Its parts, by name."""


class Growing(abc.ABC):
    """An object of replicax that may get more parts than it has."""

    @property
    @abc.abstractmethod
    def is_growing(self) -> bool:
        """True if it is going to have more parts."""

    @abc.abstractmethod
    def awaits(self, restoration: Any) -> None:
        """Has a restoration advance when it has got more."""


def escaped(name: str) -> str:
    """A name as a part of a key, in which "/" and "." have meanings of their own, and nothing is no name."""
    return "%" if not name else name.replace("%", "%25").replace("/", "%2F").replace(".", "%2E")


def untrackable(path: str, value: Any) -> UntrackableError:
    """The error for what cannot be saved."""
    return UntrackableError(
        f"rx.Checkpoint({path}=...) got {type(value).__name__}, which it cannot save: {value!r:.120}. It saves variables, Keras "
        "models, layers, optimizers and metrics, flax.nnx modules, nests of arrays and numbers, iterators of distributed "
        "datasets, whatever has get_state() and set_state(state) with a state that JSON can hold, and lists and dicts of these."
    )
