"""Distributed datasets and their iterators. How steps are placed on devices is a Placer that they are given."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from replicax._src import jax_compat
from replicax._src.errors import InvalidArgumentError, ReplicaxError
from replicax._src.input.elements import NotResumableError, Pass
from replicax._src.input.order import INFINITE, Cardinality
from replicax._src.input.prefetch import Prefetcher
from replicax._src.input.sources import Source

_GROUPS_AHEAD: Final = 2
# Where steps are small and quickly read, waking a thread for each costs more than reading it (35 µs and 115 µs in a
# loop of 1 ms steps): so it reads several at a time.
_MOST_AHEAD: Final = 16
_BYTES_AHEAD: Final = 2**20

iteration_guard: Final[list[Callable[[], None]]] = []
"""Called before a distributed dataset is iterated and before each element; they raise to forbid it."""


class OutOfRangeError(ReplicaxError, LookupError):
    """``get_next`` was called after the last element."""


class ClosedIteratorError(ReplicaxError, RuntimeError):
    """A distributed iterator was used after ``close()``."""


class EmptyOptionalError(InvalidArgumentError):
    """The value of an Optional that has none was asked for."""


class Placer(Protocol):
    """Puts what a source yields for one step on the devices of the replicas."""

    def place(self, step: Any) -> Any:
        """What one step of the loop gets."""
        ...

    def stack(self, steps: Sequence[Any], capacity: int) -> Any:
        """Several steps of one signature, joined along a new dim of size ``capacity``, for one program that takes
        one after the other."""
        ...

    def signature(self, step: Any) -> Hashable:
        """Equal for steps that can be stacked."""
        ...


class DistributedDataset:
    """A dataset whose elements are placed on the replicas of a strategy.

    Make one with ``Strategy.experimental_distribute_dataset`` or ``distribute_datasets_from_function``.
    Iterating it starts again from the first element each time. Call ``map``, ``batch`` and the like before
    it is distributed; it has no transformations. ``print`` shows what it does.
    """

    def __init__(self, source: Source, placer: Placer, *, buffer_size: int = 1, places_ahead: bool = True):
        """Private: made by strategies.

        Args:
          source: The steps, as they come from the user's dataset.
          placer: From what the source yields for one step to what one step of the loop gets.
          buffer_size: How many elements wait, at least: small ones of arrays in memory are read further ahead.
          places_ahead: They wait on the devices, else on the host.
        """
        self._source = source
        self._placer = placer
        self._num_ahead = buffer_size + 1  # one more than may wait is being read
        step_bytes = source.cheap_step_bytes
        if step_bytes is not None:
            self._num_ahead = max(self._num_ahead, min(_MOST_AHEAD, _BYTES_AHEAD // max(step_bytes, 1)))
        self._places_ahead = places_ahead

    @property
    def num_replicas(self) -> int:
        """R, the number of replicas that the elements are for."""
        return self._source.num_replicas

    @property
    def cardinality(self) -> Cardinality | None:
        """The number of elements, ``math.inf`` if it never ends, None if it is not known beforehand."""
        return self._source.cardinality

    @functools.cached_property
    def element_spec(self) -> Any:
        """The nest of ``PerReplicaSpec`` that each element fits; looks at the first one if need be.

        Raises:
          EmptyDatasetError: There is no element to look at.
        """
        return self._source.element_spec()

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self)

    def __len__(self) -> int:
        if self.cardinality is None:
            raise TypeError(
                "This DistributedDataset has no len(): its source does not say how many batches it has."
            )
        if self.cardinality == INFINITE:
            raise TypeError("This DistributedDataset repeats for ever and has no len().")
        return int(self.cardinality)

    def __bool__(self) -> bool:
        return True  # a dataset is one whatever its len(), also where that raises

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Goes through the dataset once and returns the last state.

        Args:
          initial_state: The state before the first element; returned as it is if there is none.
          reduce_func: ``(state, element) -> state``, called in cross-replica context.
        """
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def __repr__(self) -> str:
        where = "on the devices" if self._places_ahead else "on the host"
        described = {
            **self._source.describe(),
            "steps": _steps_text(self.cardinality),
            "prefetch": f"{self._num_ahead} steps, {where}",
        }
        lines = [f"  {name + ':':<10}{value}" for name, value in described.items()]
        return "\n".join(["DistributedDataset", *lines])


