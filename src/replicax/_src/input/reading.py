"""Reader: prefetches and places the steps of one pass, one by one or several together.

A thread reads steps and places them in the form of the last request. A step in another form is placed again when it is
taken, so no step is lost when single steps and groups alternate.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from replicax._src.cluster.counters import counters
from replicax._src.input.agreed_steps import AgreedPass
from replicax._src.input.elements import NotResumableError, Pass
from replicax._src.input.prefetch import Prefetcher
from replicax._src.input.sources import num_rows
from replicax._src.jax_internals import jax_compat


class Placer(Protocol):
    """Puts the step of a source on the devices of the replicas."""

    @property
    def topology(self) -> Any:
        """The replicas' devices."""
        ...

    def place(self, step: Any) -> Any:
        """Returns the value that one step of the loop gets."""
        ...

    def stack(self, steps: Sequence[Any], capacity: int) -> Any:
        """Joins several steps of one signature along a new dim of size ``capacity``, for one program that runs them in
        sequence.
        """
        ...

    def signature(self, step: Any) -> Hashable:
        """Returns a value that is equal for steps that can be stacked."""
        ...


@dataclass(frozen=True, slots=True)
class _Step:
    """One step as the source yielded it, and the position after it (None: not resumable)."""

    on_host: Any
    state: Any


@dataclass(frozen=True, slots=True)
class _Item:
    """An item from the thread: one step or a group of steps, and its form.

    Attributes:
      form: See ``_form``. Only a consumer that requests this form can use the value.
    """

    steps: list[_Step]
    value: Any
    form: Hashable


def _form(group_size: int) -> Hashable:
    """Returns the form of groups of a size (0: single steps), in the current JAX mode, which placement depends on."""
    return group_size, jax.config.read("jax_enable_x64")


@dataclass(frozen=True)
class StackedSteps:
    """Steps of one signature, joined for one program.

    Attributes:
      value: The result of ``Placer.stack``.
      start: The first step that has not been taken.
      stop: The step after the last that may be taken now.
      capacity: The number of steps that fit.
    """

    value: Any
    start: int
    stop: int
    capacity: int


class _Items:
    """The items that the thread reads, in the form of the latest request. It continues after an error if the pass
    can.
    """

    def __init__(self, elements: Pass, is_resumable: bool, placer: Placer, places_ahead: bool):
        self._elements, self._is_resumable = elements, is_resumable
        self._placer, self._places_ahead = placer, places_ahead
        self._unread: collections.deque[_Step] = collections.deque()
        self._error: BaseException | None = None  # an error while a group was being read
        self.is_stopped = threading.Event()
        self.group_size = 0  # set by the consumer

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> _Item:
        size = self.group_size
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        steps = [self._read()]
        signature = self._placer.signature(steps[0].on_host) if size > 1 else None
        try:
            while len(steps) < size and not self.is_stopped.is_set():
                step = self._read()
                if self._placer.signature(step.on_host) != signature:
                    self._unread.append(step)
                    break
                steps.append(step)
        except StopIteration:
            pass  # the next call raises it again
        except BaseException as error:
            self._error = error  # raised after the steps before it
        return self.placed(steps, size)

    def placed(self, steps: list[_Step], size: int) -> _Item:
        """Places steps of one signature as a group of the given size, or as a single step."""
        value = None
        if size:
            value = self._placer.stack([step.on_host for step in steps], _capacity(len(steps), size))
        elif self._places_ahead:
            value = self._placer.place(steps[0].on_host)
        return _Item(steps, value, _form(size))

    def _read(self) -> _Step:
        if self._unread:
            return self._unread.popleft()
        on_host = next(self._elements)
        return _Step(on_host, self._elements.get_state() if self._is_resumable else None)


def _capacity(num_steps: int, size: int) -> int:
    """Returns the capacity of the program. One program serves all numbers of steps, except that a single step needs
    capacity 1.
    """
    return size if num_steps > 1 else 1


