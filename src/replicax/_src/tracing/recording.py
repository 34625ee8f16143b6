"""Recording: tapes for functions that run operation by operation on concrete arrays.

Every operation of an eagerly run function comes by here: it is evaluated, and tapes that are open note it. Arrays are
known by identity.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.errors import TapeError, UnsupportedError
from replicax._src.tracing.rewrite import Rewriter
from replicax._src.tracing.verdict import Verdict, is_replica_collective
from replicax._src.user_code import user_line

NO_AXIS = (
    "A collective of jax.lax over the axis 'replica' was called at {line}: with RunOptions(eager=True) one replica runs, and "
    "JAX knows no such axis. Use rx.get_replica_context().all_reduce, all_gather or merge_call, or run without eager=True."
)
_JITS = frozenset({"jit", "pjit", "closed_call", "core_call"})


class Step(NamedTuple):
    """One operation that a tape recorded, with its arrays."""

    operation: Any
    inputs: list[Any]
    outputs: list[Any]
    line: str


class Record:
    """What one tape has recorded.

    Attributes:
      steps: In order.
      watched_at: By ``id`` of an array: how many steps there were when the tape began to watch it.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.watched_at: dict[int, int] = {}
        self.known: dict[int, Any] = {}  # all arrays met, which keeps their ids theirs

    def watch(self, value: Any) -> None:
        self.know(value)
        self.watched_at.setdefault(id(value), len(self.steps))

    def know(self, value: Any) -> None:
        self.known[id(value)] = value

    def add(self, step: Step) -> None:
        self.steps.append(step)
        for value in (*step.inputs, *step.outputs):
            self.know(value)

    def is_active(self, value: Any, index: int) -> bool:
        """Whether step ``index`` used the array when it was watched already; unwatched ones always count."""
        return self.watched_at.get(id(value), 0) <= index


class Recorder:
    """Evaluates and records what a function computes.

    Attributes:
      trace: To be made JAX's current trace.
    """

    def __init__(self) -> None:
        self.trace = jax_compat.EagerTrace(self._observe, lambda: bool(self._open))
        self._records: dict[int, Record] = {}
        self._open: list[Record] = []
        # Marks stand only in functions that JAX stages; of one replica the gradients are the sums.
        self._rewriter = Rewriter(list)
        self._inner_consts: dict[int, tuple[Any, list[Any]]] = {}

    def close(self) -> None:
        """Forgets all arrays."""
        self._records.clear()
        self._inner_consts.clear()

    # --- tapes ----------------------------------------------------------------------------------------

    def begin(self, tape: Any, tape_id: int) -> None:
        """The tape records from here on."""
        if tape_id not in self._records:
            self._records[tape_id] = Record()
            weakref.finalize(tape, self._records.pop, tape_id, None)
        self._open.append(self._records[tape_id])

    def end(self, tape_id: int) -> None:
        """The tape records no more."""
        self._open.remove(self._records[tape_id])

    def watch(self, tape_id: int, value: Any) -> None:
        """The tape watches an array from here on."""
        self._records[tape_id].watch(value)

    def know(self, value: Any) -> None:
        """Variables that are read: open tapes may be asked about the array."""
        for record in self._open:
            record.know(value)

    def gradient(
        self,
        tape_id: int,
        targets: Sequence[Any],
        seeds: Sequence[Any],
        sources: Sequence[Any],
        derived: Sequence[bool],
        watched: Sequence[Any],
    ) -> list[Any]:
        """The gradients by ``sources``, None where the targets do not depend on one."""
        with contextlib.nullcontext() if self._open else jax_compat.evaluating():
            return gradients_of(self._records[tape_id], targets, seeds, sources, derived, watched)

    # --- operations -----------------------------------------------------------------------------------

    def _observe(self, operation: Any, inputs: list[Any]) -> list[Any]:
        subs = jax_compat.sub_jaxprs(operation)
        if self._open and subs and (consts := self._known_consts(subs)):
            return self._inline(operation, subs, consts, inputs)
        evaluated = self._resolved(operation, subs, inputs)
        with jax_compat.evaluating():
            outputs = evaluated(*inputs)
            if self._open:  # stop_gradient and kin give back what they are given
                outputs = [jnp.copy(out) if any(out is x for x in inputs) else out for out in outputs]
        if self._open:
            step = Step(evaluated, inputs, outputs, user_line())
            for record in self._open:
                record.add(step)
        return outputs

    def _resolved(self, operation: Any, subs: list[Any], inputs: Sequence[Any]) -> Any:
        """The operation with the marks inside (tapes in a scan or condition) resolved."""
        if is_replica_collective(operation):
            raise UnsupportedError(NO_AXIS.format(line=user_line()))
        if not any(self._rewriter.has_marker(jax_compat.inner_jaxpr(s)[0]) for s in subs):
            return operation
        with jax_compat.evaluating():
            jaxpr, consts = jax_compat.trace(operation, inputs)
        known = [Verdict.SAME] * (len(consts) + len(inputs))
        return jax_compat.Operation(
            operation.primitive,
            operation.params,
            lambda *xs: self._rewriter.evaluate(jaxpr, [*consts, *xs], known),
        )

    def _known_consts(self, subs: Sequence[Any]) -> list[Any]:
        """Arrays that open tapes know and that JAX has baked into jaxprs, where derivatives miss them."""
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
            entry = self._inner_consts[id(jaxpr)] = (jaxpr, consts)  # the jaxpr keeps its id its own
        return entry[1]

    def _inline(
        self, operation: Any, subs: Sequence[Any], consts: Sequence[Any], inputs: Sequence[Any]
    ) -> list[Any]:
        """Evaluates a jitted function operation by operation, so that tapes see the arrays it closes over."""
        if operation.name not in _JITS:
            shapes = ", ".join(f"{c.dtype}{list(c.shape)}" for c in consts)
            raise TapeError(
                f"With RunOptions(eager=True) a jitted function inside a {operation.name} at {user_line()} closes over "
                f"arrays ({shapes}) that a tape may have to differentiate by. Pass them to it as arguments."
            )
        jaxpr, values = jax_compat.open_jaxpr(subs[0])
        with jax_compat.set_current_trace(self.trace):
            return jax_compat.eval_jaxpr(jaxpr, [*values, *inputs])


