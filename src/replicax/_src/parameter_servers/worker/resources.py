"""Resources that a worker keeps for the coordinator: datasets, and values of its own.

Both are made here, by the user's functions.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Protocol, final

import jax
import numpy as np

from replicax._src import context
from replicax._src.devices.split import InputContext
from replicax._src.errors import ContextError, InvalidArgumentError
from replicax._src.extras import missing_extra
from replicax._src.input.elements import END, EmptyDatasetError, Pass, as_arrays
from replicax._src.input.opening import open_elements
from replicax._src.input.prefetch import Prefetcher
from replicax._src.input.sources import PerReplicaPulls
from replicax._src.lowering import memory
from replicax._src.narrowing import narrowed
from replicax._src.parameter_servers.transport import structures
from replicax._src.parameter_servers.worker.elements import End, LeafIterator
from replicax._src.parameter_servers.worker.unbuilt import Cut, UnbuiltDataset

_MOST_AHEAD: Final = 16
_LEAST_AHEAD: Final = 2
_BYTES_AHEAD: Final = 4_000_000

WORKER_INDEX: Final = "worker index"
"""A resource that every worker has: its index, int32."""

_worker_index: contextvars.ContextVar[int] = contextvars.ContextVar("worker_index")


def current_worker_index() -> int:
    """The index of the worker in whose function, or in whose dataset, this is called.

    Raises:
      ContextError: Called elsewhere.
    """
    try:
        return _worker_index.get()
    except LookupError:
        raise ContextError(
            "experimental_get_current_worker_index was called outside of a function that runs on a worker. Call it in a function "
            "that is scheduled, or that is given to create_per_worker_dataset or create_per_worker_value."
        ) from None


@dataclass(frozen=True)
class WorkerPlace:
    """Which worker this is, and how many replicas it has, for dataset functions."""

    index: int = 0
    num_workers: int = 1
    num_replicas_in_sync: int = 1

    @property
    def input_context(self) -> InputContext:
        """The argument of dataset functions."""
        return InputContext(self.num_workers, self.index, self.num_replicas_in_sync)


class Resource(LeafIterator, Protocol):
    """Something of a worker that closures take arrays from.

    Attributes:
      spec: Of one element, as JSON: its ``tree`` (``structures.described``), and (shape, dtype) of its ``leaves``; and
        where replicas share it how: ``cut``. If each gets an element, it is the list of these.
    """

    spec: dict[str, Any]

    def close(self) -> None: ...


def dump(made: Any) -> np.ndarray:
    """A function or dataset as it travels: uint8, by cloudpickle. What is in an installed module goes by its name.

    Raises:
      MissingExtraError: cloudpickle is not installed.
      InvalidArgumentError: It cannot be pickled.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise missing_extra("A function that is sent to workers", "ps", "cloudpickle") from error

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            flags = sys.modules.get("absl.flags")
            if flags is not None and isinstance(obj, flags.FlagValues):
                return _flags_of_worker, (obj.flag_values_dict(),)
            return super().reducer_override(obj)

    pickled = io.BytesIO()
    try:
        Pickler(pickled).dump(made)
    except Exception as error:
        raise InvalidArgumentError(
            f"{made!r:.200} cannot be sent to workers: {type(error).__name__}: {error}. Give a function that opens the data "
            "itself: what it closes over has to be picklable."
        ) from error
    return np.frombuffer(pickled.getvalue(), np.uint8)


def _flags_of_worker(values: Mapping[str, Any]) -> Any:
    """``absl.flags.FLAGS`` of a worker; the coordinator's values if the worker has parsed none.

    FlagValues cannot be sent.
    """
    flags = sys.modules.get("absl.flags")
    return flags.FLAGS if flags is not None and flags.FLAGS.is_parsed() else SimpleNamespace(**values)


def make(kind: str, pickled: np.ndarray, place: WorkerPlace) -> Resource:
    """Makes what the coordinator asks a worker for: ``kind`` "dataset" or "value", of what ``dump`` gave.

    Only for what an authenticated coordinator has sent: unpickling runs its code.

    Raises:
      InvalidArgumentError: The function makes variables. What it raises itself is raised as it is.
    """
    kinds: dict[str, Callable[[Any, WorkerPlace], Resource]] = {
        "dataset": DatasetResource,
        "value": ValueResource,
    }
    cut: Cut | None = None
    if kind not in kinds:
        raise InvalidArgumentError(f"A worker makes resources of the kinds {', '.join(kinds)}; got {kind!r}.")
    made = pickle.loads(pickled.data)
    with _on_worker(place.index):
        if callable(made) and not isinstance(made, Iterable):
            with context.no_new_variables("Creating variables in `dataset_fn` is not allowed."):
                made = _called(made, place)
        if isinstance(made, UnbuiltDataset):
            with context.no_new_variables("Creating variables in `dataset_fn` is not allowed."):
                cut, made = made.cut, made.open(place.input_context)
            if cut == "elements":
                made = PerReplicaPulls.from_one(made, place.num_replicas_in_sync)
        resource = kinds[kind](made, place)
        if cut is not None:
            resource.spec["cut"] = cut
        return resource