class Reader:
    """Takes the steps of a pass, in order.

    Args:
      elements: The pass.
      num_ahead: The number of single steps to prefetch. Only one group is prefetched.
      places_ahead: True prefetches steps to the devices, False to the host.
    """

    def __init__(self, elements: Pass, placer: Placer, *, num_ahead: int, places_ahead: bool):
        self._elements, self._placer = elements, placer
        self._num_ahead, self._places_ahead = num_ahead, places_ahead
        self._state = _state_of(elements)  # the position after the last taken step
        self._items = _Items(elements, self._state is not None, placer, places_ahead)
        if isinstance(elements, AgreedPass):
            elements.is_stopped = self._items.is_stopped
        self._prefetcher: Prefetcher | None = None
        self._lock = threading.Lock()
        # Steps that were read in a form that is no longer requested.
        self._unread: collections.deque[_Step] = collections.deque()
        self._item: _Item | None = None  # the item that still has steps to take
        self._num_taken = 0

    def take(self) -> Any:
        """Takes the next step, placed on the devices.

        Raises:
          StopIteration: The pass has no further step.
        """
        with self._lock:
            item = self._item_of(0)
            value = item.value if self._places_ahead else self._placer.place(item.steps[0].on_host)
            _count(item.steps[:1])
            self._go_on(1)
            return value

    def take_on_host(self) -> Any:
        """Takes the next step as the source yielded it, for a reader that does not prefetch to devices.

        Raises:
          StopIteration: The pass has no further step.
        """
        with self._lock:
            on_host = self._item_of(0).steps[0].on_host
            self._go_on(1)
            return on_host

    def take_group(self, group_size: int, num_steps: int) -> StackedSteps:
        """Takes at most ``num_steps`` of the next steps. Takes fewer if the shapes change or the data end.

        Args:
          group_size: The number of steps that are read and placed together.
          num_steps: The maximal number of steps to take, at most ``group_size``.

        Raises:
          StopIteration: The pass has no further step.
        """
        with self._lock:
            item = self._item_of(group_size)
            start, stop = self._num_taken, min(self._num_taken + num_steps, len(item.steps))
            _count(item.steps[start:stop])
            self._go_on(stop)
            return StackedSteps(item.value, start, stop, _capacity(len(item.steps), group_size))

    def get_state(self) -> Any:
        """Returns the position after the last taken step.

        Raises:
          NotResumableError: The pass has no position.
        """
        return (
            self._elements.get_state() if self._state is None else self._state
        )  # get_state raises the reason

    def close(self) -> None:
        """Ends the thread and drops the steps that it has read."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _item_of(self, size: int) -> _Item:
        """Returns the item with the next step, in groups of this size. The thread uses this size from now on."""
        self._items.group_size = size
        if self._item is not None and self._item.form != _form(size):
            self._unread.extendleft(reversed(self._item.steps[self._num_taken :]))
            self._item = None
        if self._item is None:
            self._item, self._num_taken = self._next_of(size), 0
        return self._item

    def _go_on(self, num_taken: int) -> None:
        """Records the number of steps taken from the item."""
        assert self._item is not None
        if isinstance(self._elements, AgreedPass):
            self._elements.note_taken(num_taken - self._num_taken)
        self._num_taken, self._state = num_taken, self._item.steps[num_taken - 1].state
        if num_taken == len(self._item.steps):
            self._item = None

    def _next_of(self, size: int) -> _Item:
        if not self._unread:
            item = self._next_item()
            if item.form == _form(size):
                return item
            self._unread.extend(item.steps)
        signature = self._placer.signature(self._unread[0].on_host)
        first = itertools.islice(self._unread, max(size, 1))
        alike = itertools.takewhile(lambda step: self._placer.signature(step.on_host) == signature, first)
        item = self._items.placed(list(alike), size)
        for _ in item.steps:
            self._unread.popleft()
        return item

    def _next_item(self) -> _Item:
        if self._prefetcher is None:
            items, num_ahead = self._items, self._num_ahead
            self._prefetcher = Prefetcher(
                items,
                lambda: 1 if items.group_size else num_ahead,
                items.is_stopped,
                # The prefetching thread inherits this thread's JAX options (64-bit mode).
                jax_compat.with_thread_options(jax_compat.thread_options()),
            )
        if isinstance(self._elements, AgreedPass):
            with self._elements.waiting():
                return next(self._prefetcher)
        return next(self._prefetcher)


def _count(steps: Sequence[_Step]) -> None:
    """Counts steps that a loop takes, and their rows for the replicas of this process."""
    counters.num_batches += len(steps)
    counters.num_examples += sum(num_rows(step.on_host) for step in steps)


def _state_of(elements: Pass) -> Any:
    try:
        return elements.get_state()
    except NotResumableError:
        return None
