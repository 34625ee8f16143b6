"""Captures the variables that a function reads and writes, and its tapes. ``TracedCapture`` does so in a JAX trace.

``EagerCapture`` does so for a function that runs with real values. In a trace, the first read of a variable binds a
placeholder in the outermost trace of the function. The variable then becomes an input of the program even if the read
is inside a scan, a condition or a checkpoint.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

import jax
import jax.numpy as jnp

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.bindings import Binding, SyncPolicy
from replicax._src.tracing.loss_counts import counting
from replicax._src.tracing.markers import (
    Question,
    aggregate_p,
    mark_read,
    placeholder_p,
    region_p,
    watch_p,
)
from replicax._src.user.user_code import user_line
from replicax._src.vocabulary.errors import CrossReplicaContextError, TapeError, TraceError, VariableError

if TYPE_CHECKING:
    from replicax._src.tracing.tape import GradientTape


class Uneven:
    """The shapes on the other replicas that the trace of one variant of an uneven step knows.

    A step whose replicas have different shapes is traced once per distinct pattern of shapes (a variant).
    Repeated tracing finds the shapes that the replicas exchange: ``seen`` of one round becomes ``known`` of the next.

    Attributes:
      variant_of_replica: The variant that each replica runs.
      known: For each exchange, the shape in each variant that earlier rounds have found.
      rows: The local batch size of this variant.
      seen: The shapes of this variant's exchanges, in order.
    """

    def __init__(
        self,
        variant_of_replica: Sequence[int],
        known: Sequence[Sequence[tuple[int, ...]]] | None,
        rows: int,
    ):
        self.rows = rows
        self.variant_of_replica = tuple(variant_of_replica)
        self.known = known
        self.seen: list[tuple[int, ...]] = []

    def restart(self) -> Uneven:
        """Returns a copy that has seen nothing, to trace the variant again from the beginning."""
        self.seen = []
        return self

    def shapes_of_all_replicas(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shape on each replica of the array that is exchanged next; this replica's is ``shape``."""
        self.seen.append(shape)
        if self.known is None or len(self.seen) > len(self.known):
            return [shape] * len(self.variant_of_replica)
        by_variant = self.known[len(self.seen) - 1]
        return [by_variant[v] for v in self.variant_of_replica]


class Entry:
    """The knowledge of one trace about one variable."""

    __slots__ = ("binding", "current", "index", "line", "written")

    def __init__(self, binding: Binding, index: int, current: Any):
        self.binding = binding
        self.index = index
        self.current = current
        self.written = False
        self.line = ""

    def assign(self, value: Any, line: str) -> None:
        """Sets the variable's value from here on."""
        self.current, self.written, self.line = value, True, line


class Observer(Protocol):
    """Observes the trace of a function whose assignments become messages to parameter servers."""

    def read(self, binding: Binding, number: int) -> None:
        """Notes that the function reads a variable. The number of the read is a mark on the value in the program."""

    def written(self, binding: Binding, value: Any, line: str) -> None:
        """Notes that the function has assigned a variable this value, at this line of the user."""

    def applied(
        self, apply: Callable[..., Any], optimizer: Any, gradients: Sequence[Any], variables: Any
    ) -> Any:
        """Calls ``apply(optimizer, gradients, variables)`` of a Keras optimizer, and notes it as one update."""


class Branch:
    """The assignments of one branch of ``rx.cond``: the value and the user's line, by ``id`` of the variable."""

    def __init__(self, trace: Any):
        self.trace = trace
        self.writes: dict[int, tuple[Any, Any, str]] = {}


