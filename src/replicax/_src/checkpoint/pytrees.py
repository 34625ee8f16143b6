"""The values of attributes and items: objects, which are saved as they are, and pytrees, which may contain objects."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, final

from replicax._src.checkpoint.errors import UntrackableError
from replicax._src.checkpoint.graph import contents_of, has_tracked, items_of
from replicax._src.checkpoint.tracked import Parts, Trackable, escaped
from replicax._src.checkpoint.trees import HeldTree


@final
class Holder:
    """The attributes of an object, or the items of a container, as they are saved.

    Args:
      values: The values by name or position. A restored pytree is assigned there.
      label: The prefix of the names in messages.
    """

    def __init__(self, values: Any, label: str = ""):
        self._values, self._label = values, label
        self._held: dict[Any, HeldTree | HeldPytree] = {}

    def part(self, name: Any) -> Any:
        """Returns the saved object of a name: the object itself, or the same holder of a pytree at each call."""
        value = self._values[name]
        # The parts of a Trackable are not computed here, because they may lead back here.
        if isinstance(value, Trackable) or contents_of(value) is not None:
            return value
        kind = HeldPytree if has_tracked(value) else HeldTree
        held = self._held.get(name)
        if not isinstance(held, kind):
            label = f"{self._label}/{name}" if self._label else str(name)
            held = self._held[name] = kind(self._values, name, label)
        held.parts()  # raises for an object that cannot be saved
        return held


@final
class HeldPytree(Trackable):
    """A list, tuple or dict that contains objects. A restore replaces its other items.

    Args:
      holder: The container that has it, by name or position.
      name: Its name there.
      label: A name for messages.
    """

    def __init__(self, holder: Any, name: Any, label: str):
        self._holder, self._name, self._label = holder, name, label
        self._items = Holder(self, label)

    def parts(self) -> Parts:
        """Returns its items, by name."""
        parts: dict[str, Any] = {}
        keys: dict[str, Any] = {}
        for key in self.items():
            name = escaped(str(key))
            if name in parts:
                raise UntrackableError(
                    f"{self._label!r} has the keys {keys[name]!r} and {key!r}, which have the same name, "
                    f"{name!r}, in a checkpoint. Rename one of them."
                )
            keys[name], parts[name] = key, self._items.part(key)
        return parts

    def items(self) -> Mapping[Any, Any]:
        """Returns its items, by position or key."""
        return items_of(self._pytree) or {}

    @property
    def _pytree(self) -> Any:
        return self._holder[self._name]

    def __getitem__(self, key: Any) -> Any:
        return self._pytree[key]

    def __setitem__(self, key: Any, item: Any) -> None:
        pytree = self._pytree
        if isinstance(pytree, (list, MutableMapping)):
            pytree[key] = item
        elif isinstance(pytree, Mapping):
            make: Any = type(pytree)
            self._holder[self._name] = make({**pytree, key: item})
        else:
            items = [item if i == key else old for i, old in enumerate(pytree)]
            make = getattr(type(pytree), "_make", type(pytree))  # named tuples have _make
            self._holder[self._name] = make(items)
