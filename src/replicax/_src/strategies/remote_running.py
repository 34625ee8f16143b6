"""How a strategy with parameter servers runs functions: traced into closures, which workers run, or this process."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import context
from replicax._src.bridges import ensure_bridges
from replicax._src.collectives.in_replica import OneReplica
from replicax._src.context import ReplicaContext
from replicax._src.errors import CrossReplicaContextError, InvalidArgumentError, UnsupportedError
from replicax._src.jax_compat import default_platform
from replicax._src.options import RunOptions
from replicax._src.placement.remote.closure import RemoteClosure, place_closure
from replicax._src.placement.remote.elements import Elements, PerWorkerInput, taking_from
from replicax._src.placement.remote.events import Events
from replicax._src.placement.remote.replicas import Observers, PlacedReplicas
from replicax._src.placement.remote.tracing import check_can_travel
from replicax._src.placement.remote.worker import SMALL_BYTES, name_of
from replicax._src.program import key
from replicax._src.program.cache import (
    FunctionPrograms,
    Leaf,
    ProgramCache,
    array_leaf,
    jax_state,
    static_leaf,
)
from replicax._src.program.capture import current_capture
from replicax._src.program.modules import open_modules
from replicax._src.program.slots import SlotTable
from replicax._src.ps.arrays import ServerArray
from replicax._src.ps.programs import WorkerProgram
from replicax._src.ps.session import Session
from replicax._src.strategies.replica_tracing import Results, describe_distributed, trace_replicas
from replicax._src.topology import Topology
from replicax._src.values import Mirrored, PerReplica, is_value, is_variable

log = logging.getLogger("replicax")
tracing_lock = threading.RLock()
"""Held while a function for workers is traced: an update is traced with variables that say they have a shard's shape."""
_MAX_SIGNATURES = 32
_COMPARED_BYTES = 256 << 10  # at once, so that they stay near the processor


@final
class TracedFunction:
    """A function with arguments of certain kinds, and its closures, by the shapes of the elements that it takes.

    Attributes:
      first: The closure of the elements that the iterators said.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        trace: Callable[[Any], RemoteClosure],
        sources: Sequence[PerWorkerInput],
    ):
        self.name = name
        self._programs: dict[str, str] = {}
        self._session, self._trace, self._sources = session, trace, sources
        self._closures: dict[str, RemoteClosure] = {}
        self._of_digest: dict[str, WorkerProgram] = {}
        self._platforms = platforms_of_workers(session)
        self.constants: dict[str, np.ndarray] = {}
        self._found: dict[RemoteClosure, Any] = {}
        self._lifted: dict[int, tuple[np.ndarray, str | None]] = {}
        self._layout = session.layout
        self.first = self._add(None)

    @property
    def programs(self) -> dict[str, str]:
        """The digests of the workers' programs, by signature of the elements, for all platforms that workers have by now."""
        return self.programs_for(platforms_of_workers(self._session))

    def programs_for(self, platforms: Collection[str]) -> dict[str, str]:
        """The same for some platforms, and those for which there are programs."""
        if not self._platforms.issuperset(platforms):
            with tracing_lock:
                self._platforms = self._platforms.union(platforms)
                self._programs = {
                    signature: self._export(closure) for signature, closure in self._closures.items()
                }
        return self._programs

    def _export(self, closure: RemoteClosure) -> str:
        program = closure.export(sorted(self._platforms))
        self._of_digest[program.digest] = program
        return program.digest

    def program(self, digest: str) -> WorkerProgram:
        """The worker's program."""
        return self._of_digest[digest]

    def is_valid(self) -> bool:
        """Whether the arrays that it uses are where they were: an optimizer may have been given more copies of its own."""
        layout = self._session.layout
        if layout != self._layout:
            if any(_where(c.arrays) != where for c, where in self._found.items()):
                return False
            self._layout = layout
        return True

    def sources_of(self, arguments: Sequence[PerWorkerInput]) -> list[PerWorkerInput]:
        """What a call with these arguments takes elements from, in the order of the program's iterators."""
        replaced = {id(traced): now for traced, now in zip(self._sources, arguments, strict=True)}
        return [replaced.get(id(source), source) for source in self.first.elements.sources]

    def names_of(self, arrays: Sequence[np.ndarray], num_lifted: int) -> dict[int, str]:
        """Names for those of the last ``num_lifted`` arrays that are large, and as they were the last time."""
        names: dict[int, str] = {}
        for position in range(len(arrays) - num_lifted, len(arrays)):
            array = arrays[position]
            if array.nbytes <= SMALL_BYTES:
                continue
            before, name = self._lifted.get(position, (None, None))
            if before is None or not _is_alike(before, array):
                self._lifted[position] = array, None
                continue
            if name is None:
                name = name_of(before)
                self._lifted[position] = before, name
            names[position] = name
        return names

    def make(self, signature: str) -> str:
        """Traces the function for elements of other shapes. Returns the digest of the worker's program.

        Raises:
          InvalidArgumentError: There have been too many.
        """
        with tracing_lock:
            self.programs_for(platforms_of_workers(self._session))
            return self._programs.get(signature) or self._made(signature)

    def _made(self, signature: str) -> str:
        if len(self._closures) >= _MAX_SIGNATURES:
            raise InvalidArgumentError(
                f"{self.name} has met elements of {len(self._closures)} different shapes, and is compiled for each: the next has "
                f"{signature}. Pad what varies to a few sizes, in the dataset."
            )
        described = iter(json.loads(signature))
        taken = self.first.elements.taken
        shapes = {
            at: tuple(
                jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in _take(described, len(taken[at]))
            )
            for at in sorted(taken)
        }
        self._add(shapes, signature)
        return self._programs[signature]

    def _add(self, shapes: Any, signature: str | None = None) -> RemoteClosure:
        closure = self._trace(shapes)
        if shapes is not None and closure.returns != self.first.returns:
            raise UnsupportedError(
                f"{self.name} returns something else for elements of other shapes ({signature}): {closure.returns} in place of "
                f"{self.first.returns}. Return arrays whose number does not depend on shapes; for a number of rows "
                "jnp.int32(x.shape[0])."
            )
        if shapes is not None and (closure.round_key is None) != (self.first.round_key is None):
            raise UnsupportedError(
                f"{self.name} applies gradients for elements of some shapes only, and not for others ({signature}). Schedule "
                "another function where none are applied."
            )
        self._session.keep_programs(closure, closure.updates)
        key = signature or closure.elements.signature
        self._closures[key] = closure
        self._programs[key] = self._export(closure)
        self._found[closure] = _where(closure.arrays)
        self._layout = self._session.layout
        self.constants |= closure.constants
        return closure


