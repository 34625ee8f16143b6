"""Resources that a worker keeps for the coordinator: datasets and values, which the user's functions make here."""

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

from replicax._ps.transport import structures
from replicax._ps.worker.prefetched_elements import End, LeafIterator
from replicax._ps.worker.unbuilt import Cut, UnbuiltDataset
from replicax._src.program_kit.data import HostElements, InputContext, Prefetcher, host_value
from replicax._src.program_kit.errors import ContextError, InvalidArgumentError, missing_extra
from replicax._src.program_kit.variables import no_new_variables

_MOST_AHEAD: Final = 16
_LEAST_AHEAD: Final = 2
_BYTES_AHEAD: Final = 4_000_000

WORKER_INDEX: Final = "worker index"
"""A resource that every worker has: its index, int32."""

_worker_index: contextvars.ContextVar[int] = contextvars.ContextVar("worker_index")


def current_worker_index() -> int:
    """Returns the index of the worker whose function or dataset calls this.

    Raises:
      ContextError: It is called elsewhere.
    """
    try:
        return _worker_index.get()
    except LookupError:
        raise ContextError(
            "experimental_get_current_worker_index was called outside of a function that runs on a worker. "
            "Call it in a scheduled function, or in one that is given to create_per_worker_dataset or "
            "create_per_worker_value."
        ) from None


@dataclass(frozen=True)
class WorkerPlace:
    """The index of this worker and its number of replicas, for dataset functions."""

    index: int = 0
    num_workers: int = 1
    num_replicas_in_sync: int = 1

    @property
    def input_context(self) -> InputContext:
        """Returns the argument of dataset functions."""
        return InputContext(self.num_workers, self.index, self.num_replicas_in_sync)


class Resource(LeafIterator, Protocol):
    """A dataset or value of a worker, from which closures take arrays.

    Attributes:
      spec: The spec of one element, as JSON: its ``tree`` (``structures.described``), and (shape, dtype) of its
        ``leaves``. If replicas share it, ``cut`` says how; if each gets an element, the spec is that of a list of
        these.
    """

    spec: dict[str, Any]

    def close(self) -> None: ...


def dump(made: Any) -> np.ndarray:
    """Pickles a function or dataset with cloudpickle, as uint8. Objects of installed modules are sent by name.

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
            f"{made!r:.200} cannot be sent to workers: {type(error).__name__}: {error}. Give a function that "
            "opens the data itself, and closes over picklable objects only."
        ) from error
    return np.frombuffer(pickled.getvalue(), np.uint8)


def _flags_of_worker(values: Mapping[str, Any]) -> Any:
    """Returns ``absl.flags.FLAGS`` of a worker, or the coordinator's values if the worker has parsed none.

    FlagValues cannot be pickled.
    """
    flags = sys.modules.get("absl.flags")
    return flags.FLAGS if flags is not None and flags.FLAGS.is_parsed() else SimpleNamespace(**values)


def make(kind: str, pickled: np.ndarray, place: WorkerPlace) -> Resource:
    """Makes a resource that the coordinator asks for: ``kind`` "dataset" or "value", from the output of ``dump``.

    Unpickling runs code, so call it only with data of an authenticated coordinator.

    Raises:
      InvalidArgumentError: The function makes variables. Its own errors are raised unchanged.
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
            with no_new_variables("Creating variables in `dataset_fn` is not allowed."):
                made = _called(made, place)
        if isinstance(made, UnbuiltDataset):
            with no_new_variables("Creating variables in `dataset_fn` is not allowed."):
                cut, made = made.cut, made.open(place.input_context)
            if cut == "elements":
                made = HostElements(made, place.num_replicas_in_sync)
        resource = kinds[kind](made, place)
        if cut is not None:
            resource.spec["cut"] = cut
        return resource


@final
class DatasetResource:
    """The elements of a dataset, which a thread reads ahead. The first is read at once, for its spec, and kept.

    Args:
      dataset: Any dataset that ``HostElements`` takes, or these themselves.
      place: The index of this worker.
    """

    def __init__(self, dataset: Any, place: WorkerPlace):
        elements = dataset if isinstance(dataset, HostElements) else HostElements(dataset)
        first = next(elements)
        self.spec = _spec(elements.tree, first)
        self._first: list[np.ndarray] | None = first
        self._num_taken = 0
        num_bytes = sum(leaf.nbytes for leaf in first)
        num_ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, _BYTES_AHEAD // max(num_bytes, 1)))
        self._rest = Prefetcher(elements, lambda: num_ahead, scope=_on_worker(place.index))

    @property
    def is_ready(self) -> bool:
        """True if ``next`` does not wait."""
        return self._first is not None or self._rest.is_ready

    def next(self) -> list[np.ndarray] | End:
        """Returns the leaves of the next element, or the end."""
        if self._first is not None:
            leaves, self._first = self._first, None
        else:
            leaves = next(self._rest, None)
        if leaves is None:
            return End(
                f"The dataset of this worker has no more elements: it had {self._num_taken}. Schedule only as "
                "many functions as it has elements, or repeat the dataset."
            )
        self._num_taken += 1
        return leaves

    def close(self) -> None:
        """Ends the thread."""
        self._rest.close()


@final
class ValueResource:
    """A value of one worker: an iterator that returns it each time."""

    def __init__(self, value: Any, place: WorkerPlace):
        del place
        self._leaves, tree = host_value(value)
        self.spec = _spec(tree, self._leaves)

    @property
    def is_ready(self) -> bool:
        return True

    def next(self) -> list[np.ndarray]:
        """Returns the leaves of the value."""
        return self._leaves

    def close(self) -> None:
        pass


def _spec(tree: Any, leaves: Sequence[np.ndarray]) -> dict[str, Any]:
    described = structures.described(jax.tree.unflatten(tree, leaves))
    return {"tree": described, "leaves": [[list(leaf.shape), str(leaf.dtype)] for leaf in leaves]}


def _called(function: Callable[..., Any], place: WorkerPlace) -> Any:
    """Calls a function, with an InputContext if it takes one."""
    if not _takes_context(function):
        return function()
    return function(place.input_context)


def _takes_context(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some C functions have no signature
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
