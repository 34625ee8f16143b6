"""``RunOptions(eager=True)``: runs the function itself, once per replica, on real values. For debugging.

One thread per replica, one running at a time between collectives. What replicas assign is kept apart and
committed when all have finished. Not a placement of a program: nothing is traced or kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import context, jax_compat, tensorflow_code
from replicax._src.collectives.eager import EagerCommunicator, from_host, host_bytes, to_host
from replicax._src.collectives.meeting import Meeting
from replicax._src.context import ReplicaContext
from replicax._src.errors import (
    DivergenceError,
    MixedStrategiesError,
    StructureError,
    TraceError,
    UnsupportedError,
)
from replicax._src.frameworks.framework import frameworks_in_use, use_imported
from replicax._src.placement.eager_capture import EagerCapture, StateBefore
from replicax._src.placement.spmd import SlotGroup
from replicax._src.program import key
from replicax._src.program.arguments import as_arguments
from replicax._src.program.capture import Uneven, created_again, current_capture, replaced_capture
from replicax._src.program.modules import enter_modules, open_modules
from replicax._src.program.program import is_output_leaf
from replicax._src.program.recording import NO_AXIS
from replicax._src.program.slots import Sharing, Slot, own_copy
from replicax._src.program.verdict import Verdict
from replicax._src.topology import REPLICA_AXIS
from replicax._src.user_code import user_line_of
from replicax._src.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    cut,
    is_value,
    per_replica_from_components,
)

# Frameworks (Keras) that keep settings per thread add a function here. It is called in the thread that calls
# `run`, and gives what makes the context that each replica's thread enters.
ThreadState = Callable[[], Callable[[], contextlib.AbstractContextManager]]
thread_states: list[ThreadState] = []

# Apart from those of traced functions, JAX's caches of inner functions cannot give us what belongs to a trace.
_CACHE_NAME = "replicax_eager"


def run_eagerly(strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs ``fn`` once per replica, on real values; see ``Strategy.run`` and ``RunOptions.eager``.

    A function that creates variables (Keras layers called for the first time) runs twice.

    Raises:
      TraceError: In a function that is being traced.
      DivergenceError: Replicas left different values in a mirrored variable.
      StructureError: Replicas call different collectives, or return different structures.
      VariableError: Each call would create a variable.
      Exception: What ``fn`` raises in one replica; all state is as it was before.
    """
    use_imported()
    if current_capture() is not None or not jax_compat.is_evaluating():
        raise TraceError(
            "strategy.run(..., options=rx.RunOptions(eager=True)) was called in a function that is being traced "
            "(rx.function, jax.jit, merge_call), which has no real values to run it with. Call it from plain Python."
        )
    has_created = False
    while True:
        with contextlib.closing(_Run(strategy, fn, args, kwargs)) as run:
            returned = run.call()
            if created := run.created():
                if has_created:
                    raise created_again(created[0])
                has_created = True
                continue
            new_state = run.new_state()  # raises before anything is changed
            result = run.close_modules(_joined(strategy.topology, returned))
            new_state.store()
            return result


# --- arguments and results ----------------------------------------------------------------------------


def _is_leaf(value: Any) -> bool:
    return is_value(value)


@dataclass(frozen=True)
class _Argument:
    """One leaf of the arguments, as each replica gets it: copies of arrays, everything else as it is."""

    components: Sequence[Any]
    is_array: bool

    @classmethod
    def of(cls, leaf: Any, num_replicas: int) -> _Argument:
        if isinstance(leaf, (PerReplica, Mirrored)):
            if leaf.num_replicas != num_replicas:
                raise MixedStrategiesError(
                    f"strategy.run got a {type(leaf).__name__} of {leaf.num_replicas} components, and the strategy has "
                    f"{num_replicas} replicas: the value was made by another strategy. Mixing different "
                    f"tf.distribute.Strategy objects is not possible in one call."
                )
            host = to_host(leaf.stored)
            if isinstance(leaf, Mirrored) or leaf.is_equal:
                return cls([host] * num_replicas, True)
            return cls([cut(host[r], leaf.component_shape(r)) for r in range(num_replicas)], True)
        if key.is_array(leaf):
            return cls([to_host(leaf)] * num_replicas, True)
        return cls([leaf] * num_replicas, False)

    def on_replica(self, replica_id: int) -> Any:
        component = self.components[replica_id]
        return from_host(component) if self.is_array else component

    @property
    def has_different_shapes(self) -> bool:
        return self.is_array and len({c.shape for c in self.components}) > 1


@dataclass(frozen=True)
class _Returned:
    """What the function returned on one replica."""

    tree: Any
    leaves: list[Any]