def platforms_of_workers(session: Session) -> frozenset[str]:
    """Those that have been met; before that this process's."""
    return frozenset(session.worker_platforms or [default_platform()])


def _is_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of one shape and dtype have the same bytes; sooner said if they have not."""
    if one.ctypes.data == other.ctypes.data:  # an array of JAX, seen twice
        return True
    these, those = (np.ravel(array).view(np.uint8) for array in (one, other))
    parts = (slice(start, start + _COMPARED_BYTES) for start in range(0, len(these), _COMPARED_BYTES))
    return all(np.array_equal(these[part], those[part]) for part in parts)


def _where(arrays: Sequence[ServerArray]) -> list[Any]:
    return [(array.pieces, dict(array.copies)) for array in arrays]


def _take(items: Any, count: int) -> list[Any]:
    return [next(items) for _ in range(count)]


@dataclass(frozen=True)
class PreparedClosure:
    """A call of a function, ready to be sent.

    Attributes:
      traced: The function.
      arguments: The arrays among the arguments, and those that the function closes over.
      sources: What it takes elements from, in the order of the program's iterators.
      named: Names of those ``arguments`` that travel once, by position.
    """

    traced: TracedFunction
    arguments: Sequence[np.ndarray]
    sources: Sequence[PerWorkerInput]
    named: Mapping[int, str]

    @property
    def name(self) -> str:
        return self.traced.name

    @property
    def programs(self) -> dict[str, str]:
        """Digests of the workers' programs, by signature of the elements."""
        return self.traced.programs

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """What travels once, by name."""
        if not self.named:
            return self.traced.constants
        return self.traced.constants | {name: self.arguments[n] for n, name in self.named.items()}

    @property
    def iterators(self) -> list[str]:
        """What the workers call that which it takes elements from."""
        return [source.resource for source in self.sources]

    @property
    def round_key(self) -> str | None:
        """What closures have in common whose gradients are averaged."""
        return self.traced.first.round_key

    def program(self, digest: str) -> WorkerProgram:
        """A worker's program."""
        return self.traced.program(digest)

    def make(self, signature: str) -> str:
        """Makes the program for elements of other shapes. Returns its digest."""
        return self.traced.make(signature)

    def assemble(self, arrays: Sequence[Any]) -> Any:
        """What the function returns, of the worker's results."""
        return self.traced.first.assemble(arrays)


