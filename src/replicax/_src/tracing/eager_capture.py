"""``EagerCapture``: the capture of a function that runs operation by operation on concrete arrays.

It evaluates every operation and records it on the open tapes. It identifies arrays by ``id``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.bindings import (
    Binding,
    SyncPolicy,
    check_no_tracer,
    is_stored_as_parts,
    state_lock,
    sum_of_parts,
)
from replicax._src.tracing.capture import Capture, TracedCapture, current_capture
from replicax._src.tracing.equations import has_any, inner_jaxprs
from replicax._src.tracing.mark_resolution import MarkResolver
from replicax._src.tracing.markers import Question
from replicax._src.tracing.primitives import JITS, MARKS
from replicax._src.tracing.recording import TapeRecord, TapeStep, gradients_of
from replicax._src.tracing.replication import Replication, is_replica_collective
from replicax._src.user.user_code import user_line
from replicax._src.vocabulary.errors import TapeError, TraceError, UnsupportedError
from replicax._src.vocabulary.options import VariableAggregation

if TYPE_CHECKING:
    from replicax._src.tracing.tape import GradientTape

NO_AXIS = (
    "A collective of jax.lax over the axis 'replica' was called at {line}: with RunOptions(eager=True) one replica runs, and "
    "JAX knows no such axis. Use rx.get_replica_context().all_reduce, all_gather or merge_call, or run without eager=True."
)


def on_no_device(array: Any) -> jax.Array:
    """Returns an uncommitted copy on this thread's default device, which can be combined with arrays on any device."""
    array = array if isinstance(array, jax.Array) else np.asarray(array)
    return jax_compat.on_words(lambda words: jnp.array(np.asarray(words)), array)


