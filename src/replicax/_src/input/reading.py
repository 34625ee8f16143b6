"""Reader: the steps of one pass, read and placed ahead, one by one or several together.

A thread reads steps and places them in the form that the loop asked for last. What it has read in another form
is placed anew when it is taken, so that no step is lost when single steps and groups take turns.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from replicax._src import jax_compat
from replicax._src.input.agreed import AgreedPass
from replicax._src.input.elements import NotResumableError, Pass
from replicax._src.input.prefetch import Prefetcher


class Placer(Protocol):
    """Puts what a source yields for one step on the devices of the replicas."""

    @property
    def topology(self) -> Any:
        """The replicas' devices."""
        ...

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


@dataclass(frozen=True, slots=True)
class _Step:
    """One step that was read: as the source yielded it, and the position after it (None: not resumable)."""

    on_host: Any
    state: Any


@dataclass(frozen=True, slots=True)
class _Item:
    """What the thread hands over: one step, or a group of them, and how it was placed.

    Attributes:
      form: See ``_form``. The value is of use only to who asks for this form.
    """

    steps: list[_Step]
    value: Any
    form: Hashable


def _form(group_size: int) -> Hashable:
    """Groups of a size (0: single steps), in the mode of JAX in which they are placed."""
    return group_size, jax.config.read("jax_enable_x64")


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


class _Items:
    """What the thread reads: items of the form that is asked for now. It goes on after an error, if the pass does."""

    def __init__(self, elements: Pass, is_resumable: bool, placer: Placer, places_ahead: bool):
        self._elements, self._is_resumable = elements, is_resumable
        self._placer, self._places_ahead = placer, places_ahead
        self._unread: collections.deque[_Step] = collections.deque()
        self._error: BaseException | None = None  # that came while a group was being read
        self.is_stopped = threading.Event()
        self.group_size = 0  # set by who takes the items

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> _Item:
        size = self.group_size
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        first = self._read()
        if not size:
            value = self._placer.place(first.on_host) if self._places_ahead else None
            return _Item([first], value, _form(0))
        group = [first]
        signature = self._placer.signature(first.on_host)
        try:
            while len(group) < size and not self.is_stopped.is_set():
                step = self._read()
                if self._placer.signature(step.on_host) != signature:
                    self._unread.append(step)
                    break
                group.append(step)
        except StopIteration:
            pass  # the next call meets it again
        except BaseException as error:
            self._error = error  # after the steps before it
        return _Item(group, _stacked(self._placer, group, size), _form(size))

    def _read(self) -> _Step:
        if self._unread:
            return self._unread.popleft()
        on_host = next(self._elements)
        return _Step(on_host, self._elements.get_state() if self._is_resumable else None)


def _stacked(placer: Placer, steps: Sequence[_Step], size: int) -> Any:
    """Places steps of one signature together."""
    return placer.stack([step.on_host for step in steps], _capacity(len(steps), size))


def _capacity(num_steps: int, size: int) -> int:
    """One program serves all numbers of steps, but for a single one, which needs no room for others."""
    return size if num_steps > 1 else 1


class Reader:
    """Takes the steps of a pass, in order.

    Args:
      elements: The pass.
      num_ahead: How many single steps may be read ahead; of groups, one is.
      places_ahead: Steps wait on the devices, else on the host.
    """

    def __init__(self, elements: Pass, placer: Placer, *, num_ahead: int, places_ahead: bool):
        self._elements, self._placer = elements, placer
        self._num_ahead, self._places_ahead = num_ahead, places_ahead
        self._state = _state_of(elements)  # after the step that was taken last
        self._items = _Items(elements, self._state is not None, placer, places_ahead)
        if isinstance(elements, AgreedPass):
            elements.is_stopped = self._items.is_stopped
        self._prefetcher: Prefetcher | None = None
        self._lock = threading.Lock()
        # Steps that were read in a form that is not asked for any more.
        self._unread: collections.deque[_Step] = collections.deque()
        self._group: _Item | None = None  # of which steps are left to take
        self._num_taken = 0

    def take(self) -> Any:
        """Takes the next step, placed.

        Raises:
          StopIteration: There is none.
        """
        with self._lock:
            self._ask_for(0)
            if not self._unread:
                item = self._next_item()
                if item.form == _form(0) and self._places_ahead:
                    self._state = item.steps[0].state
                    return item.value
                self._unread.extend(item.steps)
            value = self._placer.place(self._unread[0].on_host)
            self._state = self._unread.popleft().state
            return value

    def take_on_host(self) -> Any:
        """Takes the next step as the source yielded it; of use to a reader that does not place ahead.

        Raises:
          StopIteration: There is none.
        """
        with self._lock:
            self._ask_for(0)
            if not self._unread:
                self._unread.extend(self._next_item().steps)
            step = self._unread.popleft()
            self._state = step.state
            return step.on_host

    def take_group(self, group_size: int, num_steps: int) -> StackedSteps:
        """Takes at most ``num_steps`` of the next steps, fewer where the shapes change or the data ends.

        Args:
          group_size: How many steps are read and placed together.
          num_steps: At most ``group_size``.

        Raises:
          StopIteration: There is no further step.
        """
        with self._lock:
            self._ask_for(group_size)
            if self._group is None:
                self._group, self._num_taken = self._next_group(group_size), 0
            steps = self._group.steps
            start, stop = self._num_taken, min(self._num_taken + num_steps, len(steps))
            taken = StackedSteps(self._group.value, start, stop, _capacity(len(steps), group_size))
            self._state, self._num_taken = steps[stop - 1].state, stop
            if stop == len(steps):
                self._group = None
            return taken

    def get_state(self) -> Any:
        """Returns the position after the step that was taken last.

        Raises:
          NotResumableError: The pass has none.
        """
        return self._elements.get_state() if self._state is None else self._state  # the first says why

    def close(self) -> None:
        """Ends the thread; what it has read is dropped."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _ask_for(self, group_size: int) -> None:
        """Makes the thread read in groups of this size from now on."""
        self._items.group_size = group_size
        if self._group is not None and self._group.form != _form(group_size):
            self._unread.extendleft(reversed(self._group.steps[self._num_taken :]))
            self._group = None

    def _next_group(self, size: int) -> _Item:
        if not self._unread:
            item = self._next_item()
            if item.form == _form(size):
                return item
            self._unread.extend(item.steps)
        signature = self._placer.signature(self._unread[0].on_host)
        steps = list(
            itertools.takewhile(
                lambda step: self._placer.signature(step.on_host) == signature,
                itertools.islice(self._unread, size),
            )
        )
        item = _Item(steps, _stacked(self._placer, steps, size), _form(size))
        for _ in steps:
            self._unread.popleft()
        return item

    def _next_item(self) -> _Item:
        if self._prefetcher is None:
            items, num_ahead = self._items, self._num_ahead
            self._prefetcher = Prefetcher(
                items,
                lambda: 1 if items.group_size else num_ahead,
                items.is_stopped,
                # JAX's options of this thread (64-bit mode) hold in that one too.
                jax_compat.with_thread_options(jax_compat.thread_options()),
            )
        return next(self._prefetcher)


def _state_of(elements: Pass) -> Any:
    try:
        return elements.get_state()
    except NotResumableError:
        return None