def _returned(value: Any) -> _Returned:
    leaves, tree = jax.tree_util.tree_flatten(value, is_leaf=is_output_leaf)
    return _Returned(tree, [_plain(leaf) for leaf in leaves])


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues):
        return leaf.local if isinstance(leaf, context.LocalPerReplica) else leaf.as_array()
    return leaf


def _joined(topology: Any, returned: Sequence[_Returned]) -> Any:
    """One value of what the replicas returned."""
    first = returned[0]
    for replica_id, other in enumerate(returned):
        if other.tree != first.tree:
            raise StructureError(
                f"The replica function returns different structures on different replicas: {first.tree} on replica 0 "
                f"and {other.tree} on replica {replica_id}. Return the same structure on all."
            )
    columns = zip(*(r.leaves for r in returned), strict=True)
    return jax.tree_util.tree_unflatten(first.tree, [_joined_leaf(topology, list(c)) for c in columns])


def _joined_leaf(topology: Any, leaves: list[Any]) -> Any:
    are_arrays = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
    if all(are_arrays):
        return _joined_arrays(topology, [jnp.asarray(leaf) for leaf in leaves])
    if not any(are_arrays):
        if all(leaf is leaves[0] or (type(leaf) is type(leaves[0]) and leaf == leaves[0]) for leaf in leaves):
            return leaves[0]
        if all(isinstance(leaf, (bool, int, float)) for leaf in leaves):
            return per_replica_from_components(topology, [np.asarray(jnp.asarray(leaf)) for leaf in leaves])
    raise StructureError(
        f"The replica function returns different things on different replicas: {', '.join(map(repr, leaves))}. Return "
        f"arrays where replicas differ."
    )


def _joined_arrays(topology: Any, arrays: list[jax.Array]) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    if len({(a.dtype, a.ndim) for a in arrays}) > 1:
        kinds = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
        raise StructureError(
            f"The replica function returns arrays of different ranks or dtypes on different replicas: {kinds}. Only "
            f"sizes may differ."
        )
    hosts = [to_host(a) for a in arrays]
    if len({(h.shape, host_bytes(h)) for h in hosts}) == 1:
        return PerReplica(own_copy(arrays[0], topology.replicated), len(arrays), is_equal=True)
    return per_replica_from_components(topology, arrays)


# --- one run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NewState:
    """New values of variables, placed."""

    group: SlotGroup
    values: list[Any]
    sums: list[Any]

    def store(self) -> None:
        """Gives them to the variables."""
        self.group.store(self.values, self.sums)