@final
class Closures:
    """Makes closures of functions, and keeps what it has traced.

    Args:
      strategy: Its ``slots`` are used.
      session: Where the variables are.
    """

    def __init__(self, strategy: Any, session: Session):
        self._strategy, self._session = strategy, session
        self._slots = SlotTable(1)  # of cross-replica code
        self._cache: ProgramCache[TracedFunction] = ProgramCache()

    def prepare(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        is_replica_function: bool = False,
        num_averaged: int | None = None,
    ) -> PreparedClosure:
        """A call of ``fn``, traced for workers; its variables are on the servers then.

        Args:
          is_replica_function: Whether it is called in replica context.
          num_averaged: Of how many closures the gradients are averaged for an update; None: each pushes its own.
        """
        ensure_bridges()
        fn = key.unwrap(fn)
        nest = (tuple(args), dict(kwargs or {}), key.lifted_cells(fn))
        if open_modules(nest[:2])[1] is not None:
            raise UnsupportedError(
                "An nnx module is an argument of a function for workers, which could not update it. Pass the module's state as "
                "arrays (nnx.split), or keep it in variables made in strategy.scope()."
            )
        leaves, tree = jax.tree_util.tree_flatten(nest, is_leaf=_is_leaf)
        programs = self._cache.programs_of(fn)
        described, arrays, sources = _describe(leaves, programs)
        signature = (
            tree,
            tuple(described),
            _pattern(sources),
            is_replica_function,
            num_averaged,
            jax_state(),
        )
        traced = programs.get(signature)
        if traced is None or not traced.is_valid():
            with tracing_lock:
                traced = self._traced(fn, tree, described, sources, is_replica_function, num_averaged)
            programs.put(signature, described, traced)
            if not hasattr(fn, "replicax_family"):  # of ours, for each variable
                self._cache.report_trace(fn, described)
        num_lifted = sum(map(key.is_array, jax.tree_util.tree_leaves(nest[2], is_leaf=_is_leaf)))
        named = traced.names_of(arrays, num_lifted)
        return PreparedClosure(traced, arrays, traced.sources_of(sources), named)

    def _traced(
        self,
        fn: Callable[..., Any],
        tree: Any,
        described: Sequence[Leaf],
        sources: Sequence[PerWorkerInput],
        is_replica_function: bool,
        num_averaged: int | None,
    ) -> TracedFunction:
        avals = [leaf.aval() for leaf in described if leaf.kind != "static"]

        def call(tracers: list[Any], elements: Elements) -> Any:
            arrays, inputs = iter(tracers), iter(sources)

            def thawed(leaf: Leaf) -> Any:
                if leaf.kind != "static":
                    return next(arrays)
                if not _is_of_source(leaf):
                    return leaf.thaw()
                source = next(inputs)
                return source if source.is_iterator else elements.take(source)

            nest = jax.tree_util.tree_unflatten(tree, [thawed(leaf) for leaf in described])
            args, kwargs, cells = nest
            with context.Scope(self._strategy), taking_from(elements):
                if is_replica_function:
                    return run_on_replicas(self._strategy, key.with_cells(fn, cells), args, kwargs)
                return key.with_cells(fn, cells)(*args, **kwargs)

        name = key.name_of(fn)
        slot_of, num_replicas = self._slots.slot_of, self._strategy.num_replicas_in_sync
        return TracedFunction(
            name,
            self._session,
            lambda shapes: place_closure(
                call, avals, name, self._session, slot_of, shapes, num_averaged, num_replicas
            ),
            sources,
        )


def _is_leaf(leaf: Any) -> bool:
    return is_variable(leaf) or isinstance(leaf, PerWorkerInput)


def _is_of_source(leaf: Leaf) -> bool:
    return isinstance(leaf.value, tuple) and leaf.value[0] is PerWorkerInput


def _describe(
    leaves: Sequence[Any], programs: FunctionPrograms
) -> tuple[list[Leaf], list[np.ndarray], list[PerWorkerInput]]:
    """What each leaf of the arguments is; the arrays; and what each worker has its own of."""
    described: list[Leaf] = []
    arrays: list[np.ndarray] = []
    sources: list[PerWorkerInput] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, PerWorkerInput):
            described.append(Leaf("static", value=(PerWorkerInput, leaf.described)))
            sources.append(leaf)
        elif key.is_array(leaf):
            described.append(array_leaf(leaf))
            check_can_travel(described[-1].dtype, "is an argument of a function for workers")
            # It may be written before it is sent: itself, or what it is a view of.
            is_theirs = isinstance(leaf, np.ndarray) and (leaf.flags.writeable or leaf.base is not None)
            arrays.append((np.array if is_theirs else np.asarray)(leaf, described[-1].dtype))
        elif type(leaf) is float and programs.is_varying(position, leaf):
            described.append(Leaf("whole", (), jnp.result_type(float), weak_type=True))
            arrays.append(np.asarray(leaf, jnp.result_type(float)))
        else:
            described.append(static_leaf(leaf))
    return described, arrays, sources


