"""What an eagerly run replica function reads, writes and differentiates: ``Capture``'s counterpart for real values."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.collectives.eager import COLLECTIVES, EagerCommunicator, from_host, to_host
from replicax._src.errors import StructureError, TapeError, TraceError, VariableError
from replicax._src.options import ReduceOp
from replicax._src.placement.spmd import SlotGroup
from replicax._src.program.capture import Capture, Entry, current_capture
from replicax._src.program.markers import aggregate_p
from replicax._src.program.recording import Recorder
from replicax._src.program.slots import Sharing, Slot
from replicax._src.program.verdict import Verdict
from replicax._src.user_code import user_line


class StateBefore:
    """The values of variables as they were before the run, on the host."""

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._values: dict[int, tuple[Slot, Any]] = {}

    def slot_of(self, variable: Any) -> Slot:
        return self._load(variable)[0]

    def component(self, variable: Any, replica_id: int) -> Any:
        """What a replica has of a variable."""
        slot, value = self._load(variable)
        return value[replica_id] if slot.sharing.is_per_replica else value

    def _load(self, variable: Any) -> tuple[Slot, Any]:
        if id(variable) not in self._values:
            slot = self._strategy.slots.slot_of(variable)
            with jax_compat.evaluating():
                value = SlotGroup([slot], self._strategy.variable_placement).load(for_donation=False)[0]
                self._values[id(variable)] = (slot, to_host(value))
        return self._values[id(variable)]


@final
class EagerCapture:
    """What ``Capture`` is for functions that are traced, for one replica of a function that runs.

    Attributes:
      num_replicas, uneven, entries, num_aggregated_reads, created, observer: As in ``Capture``.
      replica_id: Index of the replica.
      recorder: Evaluates and records the replica's operations.
    """

    def __init__(
        self, strategy: Any, state: StateBefore, communicator: EagerCommunicator, replica_id: int, uneven: Any
    ):
        self.num_replicas = communicator.num_replicas
        self.uneven = uneven
        self.entries: dict[int, Entry] = {}
        self.num_aggregated_reads = 0
        self.created: list[str] = []
        self.observer = None
        is_empty = uneven is not None and uneven.rows == 0
        self.recorder = Recorder(self._aggregate, COLLECTIVES, is_empty=is_empty)
        self._strategy = strategy
        self._state = state
        self._communicator = communicator
        self.replica_id = replica_id
        self._late: dict[int, tuple[Any, jax_compat.Late]] = {}
        self._tapes: list[Any] = []
        # Tapes opened inside functions that JAX stages leave marks there, as in functions that are traced.
        self._staged = Capture(state.slot_of, self.num_replicas)
        self._staged_tapes: set[int] = set()

    def close(self) -> None:
        """Forgets all arrays."""
        self.entries.clear()
        self._late.clear()
        self.recorder.close()

    @property
    def is_replica(self) -> bool:
        return True

    @property
    def tapes(self) -> list[Any]:
        """The tapes that are recording."""
        return self._tapes + self._staged.tapes

    def is_in_inner_trace(self) -> bool:
        """Whether JAX is inside a scan, condition, grad, … of the function."""
        return jax_compat.current_trace() is not self.recorder.trace

    # --- variables ------------------------------------------------------------------------------------

    def read(self, variable: Any) -> Any:
        """This replica's value of the variable; inside functions that JAX stages what stands for it."""
        value = self.value_of(variable)
        if not jax_compat.is_staging():
            return value
        late = self._late_value(variable, value)
        for tape in self._staged.tapes:
            tape.record_read(variable, late)
        return late

    def value_of(self, variable: Any) -> Any:
        """This replica's value of the variable, real everywhere."""
        value = self._entry(variable).current
        for tape in self._tapes:
            tape.record_read(variable, value)
        self.recorder.know(value)
        return value

    def write(self, variable: Any, value: Any, line: str | None = None) -> None:
        """Makes ``value`` this replica's value of the variable; the others' are brought together at the end.

        Raises:
          TraceError: Inside a function that JAX traces.
          VariableError: Shape differs from the variable's.
        """
        entry = self._entry(variable)
        slot = entry.slot
        if self.is_in_inner_trace():
            raise TraceError(
                f"Variable {slot.name!r} is assigned at {user_line()} inside a function that JAX traces on its own (a "
                f"scan, loop, condition, jax.grad, jax.vmap or jax.jit), and the value cannot leave it. Return the "
                f"value and assign it outside; for a condition use rx.cond, which threads assignments through."
            )
        value = jnp.asarray(value)
        if tuple(value.shape) != slot.shape:
            raise VariableError(
                f"Variable {slot.name!r} has shape {slot.shape}; a value of shape {tuple(value.shape)} cannot be "
                f"assigned to it (at {user_line()})."
            )
        value = jax.lax.convert_element_type(value, slot.dtype)
        verdict = self.recorder.verdicts[value]
        if self._tapes or any(e.current is value for e in self.entries.values() if e is not entry):
            # TensorFlow does not differentiate through an assignment, and each variable's reads are its own.
            with jax_compat.evaluating():
                value = jnp.copy(value)
            self.recorder.verdicts[value] = verdict
        entry.current, entry.written, entry.line = value, True, line or user_line()

    def sharing_of(self, variable: Any) -> Sharing:
        """How the replicas share a variable."""
        return self._state.slot_of(variable).sharing

    @contextlib.contextmanager
    def aggregated_reads(self) -> Iterator[None]:
        """Reads of SUMMED variables give the sum over replicas (``metric.result()``)."""
        self.num_aggregated_reads += 1
        try:
            yield
        finally:
            self.num_aggregated_reads -= 1

    def _entry(self, variable: Any) -> Entry:
        entry = self.entries.get(id(variable))
        if entry is None:
            slot = self._state.slot_of(variable)
            with jax_compat.evaluating():
                value = from_host(self._state.component(variable, self.replica_id))
            if slot.sharing.is_per_replica:
                self.recorder.verdicts[value] = Verdict.DIFFERS
            entry = self.entries[id(variable)] = Entry(slot, len(self.entries), value)
        return entry

    def _late_value(self, variable: Any, value: Any) -> jax_compat.Late:
        known = self._late.get(id(variable))
        if known is None or known[0] is not value:
            reference = weakref.ref(variable)
            late = jax_compat.Late(jax_compat.abstractify(value), lambda: _value_now(reference()))
            known = self._late[id(variable)] = (value, late)
        return known[1]

    # --- tapes and gradients --------------------------------------------------------------------------

    def begin_recording(self, tape: Any, tape_id: int) -> None:
        """The tape records from here on."""
        if not self.is_in_inner_trace():
            self.recorder.begin(tape, tape_id)
            self._tapes.append(tape)
        elif jax_compat.is_staging():
            self._staged_tapes.add(tape_id)
            self._staged.begin_recording(tape, tape_id)
        else:
            raise TapeError(
                f"A GradientTape was opened at {user_line()} under jax.grad, jax.vjp, jax.jvp or jax.vmap: use nested "
                f"tapes, or nested jax.grad."
            )

    def end_recording(self, tape: Any, tape_id: int) -> None:
        """The tape records no more."""
        if tape_id in self._staged_tapes:
            self._staged.end_recording(tape, tape_id)
        else:
            self._tapes.remove(tape)
            self.recorder.end(tape_id)

    def watch(self, tape_id: int, value: Any) -> None:
        """The tape watches an array from here on."""
        if tape_id in self._staged_tapes:
            self._staged.watch(tape_id, value)
        else:
            self.recorder.watch(tape_id, value)

    def gradient(
        self,
        tape_id: int,
        targets: list[Any],
        seeds: list[Any],
        sources: list[Any],
        derived: Sequence[bool],
        watched: Sequence[Any],
    ) -> tuple[list[Any], set[int]]:
        """The gradients by ``sources``, and the positions of those on which no target depends.

        Raises:
          TapeError: In another trace than the one in which the tape was opened.
        """
        if tape_id in self._staged_tapes:
            return self._staged.gradient(tape_id, targets, seeds, sources, derived, watched)
        if self.is_in_inner_trace():
            raise TapeError(
                f"tape.gradient at {user_line()} is called in another scan, loop, condition, jax.grad or jax.jit than "
                f"its tape was opened in. Open the tape in the function that calls gradient."
            )
        with jax_compat.evaluating():
            pairs = [
                (t, _seed(t, seed))
                for t, seed in zip(targets, seeds or [1] * len(targets), strict=True)
                if jnp.issubdtype(t.dtype, jnp.inexact)
            ]
        gradients = self.recorder.gradient(
            tape_id, [t for t, _ in pairs], [s for _, s in pairs], sources, derived, watched
        )
        return gradients, {i for i, gradient in enumerate(gradients) if gradient is None}

    def aggregate(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Gradients as an optimizer shall apply them: summed over replicas, unless they have been reduced.

        A gradient has been reduced if it came out of a collective, with elementwise work at most since then.
        """
        del names
        return list(aggregate_p.bind(*gradients)) if gradients else []

    def _aggregate(self, gradients: Sequence[Any], verdicts: Sequence[Verdict]) -> list[Any]:
        must_sum = [verdict is not Verdict.REDUCED for verdict in verdicts]
        if gradients and not any(isinstance(g, jax_compat.Tracer) for g in gradients):
            decisions = self._communicator.agree(
                "the gradients of an optimizer", must_sum, is_collective=True
            )
            if len({len(d) for d in decisions}) > 1:
                raise StructureError(
                    f"The replicas give different numbers of gradients to an optimizer: {[len(d) for d in decisions]}."
                )
            must_sum = [any(column) for column in zip(*decisions, strict=True)]
        chosen = [i for i, is_chosen in enumerate(must_sum) if is_chosen]
        results = list(gradients)
        if chosen:
            values = self.recorder.of_no_rows([gradients[i] for i in chosen])
            with self._communicator.uncounted():
                totals = self._strategy.reduce_in_replica(self._communicator, ReduceOp.SUM, values, None)
            for i, total in zip(chosen, totals, strict=True):
                results[i] = total
        return results


def _seed(target: Any, seed: Any) -> Any:
    return jax.lax.convert_element_type(jnp.broadcast_to(seed, target.shape), target.dtype)


def _value_now(variable: Any) -> Any:
    """What a function that JAX has staged reads of a variable when it runs."""
    capture = current_capture()
    if not isinstance(capture, EagerCapture) or variable is None:
        raise TraceError(
            "A function that JAX staged (jax.jit, scan, …) in strategy.run(..., options=rx.RunOptions(eager=True)) reads "
            "a variable, and is used outside of it. Make the function anew, or pass the variable's value to it."
        )
    return capture.value_of(variable)
