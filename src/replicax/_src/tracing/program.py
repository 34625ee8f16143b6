"""ReplicaProgram: a function traced over ONE replica's inputs, its variables made inputs and outputs.

A strategy's placement decides where and how it runs. Replicas with different shapes run different
variants of one program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import jax_compat
from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.errors import (
    DivergenceError,
    ReplicaxError,
    StructureError,
    TracedConditionError,
    TraceError,
    UnsupportedError,
)
from replicax._src.framework import frameworks_in_use, is_variable
from replicax._src.migrate import tensorflow_code
from replicax._src.tracing.capture import Capture, Entry, Uneven, created_again
from replicax._src.tracing.key import is_array
from replicax._src.tracing.rewrite import Rewriter, SumGradients
from replicax._src.tracing.slots import Sharing, Slot
from replicax._src.tracing.verdict import Verdict, analyse, has_replica_collective
from replicax._src.user_code import user_line_of
from replicax._src.values import DistributedValues, is_value

Rewrite = Callable[[Any, int, Sequence[Entry], int, Sequence[tuple[str, int]]], tuple[Any, list[Any]]]
"""From a trace, the number of its constants, its variables, the number of arrays that it returns and the names of axes,
to another trace, and constants that come before its own.
"""

_MAX_TRACES = 8
_epochs = itertools.count()
_epoch = next(_epochs)


@dataclass(frozen=True)
class Output:
    """One leaf that the function returned: an array computed by the program, or a Python value."""

    is_array: bool
    value: Any = None


@dataclass
class Variant:
    """One trace of the function.

    Attributes:
      jaxpr: Invars are constants, then the state in order of ``entries``, then the arguments. Outvars are
        the array outputs, then the new values of the written entries.
      consts: Values of the leading invars.
      entries: The variables met, in order.
      tree, outputs: The structure that the function returned, and its leaves.
      out_verdicts, write_verdicts: Of the outvars.
      input_verdicts: Of the invars.
      sums: Which gradients are summed over replicas (see ``Rewriter``).
      seen_shapes: Shapes of arrays that replicas exchange, in order.
    """

    jaxpr: Any
    consts: list[Any]
    entries: list[Entry]
    tree: Any
    outputs: list[Output]
    out_verdicts: list[Verdict]
    write_verdicts: list[Verdict]
    input_verdicts: list[Verdict]
    sums: list[bool]
    seen_shapes: list[tuple[int, ...]]

    @property
    def written(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.written]

    @property
    def num_arrays(self) -> int:
        return sum(output.is_array for output in self.outputs)

    @property
    def state_vars(self) -> list[Any]:
        """The invars of ``entries``."""
        return self.jaxpr.invars[len(self.consts) : len(self.consts) + len(self.entries)]

    def with_jaxpr(self, jaxpr: Any, consts: Sequence[Any]) -> Variant:
        """The same computation, written otherwise.

        Args:
          consts: Of further invars, before all others.
        """
        return dataclasses.replace(
            self,
            jaxpr=jaxpr,
            consts=[*consts, *self.consts],
            input_verdicts=[Verdict.SAME] * len(consts) + self.input_verdicts,
        )


@dataclass
class _Traced:
    capture: Capture
    jaxpr: Any
    consts: list[Any]
    tree: Any
    outputs: list[Output]


def is_output_leaf(value: Any) -> bool:
    """Leaves of what a function returns: values that are not nests although JAX might see one in them."""
    return is_value(value)


def trace_variant(
    call: Callable[[list[Any]], Any],
    avals: Sequence[Any],
    verdicts: Sequence[Verdict],
    *,
    slot_of: Callable[[Any], Slot],
    num_replicas: int | None,
    sum_gradients: Callable[[Capture], SumGradients],
    uneven: Callable[[], Uneven | None] = lambda: None,
    forced_sums: Sequence[bool] | None = None,
    on_strategy: Callable[[Any], None] | None = None,
    rewrite: Rewrite | None = None,
) -> Variant:
    """Traces ``call`` over tracers of ``avals`` and resolves its marks.

    Args:
      call: Calls the user's function with the flat traced arguments.
      verdicts: Of the arguments.
      slot_of: Gives the slot of a variable.
      num_replicas: R, or None for a cross-replica function.
      sum_gradients: Builds what sums gradients over replicas.
      on_strategy: Of a cross-replica function: told of each strategy whose ``run`` is called in it.
      rewrite: Changes the trace before its marks are resolved.

    Raises:
      TracedConditionError: Python ``if``, ``int`` and kin on a traced value.
      TraceError: A tracer of another trace was used.
      UnsupportedError: TensorFlow computes in the function.
      VariableError: Each call would create a variable.
    """
    unconnected: frozenset[tuple[int, int]] = frozenset()
    has_created = False
    for _ in range(_MAX_TRACES):
        capture = Capture(
            slot_of, num_replicas, uneven=uneven(), unconnected=unconnected, on_strategy=on_strategy
        )
        traced = _trace(call, avals, capture)
        if capture.created:
            # As tf.function does: only a second trace shows whether every call would create variables.
            if has_created:
                raise created_again(capture.created[0])
            has_created = True
            continue
        is_empty = capture.uneven is not None and capture.uneven.rows == 0
        rewriter = Rewriter(
            sum_gradients(capture), forced_sums, is_empty=is_empty, num_replicas=capture.num_replicas or 1
        )
        variant = _resolve(traced, rewriter, verdicts, rewrite)
        found = rewriter.unconnected - unconnected
        if found and rewrite is not None:  # it may drop a lookup of no rows, by which the table is connected
            as_traced = Rewriter(sum_gradients(capture), forced_sums, is_empty=is_empty)
            _resolve(traced, as_traced, verdicts, None)
            found &= as_traced.unconnected
        if not found:
            return variant
        unconnected |= found
    raise TraceError(
        "The function takes other gradients each time it is traced: what tape.gradient is given there must not depend on "
        "how often the function was called."
    )


def _axis_env(num_replicas: int | None) -> list[tuple[str, int]]:
    # The second name only makes JAX's caches of inner functions (jit, scan) miss after a trace in which such
    # a function read a variable: what they cached refers to that trace.
    axes = [] if num_replicas is None else [(REPLICA_AXIS, num_replicas)]
    return [*axes, (f"replicax_trace_{_epoch}", 1)] if _epoch else axes


def _trace(call: Callable[[list[Any]], Any], avals: Sequence[Any], capture: Capture) -> _Traced:
    global _epoch
    captured: dict[str, Any] = {}

    def body(*tracers: Any) -> list[Any]:
        with capture.tracing():
            returned = call(list(tracers))
            is_leaf = is_output_leaf if capture.is_replica else is_variable
            leaves, captured["tree"] = jax.tree_util.tree_flatten(returned, is_leaf=is_leaf)
            outputs = [_output(leaf) for leaf in leaves]
            captured["outputs"] = [Output(o.is_array, None if o.is_array else o.value) for o in outputs]
            arrays = [o.value for o in outputs if o.is_array]
            return arrays + [e.current for e in capture.entries.values() if e.written]

    with contextlib.ExitStack() as scopes, _explained(capture.is_replica), tensorflow_code.explained():
        for framework in frameworks_in_use():
            scopes.enter_context(framework.trace_scope(capture))
        jaxpr, consts = jax_compat.trace(body, avals, _axis_env(capture.num_replicas))
    if capture.read_in_inner_trace:
        _epoch = next(_epochs)
    return _Traced(capture, jaxpr, consts, captured["tree"], captured["outputs"])


def _output(leaf: Any) -> Output:
    if isinstance(leaf, DistributedValues):
        local = getattr(leaf, "local", None)
        return Output(True, leaf.as_array() if local is None else local)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        if not is_array(leaf):
            raise UnsupportedError(
                f"The function returns a NumPy {type(leaf).__name__} of dtype {leaf.dtype}, and programs compute with numbers only. "
                "Return a str or a list, which are given back as they are, or leave it out."
            )
        return Output(True, jnp.asarray(leaf))
    if tensorflow_code.is_tensor(leaf):
        raise UnsupportedError(
            f"The function returns a {tensorflow_code.name_of(leaf)}, which TensorFlow computed while the function was traced: once, and "
            "not in each step. Compute it with keras.ops or jax.numpy; `replicax migrate` finds the lines."
        )
    if isinstance(leaf, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
        kind = "a coroutine (async def)" if isinstance(leaf, types.CoroutineType) else "a generator (yield)"
        if not isinstance(leaf, types.AsyncGeneratorType):
            leaf.close()  # or Python warns that it was never awaited
        raise UnsupportedError(
            f"The function gives {kind}, {leaf.__qualname__}: nothing that stands in it has been run. Give a function that returns its "
            "results."
        )
    return Output(False, leaf)


_EAGERLY = "; or run it with options=rx.RunOptions(eager=True) to debug it with real values."


@contextlib.contextmanager
def _explained(is_replica: bool):
    """Adds to JAX's errors about tracers what to do here; ``is_replica``: in a function that ``run`` may run
    eagerly.
    """
    try:
        yield
    except ReplicaxError:
        raise
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise TracedConditionError(
            f"At {user_line_of(error)} Python needs the value of something that is known only when the program "
            f"runs (an argument, a variable, or replica_id_in_sync_group): an `if`, `while`, int(), float() "
            f"or np.asarray() of a value. The function is traced once for all replicas. Use jnp.where or "
            f"jax.lax.select for a value, rx.cond for a branch that assigns variables, jax.debug.print to "
            f"print{_EAGERLY if is_replica else '.'}"
        ).with_traceback(
            error.__traceback__
        ) from None  # one traceback, down to the user's line; JAX's error is the context
    except jax.errors.UnexpectedTracerError as error:
        raise _leaked(user_line_of(error)) from error


def _resolve(
    traced: _Traced, rewriter: Rewriter, arg_verdicts: Sequence[Verdict], rewrite: Rewrite | None
) -> Variant:
    jaxpr = _promote_placeholders(traced)
    entries = list(traced.capture.entries.values())
    state = [Verdict.DIFFERS if e.slot.sharing.is_per_replica else Verdict.SAME for e in entries]
    verdicts = [Verdict.SAME] * len(traced.consts) + state + list(arg_verdicts)
    consts = traced.consts
    if rewrite is not None:
        num_arrays = sum(output.is_array for output in traced.outputs)
        jaxpr, more = rewrite(jaxpr, len(consts), entries, num_arrays, _axis_env(traced.capture.num_replicas))
        consts = more + consts
        verdicts = [Verdict.SAME] * len(jaxpr.invars)
    if rewriter.has_marker(jaxpr):
        avals = [v.aval for v in jaxpr.invars]
        source, inputs = jaxpr, verdicts
        jaxpr, more = jax_compat.trace(
            lambda *args: rewriter.evaluate(source, args, inputs),
            avals,
            _axis_env(traced.capture.num_replicas),
        )
        consts = more + consts
        verdicts = [Verdict.SAME] * len(more) + verdicts
    is_several = (traced.capture.num_replicas or 1) > 1
    outs = analyse(jaxpr, verdicts)[0] if is_several else [Verdict.SAME] * len(jaxpr.outvars)
    num_arrays = sum(o.is_array for o in traced.outputs)
    return Variant(
        jaxpr,
        consts,
        entries,
        traced.tree,
        traced.outputs,
        outs[:num_arrays],
        outs[num_arrays:],
        verdicts,
        rewriter.sums,
        traced.capture.uneven.seen if traced.capture.uneven else [],
    )


def _promote_placeholders(traced: _Traced) -> Any:
    """Makes the variables found while tracing inputs, between the constants and the arguments."""
    jaxpr = traced.jaxpr
    num_consts = len(traced.consts)
    found = {e.params["index"]: e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "replicax_variable"}
    eqns = [e for e in jaxpr.eqns if e.primitive.name != "replicax_variable"]
    invars = list(jaxpr.invars)
    state = [found[i] for i in range(len(traced.capture.entries))]
    return jax_compat.rebuild(jaxpr, invars=invars[:num_consts] + state + invars[num_consts:], eqns=eqns)


@dataclass
class ReplicaProgram:
    """A function, traced, with what its placement must know.

    Attributes:
      variants: One, or one per distinct pattern of per-replica shapes.
      variant_of_replica: The variant that each replica runs.
      slots: All variables that any variant reads or writes.
      written: Indices into ``slots`` of those written, in order.
      same_writes: Whether each written value is proven the same on all replicas.
      same_outputs: Whether each array output is.
      has_collectives, has_callbacks: What stands in it, at any depth.
    """

    variants: list[Variant]
    variant_of_replica: tuple[int, ...]
    slots: list[Slot] = field(init=False)
    written: list[int] = field(init=False)
    lines: list[str] = field(init=False)
    same_writes: list[bool] = field(init=False)
    same_outputs: list[bool] = field(init=False)
    has_collectives: bool = field(init=False)
    has_callbacks: bool = field(init=False)

    def __post_init__(self) -> None:
        self._check_structures()
        slots: dict[int, Slot] = {}
        written: dict[int, str] = {}
        for variant in self.variants:
            for entry in variant.entries:
                slots.setdefault(id(entry.slot), entry.slot)
                if entry.written:
                    written.setdefault(id(entry.slot), entry.line)
        self.slots = list(slots.values())
        position = {key: i for i, key in enumerate(slots)}
        self.written = [position[key] for key in written]
        self.lines = list(written.values())
        self.same_outputs = [all(v.is_same for v in column) for column in self._columns("out_verdicts")]
        self.same_writes = [self._same_write(i) for i in self.written]
        jaxprs = [variant.jaxpr for variant in self.variants]
        self.has_collectives = any(has_replica_collective(j) is not None for j in jaxprs)
        self.has_callbacks = any(has_callback(j) for j in jaxprs)

    def _columns(self, name: str) -> list[tuple[Verdict, ...]]:
        return list(zip(*(getattr(v, name) for v in self.variants), strict=True))

    def _same_write(self, index: int) -> bool:
        slot = self.slots[index]
        answers = []
        for variant in self.variants:
            for entry, verdict in zip(variant.written, variant.write_verdicts, strict=True):
                if entry.slot is slot:
                    answers.append(verdict.is_same)
        return len(answers) == len(self.variants) and all(answers)

    def _check_structures(self) -> None:
        first = self.variants[0]
        for other in self.variants[1:]:
            kinds = [o.is_array for o in other.outputs]
            if other.tree != first.tree or kinds != [o.is_array for o in first.outputs]:
                raise StructureError(
                    f"The replica function returns different structures on different replicas: {first.tree} for "
                    f"one local batch size and {other.tree} for another. Return the same structure on all."
                )

    def check_synchronised(self) -> None:
        """Refuses a program that would leave a mirrored variable different on different replicas.

        Raises:
          DivergenceError: Naming the variable and the line that assigned it.
        """
        for index, line, is_same in zip(self.written, self.lines, self.same_writes, strict=True):
            slot = self.slots[index]
            if slot.sharing is Sharing.MIRRORED and not is_same:
                raise DivergenceError(
                    f"Variable {slot.name!r} is mirrored, and the value assigned to it at {line} differs (or may "
                    f"differ) between replicas: its copies would fall out of sync. Either combine the value "
                    f"first (rx.get_replica_context().all_reduce(...)), or make the variable with "
                    f"aggregation=rx.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or with "
                    f"synchronization=ON_READ if each replica shall keep its own; for gradients use the "
                    f"optimizer's apply (or rx.optax.aggregate_gradients()), which sums them. If you know that "
                    f"the value is the same on all replicas, say so with rx.assert_same(value)."
                )


def check_no_leaks(variant: Variant) -> None:
    """Refuses a function that closes over tracers, in the outermost trace.

    Raises:
      TraceError: Naming the user's line that computes with one.
    """
    for var, value in zip(variant.jaxpr.invars, variant.consts, strict=False):
        if isinstance(value, jax_compat.Tracer):
            users = [e for e in variant.jaxpr.eqns if any(a is var for a in e.invars)]
            line = jax_compat.equation_line(users[0]) if users else "an unknown line"
            raise _leaked(line)


def _leaked(line: str) -> TraceError:
    return TraceError(
        f"At {line} a value is used that was computed in another, finished, trace: it was "
        f"stored in an object, a list or a global while a function was traced. Return it from the function "
        f"instead, or assign it to an rx.Variable."
    )


_CALLBACKS = {"io_callback", "pure_callback", "python_callback", "ffi_call_callback"}
_FOR_DEBUGGING = {"debug_callback", "debug_print"}


def has_callback(jaxpr: Any) -> bool:
    """Whether Python is called back from ``jaxpr``, at any depth; debug prints do not count."""
    return not _CALLBACKS.isdisjoint(jax_compat.primitives_of(jaxpr))


def is_print(eqn: Any) -> bool:
    """Whether an equation is ``jax.debug.print`` or ``jax.debug.callback``: it gives nothing."""
    return eqn.primitive.name in _FOR_DEBUGGING


def shows_how_often(jaxpr: Any) -> bool:
    """Whether somebody sees how often ``jaxpr`` is evaluated: Python is called back, or something is printed."""
    return not (_CALLBACKS | _FOR_DEBUGGING).isdisjoint(jax_compat.primitives_of(jaxpr))