def _pattern(sources: Sequence[PerWorkerInput]) -> tuple[int, ...]:
    """Which of them are the same one."""
    return tuple(sources.index(source) for source in sources)


def run_on_replicas(
    strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Runs a replica function in the function that is being traced."""
    if strategy.num_replicas_in_sync > 1:
        return _run_on_several(strategy, fn, args, kwargs)
    replica = ReplicaContext(strategy, None, OneReplica())
    with context.replica_context(strategy, replica):
        return fn(*args, **kwargs)


def run_as_one(strategy: Any, fn: Callable[..., Any], batch: Any) -> Any:
    """Calls ``fn`` of a whole batch, in the function that is being traced: what one device computes, on all of a worker's.

    Args:
      batch: A nest of arrays [rows, ...], or of what each replica has of them.
    """
    capture = current_capture()
    assert capture is not None
    events = capture.observer
    assert isinstance(events, Events)
    topology = Topology.elsewhere(strategy.num_replicas_in_sync)
    events.num_replicas = topology.num_replicas

    def spread(array: Any) -> Any:
        is_even = array.ndim and array.shape[0] % topology.num_replicas == 0
        return jax.lax.with_sharding_constraint(array, topology.per_replica) if is_even else array

    return fn(jax.tree_util.tree_map(spread, strategy.gather(batch, axis=0)))


def _run_on_several(
    strategy: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    capture = current_capture()
    assert capture is not None
    events = capture.observer
    assert isinstance(events, Events)
    nest = (tuple(args), dict(kwargs), key.lifted_cells(fn))
    leaves, tree = jax.tree_util.tree_flatten(nest, is_leaf=is_value)
    topology = Topology.elsewhere(
        strategy.num_replicas_in_sync, is_cpu=strategy.session.platforms == ("cpu",)
    )
    described, arrays = [], []
    for leaf in leaves:
        if isinstance(leaf, (PerReplica, Mirrored)):
            described.append(describe_distributed(leaf, strategy, topology.num_replicas))
            arrays.append(leaf.stored)
        elif key.is_array(leaf):
            described.append(array_leaf(leaf))
            arrays.append(leaf)
        else:
            described.append(static_leaf(leaf))
    observers = Observers()
    program, rows = trace_replicas(
        strategy, topology, fn, tree, described, slot_of=strategy.slots.slot_of, observe=observers.observe
    )
    is_row = [leaf.kind == "row" for leaf in described if leaf.kind != "static"]
    placed = PlacedReplicas(program, key.name_of(fn), observers, topology, rows, is_row)
    return Results(placed.program, topology).wrap(placed(capture, events, arrays))


@final
class RemoteRunner:
    """``Strategy.run`` with parameter servers: a part of the function for workers that is being traced.

    Anywhere else the function is run in this process, on the servers' variables.

    Args:
      run_here: Runs a replica function in this process, given its arguments.
      is_coordinator: Whether this process is one, and computing not its work.
    """

    def __init__(
        self,
        strategy: Any,
        run_here: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any],
        *,
        is_coordinator: bool,
    ):
        self._strategy, self._run_here, self._is_coordinator = strategy, run_here, is_coordinator

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> Any:
        """Runs ``fn`` once per replica; see ``Strategy.run``."""
        del options
        capture = current_capture()
        if capture is None:
            if self._is_coordinator:
                _say_it_runs_here(key.name_of(fn))
            return self._run_here(fn, args, kwargs)
        if not context.in_replica_function():
            capture.use_strategy(self._strategy)  # an rx.function learns of it, and is run here
        if context.in_replica_function() or not isinstance(capture.observer, Events):
            raise CrossReplicaContextError(
                "strategy.run was called inside a function that strategy.run runs, or in merge_call. Do that work in the "
                "replica function, or after run."
            )
        return run_on_replicas(self._strategy, key.unwrap(fn), args, kwargs)

    def owned(self, array: Any) -> Any:
        """Remembers nothing: arguments of workers are copies."""
        return array


@functools.cache
def _say_it_runs_here(name: str) -> None:
    log.warning(
        "strategy.run of %s was called outside of a scheduled function: it runs in this process, the coordinator. To run it "
        "on the workers give a function that calls it to ClusterCoordinator.schedule.",
        name,
    )
