"""The passes from a user's function to a program, in order. Other files of this folder implement most of them.

``VARIANT_PASSES`` run here on every trace, and ``PROGRAM_PASSES`` on every program. The later passes belong to a
lowering: ``RunOptions(check_finite=True)`` adds ``watch_finite``, which diagnostics provide, and ``lowering/spmd.py``
continues with ``make_whole`` and ``cut_before_updates``.

| pass | takes | gives | skipped |
|---|---|---|---|
| ``captured`` | a function | a trace: variables are inputs; tapes and optimizers are marks | never |
| ``report_capture`` | a trace | the same; diagnostics may refuse it | cross-replica code |
| ``take_rows`` | a trace | a trace of rows of tables | without parameter servers |
| ``resolve_marks`` | a trace | a jaxpr with computed derivatives and summed gradients | without marks |
| ``report_gradients`` | a jaxpr | the same; diagnostics may refuse it | one replica |
| ``analyse_replication`` | a jaxpr | the same, and the replication of its results | one replica |
| ``open_calls`` | a program | its collectives are at the top level, except those in loops | one size |
| ``compare_sizes`` | a program | a result is invariant only if all sizes compute it alike | one size |
| ``check_synchronised`` | a program | the same, or an error if mirrored variables would differ | never |
| ``watch_finite`` | a program | a program with one more result: the origin of its first NaN | not asked for |
| ``make_whole`` | a program | operations that XLA shards wrongly take replicated arrays | one device for each replica |
| ``cut_before_updates`` | a program | a program, and the updates of sharded state | no ``shard_state`` |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.bindings import Binding, SyncPolicy
from replicax._src.tracing.cache import ArgumentLeaf
from replicax._src.tracing.capture import Capture, TracedCapture, Uneven, created_again
from replicax._src.tracing.equations import has_any
from replicax._src.tracing.key import is_array
from replicax._src.tracing.mark_resolution import MarkResolver, evaluate_inlined
from replicax._src.tracing.primitives import MARKS
from replicax._src.tracing.program import Output, ReplicaProgram, Variant
from replicax._src.tracing.replication import Replication, analyse, is_call_with_collective
from replicax._src.tracing.value_numbering import number_of, number_variant
from replicax._src.user.listening import listener
from replicax._src.user.tensorflow_values import is_tensor, name_of
from replicax._src.values.distributed import DistributedValues, is_value
from replicax._src.values.framework import frameworks_in_use, is_variable
from replicax._src.vocabulary.errors import (
    DivergenceError,
    StructureError,
    TraceError,
    UnsupportedError,
)

TakeRows = Callable[[Any, int, Sequence[Binding], int, Sequence[tuple[str, int]]], tuple[Any, list[Any]]]
"""Maps a trace, the number of its constants, the bindings of its variables, the number of returned arrays and the names
of axes to another trace, and to constants that come before its own.
"""

_MAX_TRACES = 8
_MAX_ROUNDS = 16
_epochs = itertools.count()
_epoch = next(_epochs)


# --- a function -> a program --------------------------------------------------------------------------------


def trace_replicas(
    call: Callable[[int, list[Any]], Any],
    inputs: Sequence[ArgumentLeaf],
    num_replicas: int,
    *,
    binding_of: Callable[[Any], Binding],
    sum_gradients: Callable[[Capture, Sequence[Any]], list[Any]],
    is_for_plan: bool = False,
) -> tuple[ReplicaProgram, list[int] | None]:
    """Traces a replica function into one program for all replicas, with one variant per batch size.

    Args:
      call: Calls the function with the number of the variant and the tracers of ``inputs``.
      inputs: The arrays that the function takes.
      binding_of: Returns the binding of a variable.
      sum_gradients: Sums gradients over the replicas.
      is_for_plan: True if the program will not run; see ``Capture``.

    Returns:
      The program, and the number of rows of each replica if they are not all equal.
    """
    patterns = [tuple(leaf.shapes[r] for leaf in inputs if leaf.shapes) for r in range(num_replicas)]
    distinct = list(dict.fromkeys(patterns))
    variant_of_replica = [distinct.index(pattern) for pattern in patterns]
    rows: list[int] | None = None
    if len(distinct) > 1:
        first = next(leaf.shapes for leaf in inputs if leaf.shapes is not None)
        rows = [shape[0] if shape else 1 for shape in first]

    how = _Tracing(binding_of, num_replicas, sum_gradients, is_for_plan=is_for_plan)

    def trace(number: int, uneven: Uneven | None = None, forced: Sequence[bool] | None = None) -> Variant:
        replica_id = variant_of_replica.index(number)
        try:
            return _trace_variant(
                functools.partial(call, number),
                [leaf.aval(replica_id) for leaf in inputs],
                [Replication.VARYING if leaf.kind == "row" else Replication.INVARIANT for leaf in inputs],
                dataclasses.replace(how, uneven=uneven, forced_sums=forced),
            )
        except Exception as error:
            note = listener().failed_trace(error, replica_id, rows)
            if note is not None and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    variants = [trace(0)] if rows is None else _trace_sizes(trace, variant_of_replica, rows)
    program = ReplicaProgram(variants, tuple(variant_of_replica))
    for one in PROGRAM_PASSES:
        program = one(program)
    return program, rows


def trace_cross_replica(
    call: Callable[[list[Any]], Any],
    avals: Sequence[Any],
    binding_of: Callable[[Any], Binding],
    *,
    on_strategy: Callable[[Any], None] | None = None,
    take_rows: TakeRows | None = None,
    is_for_plan: bool = False,
) -> Variant:
    """Traces a cross-replica function, which has one variant.

    Args:
      call: Calls the function with the flat traced arguments.
      on_strategy: Called with each strategy whose ``run`` the function calls.
      take_rows: The pass of that name, or None.
      is_for_plan: True if the program will not run; see ``Capture``.
    """
    how = _Tracing(binding_of, on_strategy=on_strategy, take_rows=take_rows, is_for_plan=is_for_plan)
    return _trace_variant(call, avals, [Replication.INVARIANT] * len(avals), how)


# --- several sizes: all variants decide together --------------------------------------------------------


def _trace_sizes(
    trace: Callable[[int, Uneven, Sequence[bool] | None], Variant],
    variant_of_replica: Sequence[int],
    rows_of_replica: Sequence[int],
) -> list[Variant]:
    """Traces all variants of a function.

    Args:
      trace: Traces one variant, given its number, its knowledge of the others, and the gradients to sum.

    Raises:
      StructureError: The variants exchange, sum or assign different things.
    """
    rows = [rows_of_replica[variant_of_replica.index(v)] for v in range(max(variant_of_replica) + 1)]
    known: list[list[tuple[int, ...]]] = []
    sums: list[bool] | None = None
    for _ in range(_MAX_ROUNDS):
        sizes = [Uneven(variant_of_replica, known, num_rows) for num_rows in rows]
        variants, errors = [], []
        for number, size in enumerate(sizes):
            try:
                variants.append(trace(number, size, sums))
            except Exception as error:
                errors.append(error)
        seen = [list(column) for column in zip(*(size.seen for size in sizes), strict=False)]
        if (
            seen != known
        ):  # some shapes were guessed: values computed from them may be wrong, and errors may be false
            known = seen
            continue
        if errors:
            raise errors[0]
        check_equal_counts([len(size.seen) for size in sizes], "exchanges of arrays between replicas")
        check_equal_counts([len(v.sums) for v in variants], "gradients given to optimizers")
        joint = [any(column) for column in zip(*(v.sums for v in variants), strict=True)]
        if sums == joint or all(v.sums == joint for v in variants):
            break
        sums = joint
    else:
        raise StructureError(
            f"The shapes that replicas exchange, or the gradients that they sum, still changed when the replica "
            f"function was traced {_MAX_ROUNDS} times. Gather arrays of different sizes once, and compute from that."
        )
    if len({tuple(id(e.binding) for e in v.written) for v in variants}) > 1:
        raise StructureError(
            "The replica function assigns different variables, or in a different order, depending on the local batch "
            "size. Assign the same variables on all replicas; use jnp.where or rx.cond for the value."
        )
    return variants


def check_equal_counts(counts: Sequence[int], what: str) -> None:
    """Raises if variants do something a different number of times."""
    if len(set(counts)) > 1:
        raise StructureError(
            f"The replica function has {' or '.join(map(str, sorted(set(counts))))} {what}, depending on the "
            f"replica's local batch size: replicas would wait for each other for ever. Do not branch on "
            f"x.shape[0] in Python around collectives or optimizer.apply."
        )


# --- one size: a trace, and its passes ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Tracing:
    """The parameters of one trace, for the passes over a variant.

    Attributes:
      binding_of: Returns the binding of a variable.
      num_replicas: The number of replicas R; None for a cross-replica function.
      sum_gradients: Sums gradients over replicas.
      on_strategy, take_rows, is_for_plan: See ``trace_cross_replica``.
      uneven: The variant's knowledge of the others.
      forced_sums: For each gradient, True to sum it, if that is already decided; see ``MarkResolver``.
    """

    binding_of: Callable[[Any], Binding]
    num_replicas: int | None = None
    sum_gradients: Callable[[Capture, Sequence[Any]], list[Any]] = lambda capture, values: list(values)
    on_strategy: Callable[[Any], None] | None = None
    take_rows: TakeRows | None = None
    is_for_plan: bool = False
    uneven: Uneven | None = None
    forced_sums: Sequence[bool] | None = None

    @property
    def axes(self) -> list[tuple[str, int]]:
        """Returns the names of axes, with their sizes."""
        # The second name makes JAX's caches of inner functions (jit, scan) miss after a trace in which such a function
        # read a variable, because the cached jaxprs refer to that trace.
        axes = [] if self.num_replicas is None else [(REPLICA_AXIS, self.num_replicas)]
        return [*axes, (f"replicax_trace_{_epoch}", 1)] if _epoch else axes


def _trace_variant(
    call: Callable[[list[Any]], Any], avals: Sequence[Any], replications: Sequence[Replication], how: _Tracing
) -> Variant:
    """Traces ``call`` over tracers of ``avals``, and runs the passes over the trace.

    It traces again if the function created variables or a source of a gradient was unconnected.

    Args:
      replications: The replications of the arguments.

    Raises:
      TracedConditionError: Python's ``if``, ``int`` or the like is applied to a traced value.
      TraceError: The function uses a tracer of another trace.
      UnsupportedError: TensorFlow computes in the function.
      VariableError: Every call would create a variable.
    """
    unconnected: frozenset[tuple[int, int]] = frozenset()
    has_created = False
    for _ in range(_MAX_TRACES):
        capture = TracedCapture(
            how.binding_of,
            how.num_replicas,
            uneven=how.uneven and how.uneven.restart(),
            unconnected=unconnected,
            on_strategy=how.on_strategy,
            is_for_plan=how.is_for_plan,
        )
        trace = captured(call, avals, replications, capture, how.axes)
        if capture.created:
            # As tf.function does: only a second trace shows whether every call would create variables.
            if has_created:
                raise created_again(capture.created[0])
            has_created = True
            continue
        variant = _passed(trace, capture, how)
        found = variant.unconnected - unconnected
        if found and how.take_rows is not None:  # it may drop a lookup of no rows, which connects the table
            found &= _passed(trace, capture, dataclasses.replace(how, take_rows=None)).unconnected
        if not found:
            return variant
        unconnected |= found
    raise TraceError(
        "The function takes other gradients each time it is traced: the arguments of tape.gradient must not depend on "
        "how often the function was called."
    )


def _passed(variant: Variant, capture: Capture, how: _Tracing) -> Variant:
    for one in VARIANT_PASSES:
        variant = one(variant, capture, how)
    return variant


# --- capture ------------------------------------------------------------------------------------------------


def captured(
    call: Callable[[list[Any]], Any],
    avals: Sequence[Any],
    replications: Sequence[Replication],
    capture: TracedCapture,
    axes: Sequence[tuple[str, int]],
) -> Variant:
    """Returns the trace of a function, with its marks. Its variables are inputs between the constants and the
    arguments.
    """
    global _epoch
    tree: Any = None
    outputs: list[Output] = []

    def body(*tracers: Any) -> list[Any]:
        nonlocal tree, outputs
        with capture.tracing():
            returned = call(list(tracers))
            is_leaf = is_value if capture.is_replica else is_variable
            leaves, tree = jax.tree_util.tree_flatten(returned, is_leaf=is_leaf)
            given = [_output(leaf) for leaf in leaves]
            outputs = [Output(o.is_array, None if o.is_array else o.value) for o in given]
            arrays = [o.value for o in given if o.is_array]
            return arrays + [e.current for e in capture.entries.values() if e.written]

    with contextlib.ExitStack() as scopes, listener().user_code("run" if capture.is_replica else "function"):
        for framework in frameworks_in_use():
            scopes.enter_context(framework.trace_scope(capture))
        jaxpr, consts = jax_compat.trace(body, avals, axes)
    if capture.read_in_inner_trace:
        _epoch = next(_epochs)
    entries = list(capture.entries.values())
    found = {e.params["index"]: e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "replicax_variable"}
    invars = [
        *jaxpr.invars[: len(consts)],
        *(found[i] for i in range(len(entries))),
        *jaxpr.invars[len(consts) :],
    ]
    eqns = [e for e in jaxpr.eqns if e.primitive.name != "replicax_variable"]
    state = [
        Replication.VARYING if e.binding.sync_policy.is_per_replica else Replication.INVARIANT
        for e in entries
    ]
    return Variant(
        jax_compat.rebuild(jaxpr, invars=invars, eqns=eqns),
        consts,
        entries,
        tree,
        outputs,
        input_replications=[Replication.INVARIANT] * len(consts) + state + list(replications),
    )


def _output(leaf: Any) -> Output:
    if isinstance(leaf, DistributedValues):
        local = getattr(leaf, "local", None)
        return Output(True, leaf.as_array() if local is None else local)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        if not is_array(leaf):
            raise UnsupportedError(
                f"The function returns a NumPy {type(leaf).__name__} of dtype {leaf.dtype}, and programs compute with numbers only. "
                "Return a str or a list, which are returned unchanged, or leave it out."
            )
        return Output(True, jnp.asarray(leaf))
    if is_tensor(leaf):
        raise UnsupportedError(
            f"The function returns a {name_of(leaf)}, which TensorFlow computed once, while the function was traced, and "
            "not in each step. Compute it with keras.ops or jax.numpy; `replicax migrate` finds the lines."
        )
    if isinstance(leaf, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
        kind = "a coroutine (async def)" if isinstance(leaf, types.CoroutineType) else "a generator (yield)"
        if not isinstance(leaf, types.AsyncGeneratorType):
            leaf.close()  # otherwise Python warns that it was never awaited
        raise UnsupportedError(
            f"The function returns {kind}, {leaf.__qualname__}, and its body has not been run. Pass a function that returns its "
            "results."
        )
    return Output(False, leaf)


# --- the passes over a variant ------------------------------------------------------------------------------


def report_capture(variant: Variant, capture: Capture, how: _Tracing) -> Variant:
    """Reports the trace of a replica function to the listener, which may refuse it."""
    del capture
    if how.num_replicas is not None:
        listener().captured(variant.jaxpr, variant.input_replications, how.num_replicas)
    return variant


def take_rows(variant: Variant, capture: Capture, how: _Tracing) -> Variant:
    """Replaces tables on parameter servers by the rows that the function looks up."""
    del capture
    if how.take_rows is None:
        return variant
    jaxpr, consts = how.take_rows(
        variant.jaxpr,
        len(variant.consts),
        [entry.binding for entry in variant.entries],
        variant.num_arrays,
        how.axes,
    )
    changed = variant.with_jaxpr(jaxpr, consts)
    return dataclasses.replace(changed, input_replications=[Replication.INVARIANT] * len(jaxpr.invars))


def resolve_marks(variant: Variant, capture: Capture, how: _Tracing) -> Variant:
    """Replaces the marks of tapes and optimizers by derivatives and sums."""
    if not has_any(variant.jaxpr, MARKS):
        return variant
    rewriter = MarkResolver(
        functools.partial(how.sum_gradients, capture),
        how.forced_sums,
        is_empty=how.uneven is not None and how.uneven.rows == 0,
        is_uneven=how.uneven is not None,
        num_replicas=how.num_replicas or 1,
    )
    changed = variant.retraced(
        lambda jaxpr, args: rewriter.evaluate(jaxpr, args, variant.input_replications), how.axes
    )
    return dataclasses.replace(
        changed, sums=rewriter.sums, unconnected=variant.unconnected | rewriter.unconnected
    )


def report_gradients(variant: Variant, capture: Capture, how: _Tracing) -> Variant:
    """Reports the gradients of a replica function to the listener, which may refuse them. Sets the line that reduces
    a differentiated loss.
    """
    del capture
    if (how.num_replicas or 1) == 1:
        return variant
    reduced_at = listener().resolved(variant.jaxpr, variant.input_replications, how.num_replicas or 1)
    return dataclasses.replace(variant, reduced_at=reduced_at)


def analyse_replication(variant: Variant, capture: Capture, how: _Tracing) -> Variant:
    """Sets the replication of each result."""
    del capture
    outs = [Replication.INVARIANT] * len(variant.jaxpr.outvars)
    if (how.num_replicas or 1) > 1:
        outs, _ = analyse(variant.jaxpr, variant.input_replications)
    return dataclasses.replace(
        variant, out_replications=outs[: variant.num_arrays], write_replications=outs[variant.num_arrays :]
    )


VARIANT_PASSES: Sequence[Callable[[Variant, Capture, _Tracing], Variant]] = (
    report_capture,
    take_rows,
    resolve_marks,
    report_gradients,
    analyse_replication,
)


# --- the passes over a program ------------------------------------------------------------------------------


def open_calls(program: ReplicaProgram) -> ReplicaProgram:
    """Inlines calls that contain collectives, because a program is cut at collectives. Loops and conditions stay."""
    axes = [(REPLICA_AXIS, len(program.variant_of_replica))]

    def opened(variant: Variant) -> Variant:
        if not any(map(is_call_with_collective, variant.jaxpr.eqns)):
            return variant
        return variant.retraced(evaluate_inlined, axes)

    if len(program.variants) == 1:
        return program
    return dataclasses.replace(program, variants=list(map(opened, program.variants)))


def compare_sizes(program: ReplicaProgram) -> ReplicaProgram:
    """Marks a result as varying unless all variants compute it alike."""
    if len(program.variants) == 1:
        return program
    num_arrays = program.variants[0].num_arrays
    outs, writes = [], []
    for variant in program.variants:
        known = number_variant(variant)
        numbers = [number_of(known, atom) for atom in variant.jaxpr.outvars]
        outs.append(numbers[:num_arrays])
        writes.append(
            dict(zip((id(e.binding) for e in variant.written), numbers[num_arrays:], strict=True)),
        )
    is_equal = [len(set(column)) == 1 for column in zip(*outs, strict=True)]

    def compared(variant: Variant) -> Variant:
        written = [len({numbers.get(id(e.binding)) for numbers in writes}) == 1 for e in variant.written]
        return dataclasses.replace(
            variant,
            out_replications=_unless(is_equal, variant.out_replications),
            write_replications=_unless(written, variant.write_replications),
        )

    return dataclasses.replace(program, variants=list(map(compared, program.variants)))


def _unless(is_equal: Sequence[bool], replications: Sequence[Replication]) -> list[Replication]:
    return [
        replication if equal else Replication.VARYING
        for equal, replication in zip(is_equal, replications, strict=True)
    ]


def check_synchronised(program: ReplicaProgram) -> ReplicaProgram:
    """Raises if a program would leave a mirrored variable with different values on different replicas.

    Raises:
      DivergenceError: The error names the variable and the line that assigns it.
    """
    for index, line, is_same in zip(program.written, program.lines, program.same_writes, strict=True):
        binding = program.bindings[index]
        if binding.sync_policy is SyncPolicy.MIRRORED and not is_same:
            raise DivergenceError(
                f"Variable {binding.name!r} is mirrored, and the value assigned to it at {line} differs (or may "
                f"differ) between replicas: its copies would fall out of sync. Either combine the value "
                f"first (rx.get_replica_context().all_reduce(...)), or make the variable with "
                f"aggregation=rx.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or with "
                f"synchronization=ON_READ to keep one value per replica; for gradients use the "
                f"optimizer's apply (or rx.optax.aggregate_gradients()), which sums them. If you know that "
                f"the value is the same on all replicas, say so with rx.assert_same(value)."
            )
    return program


PROGRAM_PASSES: Sequence[Callable[[ReplicaProgram], ReplicaProgram]] = (
    open_calls,
    compare_sizes,
    check_synchronised,
)
