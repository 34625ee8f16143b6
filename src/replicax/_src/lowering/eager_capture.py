"""``EagerCapture``: the counterpart of ``Capture`` for real values. It reads, assigns and differentiates."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import jax_compat
from replicax._src.errors import TapeError, TraceError, VariableError
from replicax._src.options import VariableAggregation
from replicax._src.tracing.capture import Capture, Entry, current_capture
from replicax._src.tracing.recording import Recorder
from replicax._src.tracing.slots import Sharing, Slot, check_no_tracer, state_lock
from replicax._src.user_code import user_line

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy


def on_no_device(array: Any) -> jax.Array:
    """A copy on this thread's default device, bound to none, so that it mixes with arrays of all devices."""
    if isinstance(array, jax.Array) and jax_compat.is_typed_key(array.dtype):
        data = np.asarray(jax.random.key_data(array))
        return jax.random.wrap_key_data(jnp.array(data), impl=jax.random.key_impl(array))
    return jnp.array(np.asarray(array))


@final
class EagerCapture:
    """The counterpart of ``Capture`` for a function that runs as one replica, with real values.

    Attributes:
      num_replicas, uneven, entries, num_aggregated_reads, created, observer: As in ``Capture``.
      recorder: Evaluates and records the operations.
    """

    num_replicas = 1
    is_replica = True
    uneven = None
    observer = None

    def __init__(self, strategy: Strategy):
        self.entries: dict[int, Entry] = {}
        self.num_aggregated_reads = 0
        self.created: list[str] = []
        self.recorder = Recorder()
        self._slots, self._placement = strategy.slots, strategy.variable_placement
        self._late: dict[int, tuple[Any, jax_compat.Late]] = {}
        self._tapes: list[Any] = []
        # Tapes opened inside functions that JAX stages leave marks there, as in functions that are traced.
        self._staged = Capture(self._slots.slot_of, self.num_replicas)
        self._staged_tapes: set[int] = set()

    def close(self) -> None:
        """Forgets all arrays, which would wait for the garbage collector otherwise."""
        self.entries.clear()
        self._late.clear()
        self.recorder.close()

    def assign(self) -> None:
        """Gives the variables what the function assigned to them."""
        with state_lock:
            for entry in self.entries.values():
                if entry.written:
                    self._assign(entry.slot, entry.current)

    def _assign(self, slot: Slot, value: Any) -> None:
        components = None
        if slot.sharing is Sharing.COMPONENTS:
            components = jnp.broadcast_to(value, (slot.num_replicas, *slot.shape))
            if slot.variable.aggregation is VariableAggregation.SUM:
                components = jnp.zeros_like(components).at[0].set(value)
        slot.value = self._placement.replaced(slot.value, value, components)

    @property
    def tapes(self) -> list[Any]:
        """The tapes that are recording."""
        return self._tapes + self._staged.tapes

    def is_in_inner_trace(self) -> bool:
        """Whether JAX is inside a scan, condition, grad, … of the function."""
        return jax_compat.current_trace() is not self.recorder.trace

    # --- variables ------------------------------------------------------------------------------------

    def read(self, variable: Any) -> Any:
        """The value of the variable; inside functions that JAX stages what stands for it."""
        value = self.value_of(variable)
        if not jax_compat.is_staging():
            return value
        late = self._late_value(variable, value)
        for tape in self._staged.tapes:
            tape.record_read(variable, late)
        return late

    def value_of(self, variable: Any) -> Any:
        """The value of the variable, real everywhere."""
        value = self._entry(variable).current
        for tape in self._tapes:
            tape.record_read(variable, value)
        self.recorder.know(value)
        return value

    def write(self, variable: Any, value: Any, line: str | None = None) -> None:
        """Makes ``value`` the variable's value from here on; the variable itself gets it when the function ends.

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
        if self._tapes or any(e.current is value for e in self.entries.values() if e is not entry):
            # TensorFlow does not differentiate through an assignment, and each variable's reads are its own.
            with jax_compat.evaluating():
                value = jnp.copy(value)
        entry.current, entry.written, entry.line = value, True, line or user_line()

    def sharing_of(self, variable: Any) -> Sharing:
        """How the replicas share a variable."""
        return self._slots.slot_of(variable).sharing

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
            slot = self._slots.slot_of(variable)
            with jax_compat.evaluating():
                value = _value_before(slot)
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
        """Gradients as an optimizer shall apply them: there are no others to add."""
        del names
        return list(gradients)


def _value_before(slot: Slot) -> jax.Array:
    """Returns the value of a variable as one device would hold it."""
    with state_lock:
        value = slot.value
        check_no_tracer(slot, value)
        value = on_no_device(value)
    if slot.sharing is not Sharing.COMPONENTS:
        return value
    aggregation = slot.variable.aggregation
    if aggregation is VariableAggregation.SUM:
        return jnp.sum(value, axis=0, dtype=value.dtype)
    return jnp.mean(value, axis=0) if aggregation is VariableAggregation.MEAN else value[0]


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
