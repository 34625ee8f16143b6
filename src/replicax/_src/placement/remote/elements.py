"""What a function for workers takes of iterators: elements, which are inputs of its program."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from replicax._src.errors import TraceError
from replicax._src.program.capture import current_capture
from replicax._src.program.slots import Sharing, Slot
from replicax._src.ps.programs import signature_of
from replicax._src.user_code import user_line


@dataclass(frozen=True)
class ElementSpec:
    """What an iterator gives: the structure, and shape and dtype of each leaf."""

    tree: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def nest(self) -> Any:
        """Both together."""
        return jax.tree_util.tree_unflatten(self.tree, self.leaves)


class PerWorkerInput(abc.ABC):
    """What each worker has its own of, and a scheduled function takes: an iterator, or a value."""

    def __init__(self, resource: str, spec: Callable[[], ElementSpec]):
        self._resource, self._spec = resource, spec

    @property
    def resource(self) -> str:
        """The name under which the workers know it."""
        return self._resource

    @property
    def spec(self) -> ElementSpec:
        """What it gives, as far as is known before it does. Waits for the first worker that has made it."""
        return self._spec()

    @property
    @abc.abstractmethod
    def is_iterator(self) -> bool:
        """Whether each ``next`` gives another element; a value is always the same one."""

    @property
    def described(self) -> Hashable:
        """What a trace depends on."""
        spec = self.spec
        return self.is_iterator, spec.tree, spec.leaves


@dataclass(frozen=True, eq=False)
class Element:
    """One leaf of one element of an iterator: an input, which a trace meets as if it were a variable."""

    source: PerWorkerInput
    call: int
    leaf: int


@final
class Elements:
    """The elements that a function takes while it is traced.

    Args:
      shapes: Of the elements' leaves, where they are others than the iterators say: by (number of the iterator, call).
    """

    def __init__(self, shapes: Mapping[tuple[int, int], Sequence[jax.ShapeDtypeStruct]] | None = None):
        self._shapes = shapes or {}
        self.sources: list[PerWorkerInput] = []
        self.counts: list[int] = []
        self.taken: dict[tuple[int, int], Sequence[jax.ShapeDtypeStruct]] = {}
        self._slots: dict[int, Slot] = {}

    def take(self, source: PerWorkerInput) -> Any:
        """The next element, in the function that is being traced.

        Raises:
          TraceError: In a scan, condition or other inner trace, which is traced once for all its turns.
        """
        capture = current_capture()
        assert capture is not None
        if capture.is_in_inner_trace():
            raise TraceError(
                f"next(iterator) at {user_line()} is called inside a function that JAX traces on its own (a scan, loop, "
                "condition, jax.grad, jax.vmap or jax.jit): it would be one element for all turns. Call it outside and pass "
                "the element in, or use a Python loop."
            )
        if source not in self.sources:
            self.sources.append(source)
            self.counts.append(0)
        number = self.sources.index(source)
        call = self.counts[number] if source.is_iterator else 0
        self.counts[number] = call + 1
        spec = source.spec
        leaves = self._shapes.get((number, call), spec.leaves)
        self.taken[number, call] = leaves
        values = []
        for position, leaf in enumerate(leaves):
            element = Element(source, call, position)
            name = f"element {position} of iterator {number}"
            self._slots[id(element)] = Slot(
                element, _NO_ACCESSOR, name, leaf.shape, leaf.dtype, Sharing.MIRRORED
            )
            values.append(capture.read(element))
        return jax.tree_util.tree_unflatten(spec.tree, values)

    def slot_of(self, element: Element) -> Slot:
        return self._slots[id(element)]

    @property
    def signature(self) -> str:
        """Of all that is taken."""
        return signature_of([(x.shape, x.dtype) for key in sorted(self.taken) for x in self.taken[key]])


_NO_ACCESSOR: Any = None
_local = threading.local()


@contextlib.contextmanager
def taking_from(elements: Elements) -> Iterator[None]:
    """Inside, while a function for workers is traced, ``next`` of an iterator is an input of it."""
    _local.elements = elements
    try:
        yield
    finally:
        _local.elements = None


def current_elements() -> Elements | None:
    """What takes elements in the function for workers that is being traced in this thread."""
    return getattr(_local, "elements", None)