@final
class DatasetResource:
    """The elements of a dataset, read ahead by a thread. The first is taken at once, for its spec, and kept.

    Args:
      dataset: Anything that ``input.opening`` opens; or the steps of several replicas.
    """

    def __init__(self, dataset: Any, place: WorkerPlace):
        if isinstance(dataset, PerReplicaPulls):
            self._leaves = _Leaves(dataset.iterate(), is_immutable=True)  # or copied there
        else:
            elements = open_elements(dataset)
            self._leaves = _Leaves(elements.iterate(), elements.is_immutable)
        first = next(self._leaves, None)
        if first is None:
            raise EmptyDatasetError(
                "The dataset has no elements, so what a scheduled function would get of it is not known."
            )
        self.spec = _spec(self._leaves.tree, first)
        self._first: list[np.ndarray] | None = first
        self._num_taken = 0
        num_bytes = sum(leaf.nbytes for leaf in first)
        num_ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, _BYTES_AHEAD // max(num_bytes, 1)))
        self._rest = Prefetcher(self._leaves, lambda: num_ahead, scope=_on_worker(place.index))

    @property
    def is_ready(self) -> bool:
        """True if ``next`` need not wait."""
        return self._first is not None or self._rest.is_ready

    def next(self) -> list[np.ndarray] | End:
        """The leaves of the next element; the end, if there is none any more."""
        if self._first is not None:
            leaves, self._first = self._first, None
        else:
            leaves = next(self._rest, None)
        if leaves is None:
            return End(
                f"The dataset of this worker has no more elements: it had {self._num_taken}. Schedule as many functions as "
                "it has elements, or let it repeat."
            )
        self._num_taken += 1
        return leaves

    def close(self) -> None:
        """Ends the thread."""
        self._rest.close()


@final
class ValueResource:
    """A value of one worker: an iterator that gives it each time."""

    def __init__(self, value: Any, place: WorkerPlace):
        del place
        value = as_arrays(value)
        leaves, tree = jax.tree.flatten(value)
        self._leaves = _own_narrowed(leaves, tree, "value", is_immutable=False)
        self.spec = _spec(structures.described(value), self._leaves)

    @property
    def is_ready(self) -> bool:
        return True

    def next(self) -> list[np.ndarray]:
        """The leaves of the value."""
        return self._leaves

    def close(self) -> None:
        pass


@final
class _Leaves:
    """The leaves of each element, as arrays that nobody else writes to.

    Attributes:
      tree: The structure of the first element.
    """

    def __init__(self, elements: Pass, is_immutable: bool):
        self._elements, self._is_immutable = elements, is_immutable
        self.tree: Any = None
        self._treedef: Any = None

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return self

    def __next__(self) -> list[np.ndarray]:
        element = next(self._elements, END)
        if element is END:
            raise StopIteration
        leaves, treedef = jax.tree.flatten(element)
        if self._treedef is None:
            self.tree, self._treedef = structures.described(element), treedef
        elif treedef != self._treedef:
            raise InvalidArgumentError(
                f"The first element of the dataset was {self._treedef}, and a later one is {treedef}. Let all have the same "
                "structure; shapes may differ."
            )
        return _own_narrowed(leaves, treedef, "batch", is_immutable=self._is_immutable)


def _own_narrowed(leaves: Sequence[Any], tree: Any, root: str, *, is_immutable: bool) -> list[np.ndarray]:
    """See ``narrowed`` and ``_own``. What was narrowed is a fresh array, which is not copied again."""
    pairs = zip(leaves, narrowed(leaves, tree, root), strict=True)
    return [_own(leaf, is_immutable or leaf is not before) for before, leaf in pairs]


def _own(leaf: Any, is_immutable: bool) -> np.ndarray:
    """A leaf as it is sent or given to a program: C-contiguous, and nobody else's to write to."""
    array = np.asarray(leaf)
    if not array.flags.c_contiguous:
        return np.array(array, order="C")
    return array if is_immutable or isinstance(leaf, jax.Array) else memory.copy(array)


def _spec(tree: structures.Structure, leaves: Sequence[np.ndarray]) -> dict[str, Any]:
    return {"tree": tree, "leaves": [[list(leaf.shape), str(leaf.dtype)] for leaf in leaves]}


def _called(function: Callable[..., Any], place: WorkerPlace) -> Any:
    """Calls a function, which may take an InputContext."""
    if not _takes_context(function):
        return function()
    return function(place.input_context)


def _takes_context(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions of C do not tell
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in by_position and each.default is inspect.Parameter.empty for each in parameters)


@contextlib.contextmanager
def _on_worker(index: int) -> Iterator[None]:
    token = _worker_index.set(index)
    try:
        yield
    finally:
        _worker_index.reset(token)
