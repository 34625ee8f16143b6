"""``lengths_of``: how much an object keeps: the lengths of all containers that it reaches, by where they are."""

from collections import Counter, deque
from types import GeneratorType


def lengths_of(root, package="replicax._ps"):
    """Counts the items of the containers that an object of a package reaches, through its attributes and generators.

    >>> class Kept:
    ...     def __init__(self):
    ...         self.numbers, self.names = [1, 2, 3], {"a": {4, 5}}
    >>> sorted(lengths_of(Kept(), package="").items())
    [('Kept.names', 1), ('Kept.names[]', 2), ('Kept.numbers', 3)]
    """
    lengths, seen, waiting = Counter(), set(), [(type(root).__name__, root)]
    while waiting:
        where, each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict | list | set | tuple | deque | frozenset):
            lengths[where] += len(each)
            items = [*each, *each.values()] if isinstance(each, dict) else each
            waiting += [(f"{where}[]", item) for item in items]
        elif isinstance(each, GeneratorType):
            if each.gi_frame is not None:
                waiting += [
                    (f"{each.__qualname__}.{name}", value) for name, value in each.gi_frame.f_locals.items()
                ]
        elif type(each).__module__.startswith(package or type(root).__module__):
            waiting += [(f"{type(each).__name__}.{name}", value) for name, value in attributes_of(each)]
    return lengths


def attributes_of(each):
    """Yields the attributes of an object, those in slots too."""
    yield from getattr(each, "__dict__", {}).items()
    for cls in type(each).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(each, name):
                yield name, getattr(each, name)
