"""Changes that would make a program fit: which changes are tried, in which order, and for how long. Pure.

Nothing is estimated. The program is planned again with each change, unless the shapes alone show that its arguments do
not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

from replicax._src.devices.hardware import Hardware
from replicax._src.devices.plan import Remedy
from replicax._src.drawing.text import size
from replicax._src.variables.state_shards import MOST_SHARDS, StateShards
from replicax._src.vocabulary.options import ShardState

_MOST_HALVINGS = 6


@dataclass(frozen=True)
class PlanChange:
    """A change of the requested plan.

    Attributes:
      hardware: The hardware to plan for.
      global_batch: The rows of all replicas together; None if no argument is split.
      shard_state: The state to shard over replicas; None keeps the strategy's choice.
    """

    hardware: Hardware
    global_batch: int | None
    shard_state: ShardState | None = None


@dataclass(frozen=True)
class Attempt:
    """A program with a change.

    Attributes:
      rows: The rows of a replica's batch.
      shard_size: The number of replicas that shard the state; None if it is not sharded.
      arguments: The bytes of the arguments on a device, from their shapes.
      peak: The largest use of a device's memory in bytes; None if it was not compiled.
      limit: The memory of a device in bytes.
    """

    num_replicas: int
    rows: int | None
    shard_size: int | None
    arguments: int
    peak: int | None
    limit: int

    @property
    def fits(self) -> bool | None:
        """True if it fits; None if that depends on temporaries, which were not compiled."""
        if self.peak is not None:
            return self.peak <= self.limit
        return False if self.arguments > self.limit else None

    @property
    def global_batch(self) -> int | None:
        return None if self.rows is None else self.rows * self.num_replicas


@final
class Search:
    """Tries changes: fewer rows, more devices, sharded state, and combinations of these.

    Args:
      plan: A ``Plan`` that does not fit.
      attempt: Traces the program with a change. Compiles it if its arguments fit and have fewer bytes than the second
        argument.
      may_divide: True if replicas may shard state.
      time_left: Returns the seconds until compilation stops.
    """

    def __init__(
        self,
        plan: Any,
        attempt: Callable[[PlanChange, float], Attempt],
        *,
        may_divide: bool,
        time_left: Callable[[], float],
    ):
        self._plan, self._attempt, self._may_divide = plan, attempt, may_divide
        self._time_left, self._one_takes_s = time_left, sum(plan.seconds.values())
        self._asked = PlanChange(plan.hardware, plan.global_batch)
        self._devices_of_replica = plan.hardware.num_devices // plan.num_replicas

    def remedies(self) -> Iterator[Remedy]:
        """Yields each change as soon as it has been computed."""
        plan = self._plan
        if plan.state_bytes <= plan.memory.limit:
            yield from self._smaller(self._asked, plan.state_bytes, plan.memory.peak)
        elif plan.shard_size is not None:
            yield from self._in_more_pieces(self._asked, plan.memory.arguments, plan.shard_size)
        if self._may_divide:
            yield from self._sharded()

    def _sharded(self) -> Iterator[Remedy]:
        of_batch = self._plan.memory.arguments - self._plan.state_bytes
        least = self._plan.memory.arguments
        for state in (ShardState.OPTIMIZER, ShardState.ALL):
            change = replace(self._asked, shard_state=state)
            found = self._try(change, least)
            if found.arguments >= least:
                continue  # it would shard nothing
            least = found.arguments
            yield self._remedy(change, found)
            if found.peak is not None and not found.fits:
                yield from self._smaller(change, found.arguments - of_batch, found.peak)
            elif found.fits is False and state is ShardState.ALL:
                yield from self._in_more_pieces(change, found.arguments, found.shard_size or 1)

    def _smaller(self, change: PlanChange, state: int, peak: int) -> Iterator[Remedy]:
        """Halves the rows until the program fits. Then tries the same batch on as many devices as have these few rows.

        A linear model of memory by rows skips rows that would not fit. If it says that no number of rows fits, nothing
        is tried.
        """
        rows, limit, num_tried = self._plan.rows or 0, self._plan.memory.limit, 0
        line = _Line.through(0, state, rows, peak)
        while rows > 1 and num_tried < _MOST_HALVINGS and line.at(0) <= limit:
            rows //= 2
            if line.at(rows) > limit:
                continue
            fewer = replace(change, global_batch=rows * self._plan.num_replicas)
            found = self._try(fewer)
            num_tried += 1
            yield self._remedy(fewer, found)
            if found.fits:
                replicas = -(-(self._plan.global_batch or 0) // rows)
                yield from self._on(replicas * self._devices_of_replica, change)
            if found.fits is not False or found.peak is None:
                return
            line = _Line.through(rows, found.peak, self._plan.rows, peak)

    def _in_more_pieces(self, change: PlanChange, arguments: int, shard_size: int) -> Iterator[Remedy]:
        """Handles shards that are too large. Tries as many devices as make the shards small enough, each with its
        rows.
        """
        times = -(-arguments // self._plan.memory.limit)
        if shard_size * times > MOST_SHARDS:
            return
        yield from self._on(self._plan.hardware.num_devices * times, change, rows=self._plan.rows)

    def _on(self, num_devices: int, change: PlanChange, *, rows: int | None = None) -> Iterator[Remedy]:
        """Tries more devices, if so many exist, with the same batch or with the same rows for each replica."""
        hardware = change.hardware.at_least(num_devices)
        if hardware is None:
            return
        more = replace(change, hardware=hardware)
        if rows is not None:
            more = replace(more, global_batch=rows * (hardware.num_devices // self._devices_of_replica))
        yield self._remedy(more, self._try(more))

    def _try(self, change: PlanChange, below: float = math.inf) -> Attempt:
        return self._attempt(change, below if self._time_left() >= self._one_takes_s else 0)

    def _remedy(self, change: PlanChange, found: Attempt) -> Remedy:
        state = change.shard_state and change.shard_state.value.lower()
        return Remedy(
            self._in_words(change, found),
            change.hardware.name,
            found.rows,
            found.global_batch,
            state,
            found.shard_size if state else None,
            found.arguments if found.peak is None else found.peak,
            found.fits,
            found.peak is not None,
        )

    def _in_words(self, change: PlanChange, found: Attempt) -> str:
        parts = []
        if change.shard_state is not None:
            parts.append(f'shard_state="{change.shard_state.value.lower()}" over {found.shard_size} replicas')
        if change.hardware != self._plan.hardware:
            parts.append(f"on {change.hardware.name} ({change.hardware.num_devices:,} devices)")
        if found.rows is not None and (
            found.rows != self._plan.rows or change.hardware != self._plan.hardware
        ):
            parts.append(f"{_rows(found.rows)} for each replica (a global batch of {found.global_batch:,})")
        return ", ".join(parts)


def notes_of_whole_arguments(plan: Any) -> Iterator[str]:
    """Explains why no change shards arrays that are too large, if they are functional state: arguments replicated on
    every device.
    """
    whole = [a for a in plan.arrays if a.role == "argument" and not any(a.split)]
    in_bytes = sum(a.device_bytes for a in whole)
    if plan.state_bytes <= plan.memory.limit or 2 * in_bytes < plan.state_bytes:
        return
    largest = max(whole, key=lambda a: a.device_bytes)
    shards = StateShards.of(ShardState.ALL, None, plan.num_replicas)
    count = shards.num_shards if shards else 1
    state = 'with the same arrays as variables (rx.Variable, or those of a Keras or nnx model) shard_state="all" would'
    if count > 1:
        instead = f"{state} leave {size(in_bytes / count)} of them on each of {plan.num_replicas} replicas"
    else:
        instead = (
            f"{state} shard them over replicas, but there is one replica here, or a number without divisors"
        )
    yield (
        f"{size(in_bytes)} of a device are replicated arguments. The largest is {largest.name} with "
        f"{size(largest.device_bytes)}. "
        f"Fewer rows or more devices do not reduce them, and shard_state shards only variables: {instead}."
    )


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class _Line:
    """A linear model of memory by rows."""

    none: float
    each: float

    @classmethod
    def through(cls, rows: int, peak: int, more_rows: int, larger_peak: int) -> _Line:
        each = (larger_peak - peak) / max(1, more_rows - rows)
        return cls(peak - each * rows, each)

    def at(self, rows: int) -> float:
        return self.none + self.each * rows