@final
class EagerCapture(Capture):
    """The capture of a function that runs as one replica with real values.

    Args:
      replaced: Returns what a variable holds next, given what it holds, its new value, and its components or None.
    """

    def __init__(self, binding_of: Callable[[Any], Binding], replaced: Callable[[Any, Any, Any], Any]):
        super().__init__(binding_of, 1)
        self.trace = jax_compat.EagerTrace(self._observe, lambda: bool(self._open))
        self._replaced = replaced
        self._records: dict[int, TapeRecord] = {}
        self._open: list[TapeRecord] = []
        self._tapes: list[GradientTape] = []
        self._late: dict[int, tuple[Any, jax_compat.Late]] = {}
        self._inner_consts: dict[int, tuple[Any, list[Any]]] = {}
        # Tapes opened inside functions that JAX stages leave marks, as in traced functions.
        self._staged = TracedCapture(binding_of, 1)
        self._staged_tapes: set[int] = set()
        self._rewriter = MarkResolver(list)  # with one replica the gradients are the sums

    def close(self) -> None:
        """Releases all arrays, which would otherwise wait for the garbage collector."""
        for each in (self.entries, self._num_holders, self._late, self._records, self._inner_consts):
            each.clear()

    # --- variables ------------------------------------------------------------------------------------

    def read(self, variable: Any) -> Any:
        value = self.value_of(variable)
        if not jax_compat.is_staging():
            return value
        late = self._late_value(variable, value)
        for tape in self._staged.tapes:
            tape.record_read(variable, late)
        return late

    def value_of(self, variable: Any) -> Any:
        """Returns the real value of the variable, even inside functions that JAX stages."""
        value = self._entry(variable).current
        for tape in self._tapes:
            tape.record_read(variable, value)
        for record in self._open:  # they may be queried about the array
            record.know(value)
        return value

    def _first_value(self, binding: Binding) -> Any:
        with jax_compat.evaluating():
            return _value_before(binding)

    def _detached(self, value: Any) -> Any:
        with jax_compat.evaluating():
            return jnp.copy(value)

    def _assign(self, variable: Any, entry: Any, value: Any, line: str) -> None:
        self._hold(entry, value, line)

    def store(self) -> None:
        """Gives the variables what the function assigned to them."""
        with state_lock:
            for entry in self.entries.values():
                if entry.written:
                    self._store(entry.binding, entry.current)

    def _store(self, binding: Binding, value: Any) -> None:
        components = None
        if binding.sync_policy is SyncPolicy.COMPONENTS:
            components = jnp.broadcast_to(value, (binding.num_replicas, *binding.shape))
            if binding.variable.aggregation is VariableAggregation.SUM:
                components = jnp.zeros_like(components).at[0].set(value)
        binding.value = self._replaced(binding.value, value, components)

    def _late_value(self, variable: Any, value: Any) -> jax_compat.Late:
        known = self._late.get(id(variable))
        if known is None or known[0] is not value:
            reference = weakref.ref(variable)
            late = jax_compat.Late(jax_compat.abstractify(value), lambda: _value_now(reference()))
            known = self._late[id(variable)] = (value, late)
        return known[1]

    # --- tapes and gradients --------------------------------------------------------------------------

    @property
    def tapes(self) -> list[GradientTape]:
        return self._tapes + self._staged.tapes

    def _begin(self, tape: GradientTape, tape_id: int) -> None:
        if not self.is_in_inner_trace():
            if tape_id not in self._records:
                self._records[tape_id] = TapeRecord()
                weakref.finalize(tape, self._records.pop, tape_id, None)
            self._open.append(self._records[tape_id])
            self._tapes.append(tape)
        elif jax_compat.is_staging():
            self._staged_tapes.add(tape_id)
            self._staged.begin_recording(tape, tape_id)
        else:
            raise TapeError(
                f"A GradientTape was opened at {user_line()} under jax.grad, jax.vjp, jax.jvp or jax.vmap: use nested "
                f"tapes, or nested jax.grad."
            )

    def end_recording(self, tape: GradientTape, tape_id: int) -> None:
        if tape_id in self._staged_tapes:
            self._staged.end_recording(tape, tape_id)
        else:
            self._tapes.remove(tape)
            self._open.remove(self._records[tape_id])

    def watch(self, tape_id: int, value: Any) -> None:
        if tape_id in self._staged_tapes:
            self._staged.watch(tape_id, value)
        else:
            self._records[tape_id].watch(value)

    def _differentiated(self, tape_id: int, question: Question) -> tuple[list[Any], set[int]]:
        if tape_id in self._staged_tapes:
            return self._staged.gradient(tape_id, question)
        with contextlib.nullcontext() if self._open else jax_compat.evaluating():
            gradients = gradients_of(self._records[tape_id], question)
        return gradients, {i for i, gradient in enumerate(gradients) if gradient is None}

    def aggregate(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        del names  # there are no other replicas
        return list(gradients)

    # --- operations -----------------------------------------------------------------------------------

    def _observe(self, operation: Any, inputs: list[Any]) -> list[Any]:
        subs = jax_compat.sub_jaxprs(operation)
        if self._open and subs and (consts := self._known_consts(subs)):
            return self._inline(operation, subs, consts, inputs)
        evaluated = self._resolved(operation, inputs)
        with jax_compat.evaluating():
            outputs = evaluated(*inputs)
            if self._open:  # stop_gradient and the like return their argument
                outputs = [jnp.copy(out) if any(out is x for x in inputs) else out for out in outputs]
        if self._open:
            step = TapeStep(evaluated, inputs, outputs, user_line())
            for record in self._open:
                record.add(step)
        return outputs

    def _resolved(self, operation: Any, inputs: Sequence[Any]) -> Any:
        """Returns the operation with the marks inside (tapes in a scan or condition) resolved."""
        if is_replica_collective(operation):
            raise UnsupportedError(NO_AXIS.format(line=user_line()))
        if not any(has_any(inner, MARKS) for inner in inner_jaxprs(operation)):
            return operation
        with jax_compat.evaluating():
            jaxpr, consts = jax_compat.trace(operation, inputs)
        known = [Replication.INVARIANT] * (len(consts) + len(inputs))
        return jax_compat.EagerOperation(
            operation.primitive,
            operation.params,
            lambda *xs: self._rewriter.evaluate(jaxpr, [*consts, *xs], known),
        )

    def _known_consts(self, subs: Sequence[Any]) -> list[Any]:
        """Returns arrays that open tapes know and that JAX has made constants of jaxprs, where derivatives miss
        them.
        """
        found = [const for sub in subs for const in self._consts_within(sub)]
        return [const for const in found if any(id(const) in record.known for record in self._open)]

    def _consts_within(self, jaxpr: Any) -> list[Any]:
        entry = self._inner_consts.get(id(jaxpr))
        if entry is None:
            inner, values = jax_compat.inner_jaxpr(jaxpr)
            consts = [c for c in values if isinstance(c, jax.Array)]
            for eqn in inner.eqns:
                for sub in jax_compat.sub_jaxprs(eqn):
                    consts = consts + self._consts_within(sub)
            entry = self._inner_consts[id(jaxpr)] = (
                jaxpr,
                consts,
            )  # keeps the jaxpr alive, so that its id stays unique
        return entry[1]

    def _inline(
        self, operation: Any, subs: Sequence[Any], consts: Sequence[Any], inputs: Sequence[Any]
    ) -> list[Any]:
        """Evaluates a jitted function operation by operation, so that tapes see the arrays it closes over."""
        if operation.name not in JITS:
            shapes = ", ".join(f"{c.dtype}{list(c.shape)}" for c in consts)
            raise TapeError(
                f"With RunOptions(eager=True) a jitted function inside a {operation.name} at {user_line()} closes over "
                f"arrays ({shapes}) that a tape may have to differentiate by. Pass them to it as arguments."
            )
        jaxpr, values = jax_compat.open_jaxpr(subs[0])
        with jax_compat.set_current_trace(self.trace):
            return jax_compat.eval_jaxpr(jaxpr, [*values, *inputs])


def _value_before(binding: Binding) -> jax.Array:
    """Returns the value of a variable on one device."""
    with state_lock:
        value = binding.value
        check_no_tracer(binding, value)
        value = on_no_device(value)
    if binding.sync_policy is SyncPolicy.PARTS and is_stored_as_parts(value, binding.shape):
        return sum_of_parts(value)
    if binding.sync_policy is not SyncPolicy.COMPONENTS:
        return value
    aggregation = binding.variable.aggregation
    if aggregation is VariableAggregation.SUM:
        return jnp.sum(value, axis=0, dtype=value.dtype)
    return jnp.mean(value, axis=0) if aggregation is VariableAggregation.MEAN else value[0]


def _value_now(variable: Any) -> Any:
    """Returns the value of a variable that a function staged by JAX reads when it runs."""
    capture = current_capture()
    if not isinstance(capture, EagerCapture) or variable is None:
        raise TraceError(
            "A function that JAX staged (jax.jit, scan, …) in strategy.run(..., options=rx.RunOptions(eager=True)) reads "
            "a variable, and is used outside of it. Make the function again, or pass the variable's value to it."
        )
    return capture.value_of(variable)