# --- derivatives --------------------------------------------------------------------------------------


def gradients_of(
    record: Record,
    targets: Sequence[Any],
    seeds: Sequence[Any],
    sources: Sequence[Any],
    derived: Sequence[bool],
    watched: Sequence[Any],
) -> list[Any]:
    """Reverse-mode differentiation of what a tape recorded.

    Args:
      seeds: The cotangents of the targets.
      derived: For each source, whether it counts only if it was computed from ``watched`` arrays.
    """
    chosen, computed = _steps_from(record, sources)
    wanted = {id(s) for s in sources}
    cotangents: dict[int, Any] = {}
    leaves: dict[int, Any] = {}
    for target, seed in zip(targets, seeds, strict=True):
        _accumulate(cotangents, id(target), seed)
        if id(target) in wanted:
            _accumulate(leaves, id(target), seed)
    for index in reversed(chosen):
        step = record.steps[index]
        given = [cotangents.pop(id(out), None) for out in step.outputs]
        active = [
            i
            for i, x in enumerate(step.inputs)
            if _is_inexact(x) and (id(x) in computed or (id(x) in wanted and record.is_active(x, index)))
        ]
        if all(g is None for g in given):
            continue
        for i, cotangent in zip(active, _pull_back(step, given, active), strict=True):
            x = step.inputs[i]
            if id(x) in computed:
                _accumulate(cotangents, id(x), cotangent)
            if id(x) in wanted and record.is_active(x, index):
                _accumulate(leaves, id(x), cotangent)
    reached = _reached_from(record, watched) if any(derived) else set()
    return [
        None if is_derived and id(source) not in reached else leaves.get(id(source))
        for source, is_derived in zip(sources, derived, strict=True)
    ]


def _steps_from(record: Record, sources: Sequence[Any]) -> tuple[list[int], set[int]]:
    """The steps through which derivatives by a source go, and the ids of what they compute."""
    wanted = {id(s) for s in sources}
    computed: set[int] = set()
    chosen = []
    for index, step in enumerate(record.steps):
        if step.operation.name != "stop_gradient" and any(
            id(x) in computed or (id(x) in wanted and record.is_active(x, index)) for x in step.inputs
        ):
            chosen.append(index)
            computed.update(id(out) for out in step.outputs if _is_inexact(out))
    return chosen, computed


def _reached_from(record: Record, watched: Sequence[Any]) -> set[int]:
    """The ids of arrays that differentiable steps compute from watched ones."""
    reached = {id(w) for w in watched}
    for index, step in enumerate(record.steps):
        if step.operation.name != "stop_gradient" and any(
            id(x) in reached and record.is_active(x, index) for x in step.inputs
        ):
            reached.update(id(out) for out in step.outputs if _is_inexact(out))
    return reached


def _pull_back(step: Step, given: Sequence[Any], active: Sequence[int]) -> list[Any]:
    """The cotangents of a step's ``active`` inputs."""
    present = [i for i, g in enumerate(given) if g is not None]

    def forward(*values: Any) -> list[Any]:
        inputs = list(step.inputs)
        for i, value in zip(active, values, strict=True):
            inputs[i] = value
        outputs = step.operation(*inputs)
        return [outputs[i] for i in present]

    try:
        _, pull = jax.vjp(forward, *[step.inputs[i] for i in active])
        return list(pull([given[i] for i in present]))
    except Exception as error:
        error.add_note(f"This is the derivative of {step.operation.name} at {step.line}.")
        raise


def _accumulate(table: dict[int, Any], key: int, value: Any) -> None:
    table[key] = table[key] + value if key in table else value


def _is_inexact(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)
