"""The graph of saved objects: those under a checkpoint, by names of attributes and positions, down to arrays.

Keys are structural. Keras numbers the names of variables in the order in which a process makes them, so these names
only serve as labels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from replicax._src.checkpoint.array_leaves import leaf_of_variable
from replicax._src.checkpoint.tracked import Leaf, Parts, Trackable
from replicax._src.checkpoint.trees import leaf_of_state
from replicax._src.values.framework import trackings


def kind_of(tracked: Any) -> str:
    """Returns the kind of an object, if its parts are meaningless for objects of other kinds; otherwise ""."""
    return next(filter(None, (tracking.kind_of(tracked) for tracking in trackings())), "")


def contents_of(tracked: Any) -> Parts | Leaf | None:
    """Returns the parts of an object, or its leaf if it is one; None if it has nothing to save.

    Variables come before objects of frameworks, because those of nnx-backed Keras are both. Objects with only
    ``get_state``
    and ``set_state`` come last, because layers may have these, too.
    """
    if isinstance(tracked, Leaf):
        return tracked
    if isinstance(tracked, Trackable):
        return tracked.parts()
    found: Parts | Leaf | None = leaf_of_variable(tracked)
    for tracking in () if found is not None else trackings():
        found = tracking.parts_of(tracked)
        if found is not None:
            break
    return leaf_of_state(tracked) if found is None else found


def items_of(pytree: Any) -> Mapping[Any, Any] | None:
    """Returns the items of a list, tuple or dict, by position or key; None for other objects."""
    if isinstance(pytree, Mapping):
        return pytree
    return dict(enumerate(pytree)) if isinstance(pytree, (list, tuple)) else None


def has_tracked(pytree: Any) -> bool:
    """True if a list, tuple or dict, or one inside it, has an item that is saved as an object."""
    items = items_of(pytree) or {}
    return any(contents_of(item) is not None or has_tracked(item) for item in items.values())


@final
@dataclass
class Node:
    """One object under a checkpoint.

    Attributes:
      object: The object.
      path: The shortest path to it from the checkpoint.
      children: The numbers of the child nodes, by name.
      leaf: The leaf, if it is one.
    """

    object: Any
    path: tuple[str, ...]
    children: dict[str, int] = field(default_factory=dict)
    leaf: Leaf | None = None

    @property
    def key(self) -> str:
        return "/".join(self.path)


@final
class Graph:
    """All objects under a root, each once."""

    def __init__(self, root: Any):
        self.nodes: list[Node] = []
        self._numbers: dict[Hashable, int] = {}
        self._walk(root)

    def _walk(self, root: Any) -> None:
        contents = contents_of(root)
        waiting = deque([(self._number(root, contents, ()), contents)])
        while waiting:
            number, contents = waiting.popleft()
            node = self.nodes[number]
            parts = {} if isinstance(contents, Leaf) else contents or {}
            for name, part in parts.items():
                found = contents_of(part)
                if found is None:
                    continue
                num_known = len(self.nodes)
                number = node.children[name] = self._number(
                    part, found, (*node.path, *filter(None, name.split("/")))
                )
                if number == num_known:
                    waiting.append((number, found))

    def _number(self, tracked: Any, found: Parts | Leaf | None, path: tuple[str, ...]) -> int:
        leaf = found if isinstance(found, Leaf) else None
        identity = id(tracked) if leaf is None else leaf.identity
        if identity not in self._numbers:
            self._numbers[identity] = len(self.nodes)
            self.nodes.append(Node(tracked, path, leaf=leaf))
        return self._numbers[identity]

    def leaves(self) -> Iterator[tuple[str, Leaf]]:
        """Yields the leaves by key. A root that is a leaf has an empty key."""
        for node in self.nodes:
            if node.leaf is not None:
                yield node.key, node.leaf
