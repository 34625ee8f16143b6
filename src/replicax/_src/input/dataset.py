"""Distributed datasets and their iterators. A Placer decides how their steps are placed on devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax

from replicax._src.cluster.counters import counters
from replicax._src.cluster.loop_progress import PASS, LoopProgress
from replicax._src.drawing import html
from replicax._src.input.agreed_steps import agreed
from replicax._src.input.element_specs import INFINITE, Cardinality
from replicax._src.input.elements import OF_WORKERS, NotResumableError, Pass
from replicax._src.input.reading import Placer, Reader, StackedSteps
from replicax._src.input.sources import Source
from replicax._src.scope import context
from replicax._src.tracing.capture import current_capture
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError

# For small steps, waking a thread for each one costs more than reading it (35 µs and 115 µs in a loop of 1 ms steps).
# So the thread reads several at a time.
_MOST_AHEAD: Final = 16
_BYTES_AHEAD: Final = 2**20


class IteratedInTrace(BaseException):
    """A distributed dataset was iterated while an ``rx.function`` was traced. A BaseException, so that a user's
    ``except Exception`` does not swallow it.
    """


def _check_may_iterate() -> None:
    context.check_may_iterate()
    capture = current_capture()
    if capture is not None and not capture.is_replica:
        raise IteratedInTrace


class OutOfRangeError(ReplicaxError, LookupError):
    """``get_next`` was called after the last element."""


class ClosedIteratorError(ReplicaxError, RuntimeError):
    """A distributed iterator was used after ``close()``."""


class EmptyOptionalError(InvalidArgumentError):
    """The value of an empty Optional was requested."""


class DistributedDataset:
    """A dataset whose elements are placed on the replicas of a strategy.

    Make one with ``Strategy.experimental_distribute_dataset`` or ``distribute_datasets_from_function``. Iterating it
    starts again from the first element each time. Call ``map``, ``batch`` and similar methods before it is distributed;
    it has no transformations. ``print`` shows its settings.
    """

    def __init__(self, source: Source, placer: Placer, *, buffer_size: int = 1, places_ahead: bool = True):
        """Private. Strategies make distributed datasets.

        Args:
          source: The steps of the user's dataset.
          placer: Converts a step of the source to the value that a step of the loop gets.
          buffer_size: The least number of prefetched elements. More are prefetched if they are small and in memory.
          places_ahead: True prefetches to the devices, False to the host.
        """
        self._source = source
        self._placer = placer
        self._num_ahead = buffer_size + 1  # the thread is also reading one more element
        step_bytes = source.cheap_step_bytes
        if step_bytes is not None:
            self._num_ahead = max(self._num_ahead, min(_MOST_AHEAD, _BYTES_AHEAD // max(step_bytes, 1)))
        self._places_ahead = places_ahead
        self._num_passes = 0

    @property
    def num_replicas(self) -> int:
        """R, the number of replicas that get an element."""
        return self._source.num_replicas

    @property
    def cardinality(self) -> Cardinality | None:
        """The number of elements; ``math.inf`` if it never ends, None if the number is not known in advance."""
        return self._source.cardinality

    @functools.cached_property
    def element_spec(self) -> Any:
        """The pytree of ``PerReplicaSpec`` that each element fits. Reads the first element if necessary.

        Raises:
          EmptyDatasetError: The dataset has no elements to derive it from.
        """
        return self._source.element_spec()

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self)

    def __len__(self) -> int:
        if self.cardinality is None:
            raise TypeError(
                "This DistributedDataset has no len(): the number of batches of its source is unknown."
            )
        if self.cardinality == INFINITE:
            raise TypeError("This DistributedDataset is infinite and has no len().")
        return int(self.cardinality)

    def __bool__(self) -> bool:
        return True  # a dataset is true for every len(), also if that raises

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Goes through the dataset once and returns the last state.

        Args:
          initial_state: The state before the first element. It is returned if there are no elements.
          reduce_func: ``(state, element) -> state``, called in cross-replica context.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    @property
    def source(self) -> Source:
        """The steps on the host."""
        return self._source

    @property
    def placer(self) -> Placer:
        """The placer of its steps."""
        return self._placer

    def start(self) -> Pass:
        """Starts a pass through its steps. All processes must start it, and it ends for all at the same step."""
        elements, topology = self._source.iterate(), self._placer.topology
        if topology.peers is None or topology.survivors is not None:  # survivors all read whole batches
            return elements
        return agreed(self._source, elements, topology.peers)

    def begin_pass(self) -> LoopProgress:
        """Notes for the status that a loop begins a pass. The loop updates the position that this returns."""
        length, progress = self.cardinality, LoopProgress(PASS)
        progress.begin_turn(self._num_passes, None if length is None or length == INFINITE else int(length))
        self._num_passes += 1
        counters.begin_pass(progress)
        return progress

    def move_pass(self, progress: LoopProgress, saved: Mapping[str, int] | None) -> None:
        """Moves the position of a pass to a saved one; older checkpoints have none."""
        if saved is None:
            progress.num_batches = None
        else:
            progress.number, progress.batch = saved["pass"], saved["batch"]
            self._num_passes = progress.number + 1

    def reader_of(self, elements: Pass, *, places_ahead: bool | None = None) -> Reader:
        """Returns the reader of a pass for one iterator.

        Steps are prefetched to the place that the dataset uses, unless ``places_ahead`` overrides it.
        """
        places_ahead = self._places_ahead if places_ahead is None else places_ahead
        return Reader(elements, self._placer, num_ahead=self._num_ahead, places_ahead=places_ahead)

    def __repr__(self) -> str:
        lines = [f"  {name + ':':<10}{value}" for name, value in self._described().items()]
        return "\n".join(["DistributedDataset", *lines])

    def _repr_html_(self) -> str:
        title = f"DistributedDataset for {self.num_replicas} replica{'s' * (self.num_replicas != 1)}"
        # Only a declared spec is used, because reading the first element would have side effects.
        known = {"element_spec": vars(self)["element_spec"]} if "element_spec" in vars(self) else {}
        return html.page(title, html.facts({**self._described(), **known}))

    def _described(self) -> dict[str, str]:
        where = "on the devices" if self._places_ahead else "on the host"
        return {
            **self._source.describe(),
            "steps": _steps_text(self.cardinality),
            "prefetch": f"{self._num_ahead} steps, {where}",
        }


def _steps_text(cardinality: Cardinality | None) -> str:
    if cardinality is None:
        return "not known beforehand"
    return "without end" if cardinality == INFINITE else str(cardinality)


_num_taken = 0


def num_elements_taken() -> int:
    """Returns the number of elements taken by all distributed iterators of this process. A change shows that something
    was read.
    """
    return _num_taken


def _count_taken() -> None:
    global _num_taken
    _num_taken += 1


class DistributedIterator:
    """A single pass through a DistributedDataset. Use it in cross-replica context only.

    A thread prefetches the dataset. It ends with the data, with ``close()`` (or the end of a ``with``), or when the
    iterator is dropped. An error of the dataset is raised in place of its element. The next call continues after it if
    the dataset can (a generator has ended).
    """

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self._is_closed = False
        self._reader = self._start()
        self._progress = dataset.begin_pass()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<DistributedIterator of {self._dataset.source.describe()['source']}{state}>"

    @property
    def dataset(self) -> DistributedDataset:
        """The dataset of this iterator."""
        return self._dataset

    @property
    def element_spec(self) -> Any:
        """The same as ``DistributedDataset.element_spec``."""
        return self._dataset.element_spec

    def initialize(self) -> None:
        """Restarts from the first element."""
        self._check_may_read()
        self._reader.close()
        self._reader = self._start()
        self._progress = self._dataset.begin_pass()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        self._check_may_read()
        element = self._explained(self._reader.take)
        _count_taken()
        self._progress.note()
        return element

    def take_stacked(self, group_size: int, num_steps: int) -> StackedSteps:
        """Takes several steps together for ``Strategy.run_steps``; see ``Reader.take_group``."""
        self._check_may_read()
        steps = self._explained(self._reader.take_group, group_size, num_steps)
        _count_taken()
        self._progress.note(steps.stop - steps.start)
        return steps

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the iterator as a JSON value for ``set_state``.

        It is the position after the last element that was returned, regardless of prefetched elements. It includes the
        number of the epoch and the seeds of shuffles, so later epochs are the same too.

        Raises:
          NotResumableError: The dataset cannot resume from a position. The message tells which datasets can.
        """
        self._check_may_read()
        progress = {"pass": self._progress.number, "batch": self._progress.batch}
        return {"version": 1, "elements": self._reader.get_state(), "progress": progress}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position that ``get_state`` returned for an equal dataset, also in another process.

        Raises:
          NotResumableError: The dataset cannot resume, or the state is of another dataset. The iterator does not move.
        """
        self._check_may_read()
        if not isinstance(state, dict) or state.get("version") != 1 or "elements" not in state:
            raise NotResumableError(
                f"set_state needs a result of get_state, a dict with version 1; got {state!r}."
            )
        new = self._dataset.start()
        new.set_state(state["elements"])
        self._reader.close()
        self._reader = self._dataset.reader_of(new)
        self._dataset.move_pass(self._progress, state.get("progress"))

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns a position for ``set_state`` in every worker, from those of another number of workers.

        Checkpoints call it.
        """
        return {**states[0], "elements": {OF_WORKERS: [state["elements"] for state in states]}}

    def close(self) -> None:
        """Ends the prefetching thread. Afterwards the iterator cannot be used. It may be called twice.

        Waits at most 5 s for the element that is being read.
        """
        if not self._is_closed:
            self._is_closed = True
            self._reader.close()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _explained(self, read: Callable[..., Any], *args: int) -> Any:
        counters.begin_reading()
        try:
            return read(*args)
        except StopIteration:
            if self._is_closed:
                raise _closed() from None
            raise
        except Exception as error:
            source = self._dataset.source.describe()["source"]
            error.add_note(f"(raised while the dataset was read ahead: {source})")
            raise
        finally:
            counters.end_reading()

    def _check_may_read(self) -> None:
        _check_may_iterate()
        if self._is_closed:
            raise _closed()

    def _start(self) -> Reader:
        _check_may_iterate()
        return self._dataset.reader_of(self._dataset.start())

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
          OutOfRangeError: The data have ended.
        """
        optional = self.get_next_as_optional()
        if not optional.has_value():
            raise OutOfRangeError(
                "get_next() was called after the last element. Loop with `for`, check "
                "get_next_as_optional().has_value(), or start again with iter(dataset)."
            )
        return optional.get_value()

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, or an Optional without a value at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


class Optional:
    """An element of a dataset, or its absence after the last one."""

    def __init__(self, *value: Any):
        """Holds a value if one is given."""
        (self._value,) = value or (_NO_VALUE,)

    def has_value(self) -> bool:
        """True if there was an element."""
        return self._value is not _NO_VALUE

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
          EmptyOptionalError: The data had ended.
        """
        if not self.has_value():
            raise EmptyOptionalError(
                "This Optional has no value: the dataset had ended. Check has_value() first."
            )
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"


_NO_VALUE: Final = object()
jax.tree_util.register_pytree_node(
    Optional,
    lambda optional: ((optional.get_value(),) if optional.has_value() else (), None),
    lambda _, value: Optional(*value),
)


def _closed() -> ClosedIteratorError:
    return ClosedIteratorError(
        "This DistributedIterator was closed. Start again with iter(dataset); or close it later."
    )