def _steps_text(cardinality: Cardinality | None) -> str:
    if cardinality is None:
        return "not known beforehand"
    return "without end" if cardinality == INFINITE else str(cardinality)


@dataclass(frozen=True)
class _Step:
    """One step that was read: as the source yielded it, and the position after it (None: not resumable)."""

    on_host: Any
    state: Any


@dataclass(frozen=True)
class StackedSteps:
    """Steps of one signature, joined for one program.

    Attributes:
      value: As ``Placer.stack`` gave it.
      start: The first step that has not been taken.
      stop: The step after the last that may be taken now.
      capacity: For how many steps there is room.
    """

    value: Any
    start: int
    stop: int
    capacity: int


class DistributedIterator:
    """Goes through a DistributedDataset once. Call it in cross-replica context only.

    A thread reads the dataset ahead. It ends with the data, with ``close()`` (or the end of a ``with``), or
    when the iterator is dropped.
    """

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self._is_closed = False
        self._prefetcher: Prefetcher | None = None
        self._start()

    @property
    def element_spec(self) -> Any:
        """As ``DistributedDataset.element_spec``."""
        return self._dataset.element_spec

    def initialize(self) -> None:
        """Starts again from the first element."""
        self._check_may_read()
        self._end_thread()
        self._start()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        self._check_may_read()
        if self._group_size or self._prefetcher is None:
            self._read_in_groups_of(0)
        step, placed = self._take()
        self._state = step.state
        return placed if self._dataset._places_ahead else self._dataset._placer.place(step.on_host)

    def take_stacked(self, group_size: int, num_steps: int) -> StackedSteps:
        """Takes at most ``num_steps`` of the next steps, fewer where the shapes change or the data ends.

        Args:
          group_size: How many steps are read and placed together.
          num_steps: At most ``group_size``.

        Raises:
          StopIteration: There is no further step.
        """
        self._check_may_read()
        if self._group is None:
            if self._group_size != group_size or self._prefetcher is None:
                self._read_in_groups_of(group_size)
            self._group, self._group_value = self._take()
            self._num_taken = 0
        group = self._group
        assert group is not None
        start, stop = self._num_taken, min(self._num_taken + num_steps, len(group))
        stacked = StackedSteps(self._group_value, start, stop, _capacity(group, self._group_size))
        self._state = group[stop - 1].state
        self._num_taken = stop
        if stop == len(group):
            self._group = self._group_value = None
        return stacked

    def get_state(self) -> dict[str, Any]:
        """Returns where the iterator is, as what can be written as JSON: give it to ``set_state``.

        It is the position after the last element that was returned; what was read ahead does not count. With
        it go the number of the epoch and the seeds of shuffles, so that later epochs are the same too.

        Raises:
          NotResumableError: The dataset cannot be continued from a position; the message says what can.
        """
        self._check_may_read()
        if self._state is None:
            self._pass.get_state()  # says why
        return {"version": 1, "elements": self._state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that ``get_state`` returned for an equal dataset, maybe in another process.

        Raises:
          NotResumableError: The dataset cannot be continued, or the state is of another dataset; the iterator
            stays where it is.
        """
        self._check_may_read()
        if not isinstance(state, dict) or state.get("version") != 1 or "elements" not in state:
            raise NotResumableError(
                f"set_state takes what get_state returned, a dict with version 1; got {state!r}."
            )
        new = self._dataset._source.iterate()
        new.set_state(state["elements"])
        self._end_thread()
        self._begin(new, state["elements"])

    def close(self) -> None:
        """Ends the thread that reads ahead. Afterwards the iterator cannot be used. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._end_thread()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_may_read(self) -> None:
        for guard in iteration_guard:
            guard()
        if self._is_closed:
            raise ClosedIteratorError(
                "This DistributedIterator was closed. Start again with iter(dataset); or close it later."
            )

    def _start(self) -> None:
        for guard in iteration_guard:
            guard()
        new = self._dataset._source.iterate()
        self._begin(new, _state_of(new))

    def _begin(self, elements: Pass, state: Any) -> None:
        self._pass = elements
        self._state = state
        self._steps = _Steps(elements, is_resumable=state is not None)
        self._prefetcher = None
        self._group_size = 0  # steps are placed one by one
        self._group: list[_Step] | None = None  # the group of which steps are left to take, and its value
        self._group_value: Any = None
        self._num_taken = 0

    def _take(self) -> Any:
        assert self._prefetcher is not None
        try:
            return next(self._prefetcher)
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(
                f"(raised while the dataset was read ahead: {self._dataset._source.describe()['source']})"
            )
            raise

    def _read_in_groups_of(self, size: int) -> None:
        """Starts the thread; what an earlier one has read is kept."""
        self._end_thread()
        self._group_size = size
        placer = self._dataset._placer
        if size:
            placed: Iterator[Any] = _groups(self._steps, size, placer)
        elif self._dataset._places_ahead:
            placed = ((step, placer.place(step.on_host)) for step in self._steps)
        else:
            placed = ((step, None) for step in self._steps)
        depth = self._dataset._num_ahead if not size else min(self._dataset._num_ahead, _GROUPS_AHEAD)
        # JAX's options of this thread (64-bit mode) hold in that one too.
        options = jax_compat.with_thread_options(jax_compat.thread_options())
        self._prefetcher = Prefetcher(placed, depth, max(depth // 2, 1), options)

    def _end_thread(self) -> None:
        """Ends the thread, if there is one; the steps that it has read and that were not taken come next."""
        unread: list[_Step] = []
        error = None
        if self._group is not None:
            unread += self._group[self._num_taken :]
            self._group = self._group_value = None
        if self._prefetcher is not None:
            items, error = self._prefetcher.close()
            self._prefetcher = None
            for steps, _ in items:
                unread += steps if self._group_size else [steps]
        self._steps.give_back(unread, error)

    def get_next(self) -> Any:
        """Returns the next element.

        Raises:
          OutOfRangeError: There is none.
        """
        optional = self.get_next_as_optional()
        if not optional.has_value():
            raise OutOfRangeError(
                "get_next() was called after the last element. Loop with `for`, which ends by itself, or ask "
                "get_next_as_optional().has_value(), or start again with iter(dataset)."
            )
        return optional.get_value()

    def get_next_as_optional(self) -> Optional:
        """Returns the next element, or at the end an Optional without a value."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


class Optional:
    """An element of a dataset, or its absence after the last one."""

    def __init__(self, *value: Any):
        """Holds the value, if one is given."""
        (self._value,) = value or (_NO_VALUE,)

    def has_value(self) -> bool:
        """Whether there was an element."""
        return self._value is not _NO_VALUE

    def get_value(self) -> Any:
        """Returns the element.

        Raises:
          EmptyOptionalError: There was none.
        """
        if not self.has_value():
            raise EmptyOptionalError(
                "This Optional has no value: the dataset had ended. Ask has_value() first."
            )
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"


_NO_VALUE: Final = object()


class _Steps:
    """The steps of a pass, each with the position after it; steps can be given back."""

    def __init__(self, elements: Pass, *, is_resumable: bool):
        self._elements, self._is_resumable = elements, is_resumable
        self._unread: collections.deque[_Step] = collections.deque()
        self._error: BaseException | None = None

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> _Step:
        if self._unread:
            return self._unread.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        on_host = next(self._elements)
        return _Step(on_host, self._elements.get_state() if self._is_resumable else None)

    def give_back(self, steps: Sequence[_Step], error: BaseException | None = None) -> None:
        """Makes ``steps`` the next ones, and ``error`` what comes after them if it is not None."""
        self._unread.extendleft(reversed(steps))
        self._error = error or self._error


def _state_of(elements: Pass) -> Any:
    try:
        return elements.get_state()
    except NotResumableError:
        return None


def _groups(steps: _Steps, size: int, placer: Placer) -> Iterator[tuple[list[_Step], Any]]:
    """Yields up to ``size`` adjacent steps of one signature, and their stack."""
    while True:
        group = list(itertools.islice(steps, 1))
        if not group:
            return
        signature = placer.signature(group[0].on_host)
        for step in itertools.islice(steps, size - 1):
            if placer.signature(step.on_host) != signature:
                steps.give_back([step])
                break
            group.append(step)
        yield group, placer.stack([step.on_host for step in group], _capacity(group, size))


def _capacity(group: Sequence[_Step], size: int) -> int:
    """One program serves all numbers of steps, but for a single one, which needs no room for others."""
    return size if len(group) > 1 else 1
