"""What attributes and items hold: objects, which are saved as they are, and nests, also such that have objects in
them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, final

from replicax._src.checkpoint.errors import UntrackableError
from replicax._src.checkpoint.graph import found_in, has_tracked, items_of
from replicax._src.checkpoint.tracked import Parts, Trackable, escaped
from replicax._src.checkpoint.trees import HeldTree


@final
class Holder:
    """The attributes of an object, or the items of a nest, as they are saved.

    Args:
      values: By name or position; a value that is restored as a whole is put there.
      label: For people: what stands before the names.
    """

    def __init__(self, values: Any, label: str = ""):
        self._values, self._label = values, label
        self._held: dict[Any, HeldTree | HeldNest] = {}

    def part(self, name: Any) -> Any:
        """What is saved under a name: the object, or the same holder of a nest each time."""
        value = self._values[name]
        if found_in(value) is not None:
            return value
        kind = HeldNest if has_tracked(value) else HeldTree
        held = self._held.get(name)
        if not isinstance(held, kind):
            label = f"{self._label}/{name}" if self._label else str(name)
            held = self._held[name] = kind(self._values, name, label)
        held.parts()  # what cannot be saved is said here
        return held


@final
class HeldNest(Trackable):
    """A list, tuple or dict that has objects in it. What else it has is replaced in it when it is restored.

    Args:
      holder: Has it, by name or position.
      name: Its name there.
      label: For people.
    """

    def __init__(self, holder: Any, name: Any, label: str):
        self._holder, self._name, self._label = holder, name, label
        self._items = Holder(self, label)

    def parts(self) -> Parts:
        """Its items, by name."""
        parts: dict[str, Any] = {}
        keys: dict[str, Any] = {}
        for key in items_of(self._nest) or {}:
            name = escaped(str(key))
            if name in parts:
                raise UntrackableError(
                    f"{self._label!r} has the keys {keys[name]!r} and {key!r}, which have one name, {name!r}, in a checkpoint. "
                    "Give one of them another key."
                )
            keys[name], parts[name] = key, self._items.part(key)
        return parts

    @property
    def _nest(self) -> Any:
        return self._holder[self._name]

    def __getitem__(self, key: Any) -> Any:
        return self._nest[key]

    def __setitem__(self, key: Any, item: Any) -> None:
        nest = self._nest
        if isinstance(nest, (list, MutableMapping)):
            nest[key] = item
        elif isinstance(nest, Mapping):
            make: Any = type(nest)
            self._holder[self._name] = make({**nest, key: item})
        else:
            items = [item if i == key else old for i, old in enumerate(nest)]
            make = getattr(type(nest), "_make", type(nest))  # named tuples have it
            self._holder[self._name] = make(items)