class Capture(abc.ABC):
    """The variables and tapes of a function that JAX traces or that runs with real values.

    Attributes:
      binding_of: Returns the binding of a variable (from the strategy's table).
      num_replicas: R in a replica function, None in a cross-replica function.
      uneven: The knowledge about the other replicas, if replicas have different shapes; else None.
      entries: The entries by ``id`` of the variable, in the order of discovery.
      trace: JAX's trace of the function itself.
      on_aggregate: Called with the gradients given to an optimizer: their names, the local and the applied values.
      checks: The functions to call before anything is stored, each with an array of the program; None if checks are not
        possible.
      observer: Observes reads and assignments, except those in scans, JAX conditions and other inner traces.
      is_for_plan: True if the program is lowered and not run. A variable without a value then stays without, and is
        traced with its future type.
      created: The name and the user's line of each variable that was created while this was the outermost capture.
    """

    def __init__(
        self,
        binding_of: Callable[[Any], Binding],
        num_replicas: int | None,
        *,
        uneven: Uneven | None = None,
        on_strategy: Callable[[Any], None] | None = None,
        is_for_plan: bool = False,
    ):
        self.binding_of = binding_of
        self.is_for_plan = is_for_plan
        self.num_replicas = num_replicas
        self.uneven = uneven
        self.entries: dict[int, Entry] = {}
        self._num_holders = Counter[int]()  # the entries that have a value, by ``id`` of the value
        self.num_aggregated_reads = 0
        self.on_aggregate: Callable[[Sequence[str], Sequence[Any], Sequence[Any]], None] | None = None
        self.observer: Observer | None = None
        self.checks: list[tuple[Callable[[Any], None], Any]] | None = None
        self.created: list[str] = []
        self.trace: Any = None
        self._on_strategy = on_strategy
        self._tape_traces: dict[int, Any] = {}
        self._branches: list[Branch] = []

    # --- differs between tracing and running ------------------------------------------------

    @property
    @abc.abstractmethod
    def tapes(self) -> list[GradientTape]:
        """Returns the tapes that are recording now."""

    @abc.abstractmethod
    def read(self, variable: Any) -> Any:
        """Returns the variable's value at this point of the function."""

    @abc.abstractmethod
    def watch(self, tape_id: int, value: Any) -> None:
        """Makes a tape watch an array from here on."""

    @abc.abstractmethod
    def end_recording(self, tape: GradientTape, tape_id: int) -> None:
        """Stops the recording of a tape."""

    @abc.abstractmethod
    def aggregate(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Returns the gradients for an optimizer to apply: summed over replicas, unless they are reduced already."""

    @abc.abstractmethod
    def _first_value(self, binding: Binding) -> Any:
        """Returns the placeholder for the value that a variable has at the start of the function."""

    @abc.abstractmethod
    def _detached(self, value: Any) -> Any:
        """Returns an array of the same value that stops gradients."""

    @abc.abstractmethod
    def _assign(self, variable: Any, entry: Entry, value: Any, line: str) -> None: ...

    @abc.abstractmethod
    def _begin(self, tape: GradientTape, tape_id: int) -> None: ...

    @abc.abstractmethod
    def _differentiated(self, tape_id: int, question: Question) -> tuple[list[Any], set[int]]: ...

    # --- the same for both ---------------------------------------------------------------------------

    @property
    def is_replica(self) -> bool:
        return self.num_replicas is not None

    @property
    def is_in_branch(self) -> bool:
        """True while a branch of ``rx.cond`` is traced."""
        return bool(self._branches)

    def is_in_inner_trace(self) -> bool:
        """Returns True if JAX is inside a scan, condition, grad, … of the function (or branch)."""
        home = self._branches[-1].trace if self._branches else self.trace
        return jax_compat.current_trace() is not home

    def use_strategy(self, strategy: object) -> None:
        """Notes that this cross-replica function calls ``run`` of ``strategy``.

        Raises:
          CrossReplicaContextError: It is the function of a ``merge_call``.
        """
        if self.is_replica:
            raise CrossReplicaContextError(
                "strategy.run was called in merge_call, whose function is part of a replica program that is being "
                "traced. Do that work in the replica function, or after run."
            )
        if self._on_strategy is not None:
            self._on_strategy(strategy)

    def write(self, variable: Any, value: Any, line: str | None = None) -> None:
        """Makes ``value`` the variable's value from here on. ``line`` is the user's line; by default the caller's.

        Raises:
          TraceError: It is called in a scan, condition or other inner trace, from which the value would leak.
          VariableError: The shape differs from the variable's.
        """
        entry = self._entry(variable)
        binding = entry.binding
        if self.is_in_inner_trace():
            raise assigned_in_inner_trace(binding.name)
        value = jnp.asarray(value)
        expected = tuple(entry.current.shape)
        if tuple(value.shape) != expected:
            raise VariableError(
                f"Variable {binding.name!r} has shape {expected}; a value of shape {tuple(value.shape)} "
                f"cannot be assigned to it (at {user_line()})."
            )
        value = jax.lax.convert_element_type(value, binding.dtype)
        if self.tapes or self._num_holders[id(value)] > (entry.current is value):
            # TensorFlow does not differentiate through an assignment, and each variable's reads are its own.
            value = self._detached(value)
        self._assign(variable, entry, value, line or user_line())

    def sync_policy_of(self, variable: Any) -> SyncPolicy:
        """Returns how the replicas share a variable."""
        return self._entry(variable).binding.sync_policy

    def _entry(self, variable: Any) -> Entry:
        entry = self.entries.get(id(variable))
        if entry is None:
            binding = self.binding_of(variable)
            entry = self.entries[id(variable)] = Entry(binding, len(self.entries), self._first_value(binding))
            self._num_holders[id(entry.current)] += 1
        return entry

    def _hold(self, entry: Entry, value: Any, line: str) -> None:
        """Makes ``value`` the value of an entry."""
        self._num_holders[id(entry.current)] -= 1
        self._num_holders[id(value)] += 1
        entry.assign(value, line)

    def shapes_of_all_replicas(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shape of an array on each replica; this replica's is ``shape``."""
        if self.uneven is None:
            return [shape] * (self.num_replicas or 1)
        return self.uneven.shapes_of_all_replicas(shape)

    @contextlib.contextmanager
    def aggregated_reads(self) -> Iterator[None]:
        """Context in which reads of SUMMED variables give the sum over replicas (``metric.result()``)."""
        self.num_aggregated_reads += 1
        try:
            yield
        finally:
            self.num_aggregated_reads -= 1

    def begin_recording(self, tape: GradientTape, tape_id: int) -> None:
        """Starts the recording of a tape."""
        self._tape_traces[tape_id] = jax_compat.current_trace()
        self._begin(tape, tape_id)

    def gradient(self, tape_id: int, question: Question) -> tuple[list[Any], set[int]]:
        """Returns the gradients with respect to the sources, and the positions of sources that are known to be
        unconnected.

        Raises:
          TapeError: It is called in a different trace from the trace that opened the tape.
        """
        if jax_compat.current_trace() is not self._tape_traces.get(tape_id):
            raise TapeError(
                f"tape.gradient at {user_line()} is called in another scan, loop, condition, jax.grad or "
                f"jax.jit than its tape was opened in. Open the tape in the function that calls gradient."
            )
        is_real = [jnp.issubdtype(target.dtype, jnp.inexact) for target in question.targets]
        seeds = [
            jax.lax.convert_element_type(jnp.broadcast_to(seed, target.shape), target.dtype)
            for seed, target, counts in zip(
                question.seeds, question.targets, is_real, strict=bool(question.seeds)
            )
            if counts
        ]
        targets = list(itertools.compress(question.targets, is_real))
        if not targets:
            return [None] * len(question.sources), set(range(len(question.sources)))
        return self._differentiated(tape_id, question._replace(targets=targets, seeds=seeds))


@final
class TracedCapture(Capture):
    """The capture of a function in a JAX trace. Tapes and optimizers leave marks in the trace.

    Args:
      unconnected: The ordinals of gradients whose sources were unconnected in an earlier trace.

    Attributes:
      read_in_inner_trace: True if a variable was read in a function that JAX traces on its own.
    """

    def __init__(
        self,
        binding_of: Callable[[Any], Binding],
        num_replicas: int | None,
        *,
        uneven: Uneven | None = None,
        unconnected: frozenset[tuple[int, int]] = frozenset(),
        on_strategy: Callable[[Any], None] | None = None,
        is_for_plan: bool = False,
    ):
        super().__init__(
            binding_of, num_replicas, uneven=uneven, on_strategy=on_strategy, is_for_plan=is_for_plan
        )
        self.read_in_inner_trace = False
        self._unconnected = unconnected
        self._num_gradients = 0
        self._num_reads = 0  # that the observer has noted
        self._tapes: list[GradientTape] = []
        self._forgotten = contextlib.ExitStack()
        self._is_remembered = False  # an inner function has read a variable since JAX was last made to forget

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context that the traced function enters first: remembers its trace and becomes the current capture."""
        self.trace = jax_compat.current_trace()
        with replaced_capture(self), self._forgotten, counting():
            yield

    def _forget_inner_traces(self) -> None:
        """Makes JAX retrace the functions (jit, scan, checkpoint) that have read a variable in this trace.

        JAX's cached traces hold the values that were read then, and a tape opened since has not seen the reads.
        """
        if self._is_remembered:
            self._is_remembered = False
            self._forgotten.enter_context(jax_compat.forgetting_inner_traces())

    @contextlib.contextmanager
    def branch(self) -> Iterator[Branch]:
        """Context that keeps assignments separate, for one branch of ``rx.cond``."""
        branch = Branch(jax_compat.current_trace())
        self._branches.append(branch)
        try:
            yield branch
        finally:
            self._branches.pop()

    @property
    def tapes(self) -> list[GradientTape]:
        return self._tapes

    def read(self, variable: Any) -> Any:
        entry = self._entry(variable)
        if jax_compat.current_trace() is not self.trace:
            self.read_in_inner_trace = self._is_remembered = True
        for branch in reversed(self._branches):
            if id(variable) in branch.writes:
                return branch.writes[id(variable)][1]
        for tape in self._tapes:
            tape.record_read(variable, entry.current)
        if self.observer is None or self.is_in_inner_trace():
            return entry.current
        number, self._num_reads = self._num_reads, self._num_reads + 1
        self.observer.read(entry.binding, number)
        return mark_read(entry.current, number)

    def _first_value(self, binding: Binding) -> Any:
        shape = binding.shape
        if not self.is_replica and binding.sync_policy.is_per_replica:
            shape = (binding.num_replicas, *shape)
        with jax_compat.set_current_trace(self.trace):
            return placeholder_p.bind(index=len(self.entries), shape=tuple(shape), dtype=binding.dtype)

    def _detached(self, value: Any) -> Any:
        return jax.lax.stop_gradient(value) if jnp.issubdtype(value.dtype, jnp.inexact) else value

    def _assign(self, variable: Any, entry: Entry, value: Any, line: str) -> None:
        if self._branches:
            self._branches[-1].writes[id(variable)] = (variable, value, line)
            return
        self._hold(entry, value, line)
        if self.observer is not None:
            self.observer.written(entry.binding, entry.current, line)
        self._forget_inner_traces()

    def _begin(self, tape: GradientTape, tape_id: int) -> None:
        self._forget_inner_traces()
        region_p.bind(tape=tape_id, begins=True)
        self._tapes.append(tape)

    def end_recording(self, tape: GradientTape, tape_id: int) -> None:
        self._tapes.remove(tape)
        region_p.bind(tape=tape_id, begins=False)

    def watch(self, tape_id: int, value: Any) -> None:
        watch_p.bind(value, tape=tape_id)

    def _differentiated(self, tape_id: int, question: Question) -> tuple[list[Any], set[int]]:
        ordinal, self._num_gradients = self._num_gradients, self._num_gradients + 1
        missing = {i for i in range(len(question.sources)) if (ordinal, i) in self._unconnected}
        return question.mark(tape_id, ordinal), missing

    def aggregate(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        # Only the trace of the full function shows which ones are reduced.
        applied = list(aggregate_p.bind(*gradients)) if gradients else []
        if self.on_aggregate is not None:
            self.on_aggregate(names, gradients, applied)
        return applied


_LOCAL = threading.local()


def _stack() -> list[Capture]:
    try:
        return _LOCAL.stack
    except AttributeError:
        _LOCAL.stack = []
        return _LOCAL.stack


def current_capture() -> Capture | None:
    """Returns the capture of the innermost function that this thread traces."""
    stack = _stack()
    return stack[-1] if stack else None


def note_created(name: str) -> None:
    """Notes that the outermost function in a trace creates a variable."""
    outermost = next((capture for capture in _stack() if capture is not None), None)
    if outermost is not None:
        outermost.created.append(f"{name!r} at {user_line()}")


def assigned_in_inner_trace(variable: str) -> TraceError:
    """Returns the error for an assignment whose value would leak from a scan, a condition or another inner trace."""
    return TraceError(
        f"Variable {variable!r} is assigned at {user_line()} inside a function that JAX traces on its own (a scan, "
        f"loop, condition, jax.checkpoint, jax.grad, jax.vmap or jax.jit), and the value cannot leave it. Return the "
        f"value and assign it outside; for a condition use rx.cond, which threads assignments through."
    )


def created_again(variable: str) -> VariableError:
    """Returns the error for a function that creates a variable in a later trace than its first."""
    return VariableError(
        f"Variable {variable} would be created by every call: a function that strategy.run, rx.function or the like runs is "
        f"traced, and may create variables in its first call only. Create it once, before the function is called:\n"
        f"    v = rx.Variable(0.0)\n"
        f"or, where its shape is known only in the function, keep it in an object:\n"
        f"    if self.v is None:\n"
        f"        self.v = rx.Variable(np.zeros(x.shape[1:], 'float32'))\n"
        f"Make layers, metrics, optimizers and seed generators outside of the function too. A value that lasts for one call is "
        f"an array, not a variable: v = jnp.zeros(())."
    )


@contextlib.contextmanager
def replaced_capture(capture: Any) -> Iterator[None]:
    """Context that makes another capture current; None stands for plain values."""
    stack = _stack()
    stack.append(capture)
    try:
        yield
    finally:
        stack.pop()
