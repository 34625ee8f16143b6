"""The elements that a function for workers takes from iterators. They are inputs of its program."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import numpy as np

from replicax._ps.programs.programs import signature_of
from replicax._ps.programs.random_keys import is_key
from replicax._ps.worker.unbuilt import Cut
from replicax._src.program_kit.captures import Binding, current_capture
from replicax._src.program_kit.data import OutOfRangeError, cut_rows
from replicax._src.program_kit.errors import TraceError, UnsupportedError, user_line
from replicax._src.program_kit.variables import PerReplica, per_replica_stack


@dataclass(frozen=True)
class ElementSpec:
    """The structure of an iterator's elements, and the shape and dtype of each leaf.

    Attributes:
      cut: The way to share an element among several replicas; None if each gets all of it. "elements": the element is
        a
        list with one entry for each replica.
    """

    tree: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    cut: Cut | None = None

    @property
    def pytree(self) -> Any:
        """Returns the pytree that one replica gets, or all replicas together."""
        pytree = jax.tree_util.tree_unflatten(self.tree, self.leaves)
        return pytree[0] if self.cut == "elements" else pytree


class InputForm(NamedTuple):
    """The properties of a per-worker input that a trace depends on. Hashable."""

    is_iterator: bool
    spec: ElementSpec


class PerWorkerInput(abc.ABC):
    """An input of a scheduled function that each worker has its own of: an iterator, or a value.

    Args:
      values: The name under which the workers know it. (TensorFlow calls its argument so, and takes values.)
      spec: Returns the spec of its elements.

    Raises:
      UnsupportedError: A user makes one from values, which only workers have.
    """

    def __init__(self, values: Any = None, spec: Callable[[], ElementSpec] | None = None):
        if not isinstance(values, str) or spec is None:
            raise UnsupportedError(
                "A PerWorkerValue cannot be made from values: each worker makes its own. Write "
                "coordinator.create_per_worker_value(fn) or coordinator.create_per_worker_dataset(dataset_fn)."
            )
        self._resource, self._spec = values, spec

    @property
    def resource(self) -> str:
        """The name under which the workers know it."""
        return self._resource

    @property
    def spec(self) -> ElementSpec:
        """The spec of its elements. Waits for the first worker that has made it."""
        return self._spec()

    @property
    @abc.abstractmethod
    def is_iterator(self) -> bool:
        """True if each ``next`` returns another element; False for a value, which stays the same."""

    @property
    def form(self) -> InputForm:
        """Returns the properties that a trace depends on."""
        return InputForm(self.is_iterator, self.spec)


@dataclass(frozen=True, eq=False)
class Element:
    """One leaf of one element of an iterator: an input that a trace treats like a variable.

    Attributes:
      is_cut: True if its rows are split evenly among the replicas.
    """

    source: PerWorkerInput
    call: int
    leaf: int
    is_cut: bool = False


class EndOfElements(StopIteration):
    """Raised in a trace by ``next`` if the dataset has ended and the element is missing.

    Attributes:
      line: The line of the call.
    """

    def __init__(self, line: str):
        super().__init__()
        self.line = line

    def out_of_range(self) -> OutOfRangeError:
        """Returns the error for a function that needs the element."""
        return OutOfRangeError(
            f"next(iterator) at {self.line} was called after the last element. To continue without it give a default, "
            "next(iterator, None), or test iterator.get_next_as_optional().has_value()."
        )


@final
@dataclass(frozen=True)
class Offer:
    """The elements that a worker has for a function, which differ from the spec of its iterators.

    Attributes:
      sources: The iterators, in the order of the function's first trace.
      leaves: The leaves of each element, by (number of the iterator, call); None for one that is missing.
    """

    sources: Sequence[PerWorkerInput]
    leaves: Mapping[tuple[int, int], Sequence[jax.ShapeDtypeStruct] | None]

    @property
    def is_short(self) -> bool:
        """True if an element is missing."""
        return None in self.leaves.values()


@final
class Elements:
    """The elements that a function takes while it is traced.

    Args:
      offer: The available elements; None for as many as the function takes, with the shapes of the iterators' specs.
      num_replicas: The number of replicas of a worker.
    """

    def __init__(self, offer: Offer | None = None, num_replicas: int = 1):
        self._offer, self._num_replicas = offer, num_replicas
        # Iterators have the numbers of the first trace, even if this trace takes nothing from some of them.
        self.sources: list[PerWorkerInput] = [] if offer is None else list(offer.sources)
        self.counts: list[int] = [0] * len(self.sources)
        self.taken: dict[tuple[int, int], Sequence[jax.ShapeDtypeStruct]] = {}
        self._bindings: dict[int, Binding] = {}

    def take(self, source: PerWorkerInput) -> Any:
        """Returns the next element, or the value, in the function that is being traced.

        Raises:
          EndOfElements: The element is missing.
          TraceError: The call is in a scan, condition or other inner trace, which is traced once for all iterations;
            or in a
            replica function of several replicas, each of which needs its own part; or the function takes too many
            elements, or
            elements that its first trace did not take.
        """
        capture = current_capture()
        assert capture is not None
        if capture.is_replica and not source.is_iterator:
            raise TraceError(
                f"A worker's own input (its index, a per-worker value or variable) is used at {user_line()}, inside "
                f"the function that strategy.run runs on {self._num_replicas} replicas of one worker. Use it "
                "outside, and pass it in: strategy.run(fn, args=(value,)). Assign a per-worker variable after run."
            )
        if capture.is_replica:
            raise TraceError(
                f"next(iterator) at {user_line()} is called inside the function that strategy.run runs on "
                f"{self._num_replicas} replicas, each of which would need its own element. Call it outside: "
                "strategy.run(fn, args=(next(iterator),))."
            )
        if source.is_iterator and capture.is_in_inner_trace():
            raise TraceError(
                f"next(iterator) at {user_line()} is called inside a function that JAX traces on its own (a "
                "scan, loop, condition, jax.grad, jax.vmap or jax.jit), so all iterations would get one "
                "element. Call it outside and pass the element in, or use a Python loop."
            )
        if source.is_iterator and capture.is_in_branch:
            raise TraceError(
                f"next(iterator) at {user_line()} is called inside a branch of rx.cond, but elements are "
                "taken before a function runs, whichever branch it takes. Call it outside of rx.cond, and use "
                "the element inside."
            )
        if source not in self.sources:
            self.sources.append(source)
            self.counts.append(0)
        number = self.sources.index(source)
        call = self.counts[number] if source.is_iterator else 0
        if call == _MAX_TAKEN:
            raise TraceError(
                f"The function takes more than {_MAX_TAKEN} elements of one iterator, at {user_line()}. A function "
                "for workers is traced before the number of elements is known, so it cannot loop to the end of an "
                "iterator. Take a known number, `for _ in range(n): x = next(iterator, None)`, at most "
                f"{_MAX_TAKEN}, leave the loop where x is None, and schedule the function again for more."
            )
        spec = source.spec
        leaves = spec.leaves if self._offer is None else self._offered(source, number, call)
        self.counts[number] = call + 1
        if leaves is None:
            raise EndOfElements(user_line())
        self.taken[number, call] = leaves
        values = []
        for position, leaf in enumerate(leaves):
            is_cut = spec.cut == "rows" and bool(leaf.shape) and leaf.shape[0] % self._num_replicas == 0
            element = Element(source, call, position, is_cut)
            name = f"element {position} of iterator {number}"
            self._bindings[id(element)] = Binding(element, _NO_ACCESSOR, name, leaf.shape, leaf.dtype)
            values.append(capture.read(element))
        element = jax.tree_util.tree_unflatten(spec.tree, values)
        if spec.cut == "rows":
            return cut_rows(element, self._num_replicas)
        return stacked(element) if spec.cut == "elements" else element

    def _offered(
        self, source: PerWorkerInput, number: int, call: int
    ) -> Sequence[jax.ShapeDtypeStruct] | None:
        assert self._offer is not None
        if (number, call) not in self._offer.leaves:
            what = "an element" if source.is_iterator else "a value of the worker's own"
            raise TraceError(
                f"At {user_line()} the function takes {what} only if a dataset has ended or its elements have "
                "other shapes. The inputs of a function are fixed before it runs. Take it in any case, and "
                "use it where it is needed."
            )
        return self._offer.leaves[number, call]

    def binding_of(self, element: Element) -> Binding:
        return self._bindings[id(element)]

    @property
    def signature(self) -> str:
        """The signature of all elements that are taken."""
        return signature_of([[(x.shape, x.dtype) for x in self.taken[key]] for key in sorted(self.taken)])


def stacked(pytrees: Sequence[Any]) -> Any:
    """Stacks the pytrees of single replicas into one per-replica pytree."""
    return jax.tree_util.tree_map(lambda *parts: per_replica_stack(parts), *pytrees)


@final
class ReplicaParts:
    """The components of a per-replica value that a worker returns. Their shapes depend on the elements."""

    def __init__(self, parts: Sequence[Any]):
        self.parts = tuple(parts)


jax.tree_util.register_pytree_node(
    ReplicaParts, lambda value: (value.parts, None), lambda _, parts: ReplicaParts(parts)
)


def in_parts(pytree: Any) -> Any:
    """Converts a pytree for the way back from a worker. Its structure does not depend on the components' shapes."""
    return jax.tree_util.tree_map(
        lambda leaf: (
            ReplicaParts(leaf.values) if isinstance(leaf, PerReplica) and not leaf.is_equal else leaf
        ),
        pytree,
        is_leaf=lambda leaf: isinstance(leaf, PerReplica),
    )