class _Run:
    """One call of the function on all replicas."""

    def __init__(self, strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self._strategy = strategy
        self._topology = strategy.topology
        self._fn = key.unwrap(fn)
        nest, self._close = open_modules((tuple(args), dict(kwargs), key.lifted_cells(self._fn)))
        leaves, self._tree = jax.tree_util.tree_flatten(nest, is_leaf=_is_leaf)
        num_replicas = self._topology.num_replicas
        leaves = as_arguments(leaves, self._tree, has_modules=self._close is not None)
        self._arguments = [_Argument.of(leaf, num_replicas) for leaf in leaves]
        self._meeting = Meeting(num_replicas)
        self._state = StateBefore(strategy)
        self._captures: list[EagerCapture] = []
        self._rows = next(
            (
                [c.shape[0] if c.shape else 1 for c in argument.components]
                for argument in self._arguments
                if argument.has_different_shapes
            ),
            None,
        )

    def call(self) -> list[_Returned]:
        """Runs all replicas."""
        options = jax_compat.thread_options()
        states = [carry() for carry in thread_states] if self._topology.num_replicas > 1 else []

        def body(replica_id: int) -> _Returned:
            with contextlib.ExitStack() as stack:
                if self._topology.num_replicas > 1:
                    stack.enter_context(jax_compat.with_thread_options(options))
                stack.enter_context(jax.default_device(self._topology.devices[replica_id]))
                for state in states:
                    stack.enter_context(state())
                return self._replica(replica_id)

        return self._meeting.run(body)

    def _replica(self, replica_id: int) -> _Returned:
        index = from_host(np.int32(replica_id))
        communicator = EagerCommunicator(self._meeting, replica_id, index)
        uneven = None
        if self._rows is not None:
            uneven = Uneven(tuple(range(len(self._rows))), None, self._rows[replica_id])
        capture = EagerCapture(self._strategy, self._state, communicator, replica_id, uneven)
        self._captures.append(capture)
        leaves = [argument.on_replica(replica_id) for argument in self._arguments]
        for leaf, argument in zip(leaves, self._arguments, strict=True):
            if argument.is_array and any(c is not argument.components[0] for c in argument.components):
                capture.recorder.verdicts[leaf] = Verdict.DIFFERS
        capture.recorder.verdicts[index] = Verdict.DIFFERS
        opened = jax.tree_util.tree_unflatten(self._tree, leaves)
        replica = ReplicaContext(self._strategy, None, communicator)
        with contextlib.ExitStack() as stack:
            for framework in frameworks_in_use():
                stack.enter_context(framework.trace_scope(capture))
            stack.enter_context(replaced_capture(capture))
            stack.enter_context(context.replica_context(self._strategy, replica))
            stack.enter_context(jax_compat.with_axis_names([(_CACHE_NAME, 1)]))
            stack.enter_context(jax_compat.set_current_trace(capture.recorder.trace))
            stack.enter_context(_explained())
            stack.enter_context(tensorflow_code.explained())
            (args, kwargs, cells), finish = enter_modules(opened, self._close is not None)
            return _returned(finish(key.with_cells(self._fn, cells)(*args, **kwargs)))

    def created(self) -> list[str]:
        """The variables that the replicas created, with the user's lines."""
        return [variable for capture in self._captures for variable in capture.created]

    def close_modules(self, result: Any) -> Any:
        """Writes the new state of modules among the arguments back into them."""
        return result if self._close is None else self._close(result)

    def close(self) -> None:
        """Lets go of all arrays, which would wait for the garbage collector otherwise."""
        for capture in self._captures:
            capture.close()
        self._captures.clear()

    def new_state(self) -> _NewState:
        """What the replicas assigned to variables, brought together as their sharing says.

        Raises:
          DivergenceError: A mirrored variable differs between replicas.
        """
        captures = sorted(self._captures, key=lambda c: c.replica_id)
        written = {
            id(entry.slot.variable): entry.slot
            for c in captures
            for entry in c.entries.values()
            if entry.written
        }
        group = SlotGroup(list(written.values()), self._strategy.variable_placement)
        values, sums = [], []
        for slot in group.slots:
            components = [self._final(capture, slot) for capture in captures]
            lines = [c.entries[id(slot.variable)].line for c in captures if id(slot.variable) in c.entries]
            new = _brought_together(slot, components, self._rows, next(filter(None, lines)))
            row, whole = self._topology.per_replica, self._topology.replicated
            values.append(own_copy(new, row if slot.sharing.is_per_replica else whole))
            if slot.sharing is Sharing.SUMMED:
                sums.append(own_copy(np.sum(new, axis=0, dtype=new.dtype), whole))
        return _NewState(group, values, sums)

    def _final(self, capture: EagerCapture, slot: Slot) -> Any:
        entry = capture.entries.get(id(slot.variable))
        if entry is None:
            return self._state.component(slot.variable, capture.replica_id)
        return to_host(entry.current)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Says what to do about collectives of JAX's own."""
    try:
        yield
    except NameError as error:
        if not jax_compat.names_unknown_axis(error, REPLICA_AXIS):
            raise
        raise UnsupportedError(NO_AXIS.format(line=user_line_of(error))) from error


def _brought_together(slot: Slot, components: list[Any], rows: Sequence[int] | None, line: str) -> Any:
    """The new value of a variable, [R, ...] where it has components, of the replicas' values."""
    if slot.sharing.is_per_replica:
        return np.stack(components)
    bits = {host_bytes(c) for c in components}
    if len(bits) == 1:
        return _as_array(components[0])
    if slot.sharing is Sharing.MIRRORED:
        shown = ", ".join(_shown(i, c) for i, c in enumerate(components[:4]))
        raise DivergenceError(
            f"Variable {slot.name!r} is mirrored, and the value assigned to it at {line} differs between replicas "
            f"({shown}): its copies would fall out of sync. Either combine the value first "
            f"(rx.get_replica_context().all_reduce(...)), or make the variable with "
            f"aggregation=rx.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or with synchronization=ON_READ if "
            f"each replica shall keep its own; for gradients use the optimizer's apply, which sums them."
        )
    if slot.sharing is Sharing.AVERAGED:
        return _average(components, rows)
    return _as_array(components[0])


def _average(components: Sequence[np.ndarray], rows: Sequence[int] | None) -> np.ndarray:
    weights = [1] * len(components) if rows is None else rows
    # Where a replica has no rows its statistics may be nan: they are left out.
    parts = [c * np.asarray(w, c.dtype) for c, w in zip(components, weights, strict=True) if w > 0]
    if not parts:
        return np.zeros_like(components[0])
    return (sum(parts[1:], parts[0]) / max(sum(weights), 1)).astype(components[0].dtype)


def _as_array(host: Any) -> Any:
    return host if isinstance(host, np.ndarray) else from_host(host)


def _shown(replica_id: int, host: Any) -> str:
    if not isinstance(host, np.ndarray) or host.size > 8:
        return f"replica {replica_id} has others"
    return f"replica {replica_id}: {host.tolist()}"
