"""The compiled programs for a program with rounds of sums: C + 1 programs for C rounds, none of which communicates.

They are of one device, with the number of the replica as an operand. Or they are of all devices of all processes, each
of which runs its own part alone; then arrays are those of other programs of these devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.fault_tolerance.stepped_program import CombineRound, RoundArrays
from replicax._src.lowering.round_buffers import RoundBuffer, RoundLayout
from replicax._src.tracing.flat import NumberedValues
from replicax._src.tracing.rounds import RoundsOfSums, Segment, segments_of

_WHOLE = PartitionSpec()


@final
class ReplicaOperand:
    """The number of the replica in programs that take it as an operand."""

    def __init__(self) -> None:
        self._tracer: Any = None

    def __call__(self) -> Any:
        assert self._tracer is not None, "no program of a replica is being traced"
        return self._tracer

    @contextlib.contextmanager
    def traced(self, tracer: Any) -> Iterator[None]:
        """Makes it the number while a program is traced."""
        self._tracer = tracer
        try:
            yield
        finally:
            self._tracer = None


Slots = list[Any]
"""The values of one replica between its programs: the operands, then for each round the values that its program passes
on, and the combined buffers.
"""


@dataclass(frozen=True)
class _Lowered:
    """A lowered program, with the slots of its operands and of the values that it passes on."""

    program: Any
    takes: list[int]
    passes: list[int]


@dataclass(frozen=True)
class _Program:
    """One program.

    Attributes:
      take: Returns its operands, given the slots.
      passes: The slots of the values that it passes on.
      releases: The slots that it takes and no later program does.
    """

    compiled: Callable[..., Any]
    take: Callable[[Slots], Sequence[Any]]
    passes: Sequence[int]
    releases: Sequence[int]


@final
class RoundPrograms:
    """Compiles the programs. Nothing is compiled afterwards, whichever replicas they run for.

    Args:
      program: The program of a replica. Its results are equal on all replicas.
      avals: The shapes and dtypes of its operands: those of one replica, or of ``split`` ones those of all.
      name: Its name.
      topology: The one device, or all devices.
      num_replicas: The number R of replicas.
      replica: The number of the replica in ``program``.
      donated: The positions of the operands that the last program takes first, in a list.
      donates: True if it takes their memory.
      finish: Maps the results to those of the last program, in its trace.
      split: The positions of the operands whose rows are split over the replicas, for programs of all devices; None
        for programs of one device.
      out_specs: The specs of what ``finish`` returns, for programs of all devices.

    Attributes:
      rounds: The buffers of each round.
      digest: A text that is equal for equal programs.
    """

    def __init__(
        self,
        program: RoundsOfSums,
        avals: Sequence[Any],
        name: str,
        topology: Topology,
        num_replicas: int,
        replica: ReplicaOperand,
        *,
        donated: Sequence[int],
        donates: bool,
        finish: Callable[[list[Any]], Any],
        split: Iterable[int] | None = None,
        out_specs: Any = _WHOLE,
    ):
        self._is_spread, self._out_specs = split is not None, out_specs
        self._split, self._own = (
            set(split or ()),
            set[int](),
        )  # the slots [rows of R, ...], and those [R, ...]
        self._program, self._name, self._topology, self._replica = program, name, topology, replica
        self._donated, self._donates, self._finish = list(donated), donates, finish
        self._avals: list[Any] = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals]
        self._slot_of = {value: slot for slot, value in enumerate(program.inputs)}
        self._combined_at = {
            each.result: (round_index, position)
            for round_index, combined in enumerate(program.rounds)
            for position, each in enumerate(combined)
        }
        self._layouts: list[RoundLayout] = []
        self._buffer_slots: list[slice] = []
        *segments, last = segments_of(program)
        lowered = [self._lower_round(round_index, segment) for round_index, segment in enumerate(segments)]
        lowered.append(self._lower_last(last))
        self.rounds: tuple[tuple[RoundBuffer, ...], ...] = tuple(each.buffers for each in self._layouts)
        self.digest = _digest(name, num_replicas, self.rounds, [each.program.as_text() for each in lowered])
        numbers = range(0 if self._is_spread else num_replicas)
        self._replica_numbers = [topology.put_whole(np.int32(replica)) for replica in numbers]
        self._num_slots = len(self._avals)
        *self._programs, self._last = self._compiled(lowered)

    # --- making the programs --------------------------------------------------------------------------

    def _lower_round(self, round_index: int, segment: Segment) -> _Lowered:
        taken = self._slots_taken(segment)
        combined = self._program.rounds[round_index]

        def run(replica: Any, *args: Any) -> Any:
            with self._replica.traced(replica):
                values = self._evaluate(segment, taken, args)
            parts = [jnp.asarray(values[each.part]) for each in combined]
            layouts.append(RoundLayout([each.reduction for each in combined], parts))
            return layouts[-1].pack(parts), values.of(segment.passes)

        layouts: list[RoundLayout] = []
        lowered = self._lowered_round(run, taken)
        _, passed = lowered.out_info
        passes = [self._add_slot(aval) for aval in passed]
        if self._is_spread:
            self._own.update(passes)
        self._slot_of.update(zip(segment.passes, passes, strict=True))
        self._layouts.append(layouts[-1])
        start = len(self._avals)
        for buffer in layouts[-1].buffers:
            self._add_slot(jax.ShapeDtypeStruct((buffer.size,), buffer.dtype))
        self._buffer_slots.append(slice(start, len(self._avals)))
        return _Lowered(lowered, taken, passes)

    def _lower_last(self, segment: Segment) -> _Lowered:
        donated_slots = set(self._donated)
        taken = [slot for slot in self._slots_taken(segment) if slot not in donated_slots]

        def run(donated: Sequence[Any], *args: Any) -> Any:
            # On one device, its results are equal on all replicas, so it may be the program of any of them.
            number = jax.lax.axis_index(REPLICA_AXIS) if self._is_spread else jnp.int32(0)
            own = [value[0] if slot in self._own else value for slot, value in zip(taken, args, strict=True)]
            with self._replica.traced(number):
                values = self._evaluate(segment, [*self._donated, *taken], [*donated, *own])
            return self._finish(values.of(self._program.outputs))

        donated = [self._avals[slot] for slot in self._donated]
        options: dict[str, Any] = {"donate_argnums": (0,) if self._donates else ()}
        if self._is_spread:
            specs = list(map(self._spec, self._donated)), *map(self._spec, taken)
            jitted = self._jit_on_all(run, specs, self._out_specs, **options)
        else:
            jitted = self._jit(run, **options)
        return _Lowered(jitted.lower(donated, *[self._avals[slot] for slot in taken]), taken, [])

    def _jit(self, run: Callable[..., Any], **options: Any) -> Any:
        whole = self._topology.replicated
        return self._topology.compile(run, self._name, in_shardings=whole, out_shardings=whole, **options)

    def _lowered_round(self, run: Callable[..., Any], taken: Sequence[int]) -> Any:
        avals = [self._avals[slot] for slot in taken]
        if not self._is_spread:
            return self._jit(run).lower(_REPLICA_AVAL, *avals)

        def run_own_part(*args: Any) -> Any:
            own = [value[0] if slot in self._own else value for slot, value in zip(taken, args, strict=True)]
            results = run(jax.lax.axis_index(REPLICA_AXIS), *own)
            return jax.tree_util.tree_map(lambda value: jnp.asarray(value)[None], results)

        specs = tuple(map(self._spec, taken))
        return self._jit_on_all(run_own_part, specs, PartitionSpec(REPLICA_AXIS)).lower(*avals)

    def _spec(self, slot: int) -> PartitionSpec:
        return PartitionSpec(REPLICA_AXIS) if slot in self._own or slot in self._split else _WHOLE

    def _jit_on_all(self, run: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any) -> Any:
        in_shardings, out_shardings = (
            jax.tree_util.tree_map(
                lambda spec: NamedSharding(self._topology.mesh, spec),
                specs,
                is_leaf=lambda each: isinstance(each, PartitionSpec),
            )
            for specs in (in_specs, out_specs)
        )
        mapped = self._topology.on_replicas(run, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, in_shardings=in_shardings, out_shardings=out_shardings, **options)

    def _add_slot(self, aval: Any) -> int:
        self._avals.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return len(self._avals) - 1

    def _slots_taken(self, segment: Segment) -> list[int]:
        taken = [self._slot_of[value] for value in segment.takes if value in self._slot_of]
        return taken + [self._buffer_slot(*buffer) for buffer in self._buffers_taken(segment)]

    def _buffers_taken(self, segment: Segment) -> list[tuple[int, int]]:
        """Returns the round and the position of each buffer that has combined values which a segment takes."""
        taken = [self._combined_at[value] for value in segment.takes if value in self._combined_at]
        return [
            (round_index, buffer)
            for round_index, layout in enumerate(self._layouts)
            for buffer in layout.buffers_of([position for each, position in taken if each == round_index])
        ]

    def _buffer_slot(self, round_index: int, buffer: int) -> int:
        return self._buffer_slots[round_index].start + buffer

    def _evaluate(self, segment: Segment, slots: Sequence[int], args: Sequence[Any]) -> NumberedValues:
        by_slot = dict(zip(slots, args, strict=True))
        values = NumberedValues(self._program.consts)
        values.update((value, by_slot[slot]) for value, slot in self._slot_of.items() if slot in by_slot)
        arrays = [(round_index, layout.empty()) for round_index, layout in enumerate(self._layouts)]
        for round_index, buffer in self._buffers_taken(segment):
            flat = by_slot[self._buffer_slot(round_index, buffer)]
            arrays.append((round_index, self._layouts[round_index].unpack(buffer, flat)))
        for round_index, by_position in arrays:
            combined = self._program.rounds[round_index]
            values.update((combined[position].result, array) for position, array in by_position.items())
        for computation in segment.computations:
            results = computation.evaluate(values.of(computation.operands))
            values.update(zip(computation.results, results, strict=True))
        return values

    def _compiled(self, lowered: Sequence[_Lowered]) -> list[_Program]:
        num_inputs = len(self._program.inputs)
        last_use = {slot: index for index, each in enumerate(lowered) for slot in each.takes}
        return [
            _Program(
                each.program.compile(),
                _getter_of(each.takes),
                each.passes,
                [slot for slot in each.takes if slot >= num_inputs and last_use[slot] == index],
            )
            for index, each in enumerate(lowered)
        ]

    # --- running them ---------------------------------------------------------------------------------

    def slots(self, operands: Sequence[Any]) -> Slots:
        """Returns the slots of one replica before its first program.

        Args:
          operands: The operands of the program: arrays of the device, or NumPy arrays that do not change until the last
            program has run.
        """
        return [*operands, *[None] * (self._num_slots - len(operands))]

    def run_rounds(
        self, replicas: Sequence[int], slots_of: Sequence[Slots], combine: CombineRound
    ) -> list[RoundArrays]:
        """Runs all programs but the last one for some replicas. Returns the combined arrays of each round.

        Args:
          replicas: The numbers of the replicas.
          slots_of: The slots of each.
          combine: Combines the arrays of a round over all replicas of all processes. It waits for the others.
        """
        sums: list[RoundArrays] = []
        for round_index in range(len(self.rounds)):
            parts = [
                self._run_round(round_index, replica, slots)
                for replica, slots in zip(replicas, slots_of, strict=True)
            ]
            # (`np.asarray` waits for the programs, and shares their memory.)
            combined = combine(round_index, [list(map(np.asarray, buffers)) for buffers in parts])
            for slots in slots_of:
                self._receive(round_index, slots, combined)
            sums.append(combined)
        return sums

    def run_rounds_on_all(self, slots: Slots, combine: CombineRound) -> None:
        """Runs all programs but the last one on all devices, and leaves what the last one takes in ``slots``.

        Args:
          slots: The slots, of all replicas.
          combine: See ``run_rounds``.
        """
        topology = self._topology
        for round_index, program in enumerate(self._programs):
            buffers, passed = program.compiled(*program.take(slots))
            self._keep(program, slots, passed)
            rows = [topology.rows_here(buffer) for buffer in buffers]
            combined = combine(round_index, list(zip(*rows, strict=True)))
            self._receive(round_index, slots, [topology.put_same(array) for array in combined])

    def last(self, slots: Slots) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the last program and its operands, of which the first are the arrays whose memory it takes."""
        return self._last.compiled, ([slots[slot] for slot in self._donated], *self._last.take(slots))

    def _run_round(self, round_index: int, replica: int, slots: Slots) -> list[Any]:
        """Runs the program of one round for a replica. Returns its buffers, which may not be computed yet."""
        program = self._programs[round_index]
        buffers, passed = program.compiled(self._replica_numbers[replica], *program.take(slots))
        self._keep(program, slots, passed)
        return buffers

    def _keep(self, program: _Program, slots: Slots, passed: Sequence[Any]) -> None:
        """Keeps what a program passes on, and releases what no later one takes."""
        for slot in program.releases:
            slots[slot] = None
        for slot, value in zip(program.passes, passed, strict=True):
            slots[slot] = value

    def _receive(self, round_index: int, slots: Slots, buffers: Sequence[Any]) -> None:
        """Gives a replica the combined buffers of a round."""
        slots[self._buffer_slots[round_index]] = buffers

    def finishing(
        self, slots: Slots, sums: Sequence[RoundArrays]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the last program and its operands, of which the first are the arrays whose memory it takes.

        Args:
          slots: The slots of any replica before its first program.
          sums: The combined arrays of each round.
        """
        for round_index, combined in enumerate(sums):
            self._receive(round_index, slots, combined)
        return self.last(slots)


_REPLICA_AVAL = jax.ShapeDtypeStruct((), np.int32)


def _getter_of(slots: Sequence[int]) -> Callable[[Slots], Sequence[Any]]:
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return lambda values: [values[slot] for slot in slots]


def _digest(name: str, num_replicas: int, rounds: Any, texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([name, str(num_replicas), repr(rounds), *texts]).encode()).hexdigest()