def has_parts(tree: Any) -> bool:
    """True if ``joined_parts`` would change a pytree of this structure."""
    node = tree.node_data()
    return node is not None and (node[0] is ReplicaParts or any(map(has_parts, tree.children())))


def joined_parts(pytree: Any) -> Any:
    """Reverses ``in_parts``, on the host."""
    return jax.tree_util.tree_map(
        lambda leaf: (
            per_replica_stack([part if is_key(part) else np.asarray(part) for part in leaf.parts])
            if isinstance(leaf, ReplicaParts)
            else leaf
        ),
        pytree,
        is_leaf=lambda leaf: isinstance(leaf, (ReplicaParts, PerReplica)),
    )


_MAX_TAKEN = 1024  # each is a step in the program that is compiled
_NO_ACCESSOR: Any = None
_local = threading.local()


@contextlib.contextmanager
def taking_from(elements: Elements) -> Iterator[None]:
    """Returns a context in which ``next`` of an iterator is an input of the function for workers that is being
    traced.

    Raises:
      OutOfRangeError: The function takes an element that is missing, and does not handle that.
    """
    _local.elements = elements
    try:
        yield
    except EndOfElements as end:
        raise end.out_of_range() from None
    except RuntimeError as error:
        if isinstance(error.__cause__, EndOfElements):  # a generator raised it
            raise error.__cause__.out_of_range() from None
        raise
    finally:
        _local.elements = None


def current_elements() -> Elements | None:
    """Returns the elements of the function for workers that is being traced in this thread."""
    return getattr(_local, "elements", None)
