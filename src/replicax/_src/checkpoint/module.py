"""``rx.Module``: an object that finds the variables in its attributes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from replicax._src.checkpoint.array_leaves import VariableLeaf, leaf_of_variable
from replicax._src.checkpoint.graph import contents_of, has_tracked, items_of
from replicax._src.checkpoint.pytrees import Holder
from replicax._src.checkpoint.tracked import Leaf, Parts, Trackable, escaped
from replicax._src.values.framework import use_imported


class Module(Trackable):
    """A base class of objects that have variables: in attributes, in lists and dicts there, and in modules there.

    ``variables`` and ``trainable_variables`` find them, and ``rx.Checkpoint(model=module)`` saves them. Keras layers in
    attributes count, too. Nothing is registered: what an attribute has now counts. Call the properties anywhere; they
    neither communicate nor block.

    Args:
      name: A name for messages; by default the name of the class in snake case.

    >>> import replicax as rx
    >>> class Line(rx.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weights = [rx.Variable(2.0), rx.Variable(1.0, trainable=False)]
    ...
    ...     def __call__(self, x):
    ...         return self.weights[0] * x + self.weights[1]
    >>> line = Line()
    >>> len(line.variables), len(line.trainable_variables), float(line(3.0))
    (2, 1, 7.0)

    Source: tf.Module.
    """

    _module_name: str | None = None

    def __init__(self, name: str | None = None):
        self._module_name = name

    @property
    def name(self) -> str:
        """The name given, or the name of the class in snake case."""
        return (
            self._module_name
            or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<!^)(?=[A-Z][a-z])", "_", type(self).__name__).lower()
        )

    @property
    def name_scope(self) -> AbstractContextManager[None]:
        """A context without effect, because variables have the names that they are given."""
        return contextlib.nullcontext()

    @classmethod
    def with_name_scope(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the method unchanged."""
        return method

    @property
    def variables(self) -> tuple[Any, ...]:
        """All variables, each once: those of this module by the names of its attributes, then those of its modules."""
        found: dict[int, Any] = {}
        for value in self._found():
            leaf = leaf_of_variable(value)
            if leaf is not None:
                found.setdefault(id(value), value)
        return tuple(found.values())

    @property
    def trainable_variables(self) -> tuple[Any, ...]:
        """The variables with ``trainable=True``."""
        return tuple(variable for variable in self.variables if variable.trainable)

    @property
    def non_trainable_variables(self) -> tuple[Any, ...]:
        """The variables with ``trainable=False``."""
        return tuple(variable for variable in self.variables if not variable.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """The modules in its attributes, and those below them."""
        return tuple(value for value in self._found() if isinstance(value, Module))

    def parts(self) -> Parts:
        """Returns what a checkpoint saves: the attributes that have variables or objects with state."""
        attributes = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Trackable) or contents_of(value) is not None or has_tracked(value)
        }
        holder = Holder(vars(self))
        return {escaped(name): holder.part(name) for name in attributes}

    def _found(self) -> Iterator[Any]:
        """Yields the variables and objects in the attributes, then those below these objects, each once."""
        use_imported()
        seen, waiting = {id(self)}, [self]
        for tracked in waiting:  # grows
            for value in _below(tracked):
                if id(value) not in seen:
                    seen.add(id(value))
                    waiting.append(value)
                    yield value


def _below(tracked: Any) -> Iterator[Any]:
    """Yields the variables and objects directly below a module or an object of a framework."""
    if isinstance(tracked, Module):
        for _, value in sorted(vars(tracked).items()):
            yield from _leaves(value)
        return
    found = contents_of(tracked)
    for part in () if found is None or isinstance(found, Leaf) else found.values():
        yield from [part.of] if isinstance(part, VariableLeaf) else _leaves(part)


def _leaves(value: Any) -> Iterator[Any]:
    items = items_of(value)
    if items is None:
        yield from [value] if contents_of(value) is not None else ()
        return
    for key in sorted(items, key=str) if isinstance(value, dict) else items:
        yield from _leaves(items[key])
