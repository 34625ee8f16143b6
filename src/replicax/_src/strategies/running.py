"""Implements ``Strategy.run``: converts arguments to leaves, caches programs, and converts results to values."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import jax

from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.spmd import Launcher
from replicax._src.lowering.surviving_launcher import SurvivingLauncher
from replicax._src.scope.any_strategy import AnyStrategy
from replicax._src.strategies.replica_tracing import describe_distributed, results_of, trace_replicas
from replicax._src.tracing import key
from replicax._src.tracing.arguments import Call, ClosureCheck
from replicax._src.tracing.bindings import own_copy
from replicax._src.tracing.cache import (
    ArgumentLeaf,
    FunctionPrograms,
    ProgramCache,
    array_leaf,
    jax_state,
)
from replicax._src.tracing.capture import Capture, current_capture
from replicax._src.tracing.holders import held_elsewhere
from replicax._src.tracing.labels import watching_labels
from replicax._src.tracing.outer_trace import tracer_as_argument
from replicax._src.user.listening import ResultWatch, listener
from replicax._src.user.user_code import user_line
from replicax._src.values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    Results,
    is_distributed,
    is_value,
    local_views,
)
from replicax._src.vocabulary.errors import UnsupportedError
from replicax._src.vocabulary.options import RunOptions


@final
@dataclass(frozen=True)
class LoweredFunction:
    """A traced and compiled function.

    Attributes:
      results: Converts arrays into the results of ``run``.
      watch: Watches the results for state that replicas no longer share.
      check_closure: Called with the leaves of a call.
    """

    launcher: Launcher | SurvivingLauncher
    results: Results
    watch: ResultWatch
    check_closure: ClosureCheck


_R = TypeVar("_R")
_Array = TypeVar("_Array")

DEFAULT_OPTIONS = RunOptions()


class ReplicaRunner:
    """Runs functions on the replicas of one strategy.

    Args:
      strategy: The strategy, of which it uses ``bindings``, ``variable_placement`` and ``reduce_in_replica``.
      topology: The replicas' devices.
    """

    def __init__(self, strategy: AnyStrategy, topology: Topology):
        self._strategy = strategy
        self._topology = topology
        self._cache: ProgramCache[LoweredFunction] = ProgramCache()
        self._last: LoweredFunction | None = None
        self._has_drifted: set[Any] = set()  # functions whose drift was reported
        # With one replica results are plain arrays. Nobody else holds the buffers of these, so
        # donate_args may take them.
        self._owned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def num_programs(self) -> int:
        """The number of cached programs."""
        return len(self._cache)

    @property
    def last_launcher(self) -> Launcher | SurvivingLauncher:
        """The launcher of the program that was traced last, to inspect the compiled program."""
        assert self._last is not None, "nothing has been traced yet"
        return self._last.launcher

    def run(
        self, fn: Callable[..., _R], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> _R:
        """Runs ``fn`` once per replica; see ``Strategy.run``."""
        fn = key.unwrap(fn)
        is_plain = not kwargs and options is DEFAULT_OPTIONS and current_capture() is None
        is_plain = is_plain and not key.lifted_cells(fn)
        found = self._shallow(args) if is_plain else None
        if found is not None:
            placed = self._cache.programs_of(fn, lifted=()).shallow.get(found[0])
            if placed is not None:
                return placed.results.wrap(placed.launcher(found[1]))
        if found is None:
            call = Call(fn, args, kwargs, is_value, opens_modules=True)
        else:  # no argument is a variable or a module
            call = Call(fn, args, kwargs, is_distributed)
        outer = current_capture()
        if outer is not None:
            outer.use_strategy(self._strategy)
        _check(call, options, outer)
        if outer is not None:
            return self._run_inline(outer, call, options)
        programs = self._cache.programs_of(fn)
        self._describe(call, programs)
        donated = self._donated(args, call, options)
        signature = call.signature(
            tuple(donated),
            tuple(sorted((options.experimental_xla_options or {}).items())),
            options.check_same,
            options.check_finite,
        )

        def traced() -> LoweredFunction:
            try:
                self._last = self._trace(call, donated, options)
                return self._last
            except Exception as error:
                programs.note_new_structure(error, call.tree)
                raise

        def launched(placed: LoweredFunction) -> Any:
            placed.check_closure(call.leaves)
            if found is not None:
                programs.shallow[found[0]] = placed
            given = self._give_away(call, donated) if _donates(options) else call.arrays
            arrays = placed.launcher(given)
            if options.donate_args and self._topology.num_replicas == 1:
                for array in arrays:
                    self.owned(array)
            return call.finished(placed.results.wrap(arrays))

        placed = programs.get(signature)
        if placed is None:
            num_replicas = self._topology.num_replicas
            with self._cache.first_call(call.fn, call.described, num_replicas=num_replicas):
                placed = self._cache.keep(call.fn, programs, signature, call.described, traced(), call.paths)
                return launched(placed)
        if options.check_same:
            placed.watch.check(call.leaves)
        return launched(placed)

    def place(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> tuple[LoweredFunction, list[jax.Array]]:
        """Returns the program that ``run`` would run, and its arguments, to lower it. Runs and keeps nothing."""
        call = Call(fn, args, kwargs, is_value, opens_modules=True)
        self._describe(call, None)
        return self._trace(call, self._donated(args, call, options), options), call.arrays

    def check_eager(self) -> None:
        """Raises UnsupportedError in a cluster, because replica functions run eagerly in one process."""
        peers = self._topology.peers
        self._topology.refuse_survivors("strategy.run(..., options=rx.RunOptions(eager=True))")
        if peers is not None:
            num_replicas, num_local = self._topology.num_replicas, len(self._topology.local_devices)
            raise UnsupportedError(
                f"strategy.run(..., options=rx.RunOptions(eager=True)) runs in one process, on the rows of all "
                f"{num_replicas} replicas, and {peers.names[peers.number]} has only those of {num_local}. Debug "
                f"without TF_CONFIG, with as many devices in one process: "
                f"rx.config.set_local_devices({num_replicas}) and MirroredStrategy. Or leave eager out; "
                "jax.debug.print prints on every worker."
            )

    def check_steps(self) -> None:
        """Raises nothing."""

    def owned(self, array: _Array) -> _Array:
        """Records that nobody else holds the buffers of ``array``, and returns it."""
        self._owned[id(array)] = array
        return array

    def _shallow(self, args: Sequence[Any]) -> tuple[Hashable, list[jax.Array]] | None:
        """Returns the signature and the arrays of common arguments: placed values, or tuples of them.

        Returns None for all others. ``_describe`` handles every case, but is slower.
        """
        topology = self._topology
        signature: list[Hashable] = [jax_state()]
        arrays: list[jax.Array] = []
        for arg in args:
            leaves = arg if type(arg) is tuple else (arg,)
            signature.append(leaves is arg and len(leaves))
            for leaf in leaves:
                kind = type(leaf)
                is_known = kind is PerReplica or kind is Mirrored
                if not is_known or leaf.num_replicas != topology.num_replicas:
                    return None
                is_row, shapes = (not leaf.is_equal, leaf.shapes) if kind is PerReplica else (False, None)
                array = leaf.stored
                wanted = topology.per_replica if is_row else topology.replicated
                sharding = getattr(array, "sharding", None)
                if sharding is not wanted and sharding != wanted:
                    return None
                signature.append((kind, array.shape, array.dtype, is_row, shapes))
                arrays.append(array)
        return tuple(signature), arrays

    # --- arguments ------------------------------------------------------------------------------------

    def _describe(self, call: Call, programs: FunctionPrograms | None, *, is_traced: bool = False) -> None:
        """Describes the leaves and puts their arrays on the devices, unless they are traced."""

        replicated = self._topology.replicated

        def rule(leaf: Any) -> tuple[ArgumentLeaf, jax.Array] | None:
            result = local_views.result_of(leaf, replicated)
            if result is not None and not is_traced:
                return array_leaf(leaf), result
            is_distributed = isinstance(leaf, (PerReplica, Mirrored))
            array = leaf.stored if is_distributed else leaf
            if isinstance(array, jax_compat.Tracer) and not is_traced:
                raise tracer_as_argument("strategy.run")
            if is_distributed:
                described = describe_distributed(leaf, self._strategy, self._topology.num_replicas)
            elif key.is_array(leaf):
                described = array_leaf(leaf)
            else:
                return None
            return described, array if is_traced else self._placed(array, described.kind == "row")

        call.describe(programs, list(map(rule, call.leaves)))

    def _placed(self, array: Any, is_row: bool) -> Any:
        if not isinstance(array, jax.Array):
            return array
        wanted = self._topology.per_replica if is_row else self._topology.replicated
        sharding = array.sharding
        if sharding is wanted or sharding == wanted:
            return array
        return self._topology.put_rows(array) if is_row else self._topology.put_whole(array)

    # --- donation -------------------------------------------------------------------------------------

    def _donated(self, args: Sequence[Any], call: Call, options: RunOptions) -> list[bool]:
        """Returns, for each array leaf, True if it belongs to an argument named in ``donate_args``."""
        is_chosen = [False] * len(call.leaves)
        start = 0
        for position, arg in enumerate(args if _donates(options) else ()):
            stop = start + len(jax.tree_util.tree_leaves(arg, is_leaf=is_value))
            if position in options.donate_args or position - len(args) in options.donate_args:
                is_chosen[start:stop] = [True] * (stop - start)
            start = stop
        is_alone = self._topology.num_replicas == 1
        return [
            chosen and (isinstance(leaf, DistributedValues) or (is_alone and isinstance(leaf, jax.Array)))
            for chosen, leaf, one in zip(is_chosen, call.leaves, call.described, strict=True)
            if one.kind != "static"
        ]

    def _give_away(self, call: Call, donated: Sequence[bool]) -> list[jax.Array]:
        """Copies the donated arrays that somebody else may hold, and empties the values that held the others."""
        arrays = call.arrays
        holders = [leaf for leaf, d in zip(call.leaves, call.described, strict=True) if d.kind != "static"]
        # Own references: those of ``leaves`` and ``holders``; the user's pytree has one more.
        held = held_elsewhere(arrays, num_own=3)
        uses = collections.Counter(map(id, arrays))
        results = list(arrays)
        for i, (holder, array, is_donated) in enumerate(zip(holders, arrays, donated, strict=True)):
            if not is_donated:
                continue
            is_distributed = isinstance(holder, DistributedValues)
            if is_distributed:
                is_ours = holder.is_ours and not holder.is_shared  # type: ignore[attr-defined]
                holder.donate()  # type: ignore[attr-defined]
            else:
                is_ours = self._owned.pop(id(array), None) is array and i not in held
            if uses[id(array)] > 1 or not is_ours:
                results[i] = own_copy(array, array.sharding)
        return results

    # --- tracing --------------------------------------------------------------------------------------

    def _trace(self, call: Call, donated: Sequence[bool], options: RunOptions) -> LoweredFunction:
        fn, described = call.fn, call.described
        with watching_labels() if options.check_finite else contextlib.nullcontext() as labels:
            program, rows = trace_replicas(
                self._strategy,
                self._topology,
                fn,
                call.tree,
                described,
                binding_of=self._strategy.bindings.binding_of,
                has_modules=call.has_modules,
            )
        name, paths = key.name_of(fn), call.paths
        watch = listener().traced_run(
            fn,
            name,
            program,
            paths,
            described,
            call.leaves,
            raises=options.check_same,
            reported=self._has_drifted,
        )
        if current_capture() is None:
            for variant in program.variants:
                variant.check_no_leaks()
        results = results_of(program, self._topology, watch.maker_of)
        check_closure = call.closure_check([variant.jaxpr for variant in program.variants])
        check = None
        if labels is not None:
            self._check_may_watch()
            names = [path for path, leaf in zip(paths(), described, strict=True) if leaf.kind != "static"]
            program, check = listener().watch_finite(
                program, f"{name}, run at {user_line()}", names, rows, labels
            )
        make_launcher = Launcher if self._topology.survivors is None else SurvivingLauncher
        launcher = make_launcher(
            program,
            name,
            self._strategy.variable_placement,
            [leaf.kind == "row" for leaf in call.inputs],
            donated,
            rows,
            dict(options.experimental_xla_options or {}) or None,
            check,
        )
        return LoweredFunction(launcher, results, watch, check_closure)

    def _check_may_watch(self) -> None:
        layouts = self._strategy.variable_placement.layouts
        if layouts is not None and layouts.shards is not None:
            raise UnsupportedError(
                "RunOptions(check_finite=True) does not work with shard_state, because replicas hold shards of the variables. Look for the value "
                "that is not finite with the same strategy without shard_state."
            )

    # --- running --------------------------------------------------------------------------------------

    def _run_inline(self, outer: Capture, call: Call, options: RunOptions) -> Any:
        """Inlines the program into the cross-replica function that is being traced."""
        self._describe(call, None, is_traced=True)
        placed = self._last = self._trace(call, [False] * len(call.arrays), options)
        placed.check_closure(call.leaves)
        launcher = placed.launcher
        written, read = launcher.state_bindings
        new, _, outs, _ = launcher.placed(
            [outer.read(s.variable) for s in written],
            [outer.read(s.variable) for s in read],
            launcher.consts,
            [],
            call.arrays,
        )
        for binding, value in zip(written, new, strict=True):
            outer.write(binding.variable, value)
        if launcher.check is not None:
            if outer.checks is None or outer.is_in_branch or outer.is_in_inner_trace():
                raise UnsupportedError(
                    "RunOptions(check_finite=True) works in strategy.run and rx.function, not in run_steps, a plan, or a loop or condition "
                    "of JAX or rx.cond around strategy.run. Run the steps one by one to find the value that is not finite."
                )
            outer.checks.append((launcher.check, outs.pop()))
        return placed.results.wrap(outs)


def _check(call: Call, options: RunOptions, outer: Capture | None) -> None:
    if call.has_modules and options.donate_args:
        raise UnsupportedError(
            "RunOptions(donate_args=…) does not work with nnx modules as arguments, because the modules hold the arrays. Leave "
            "it out, or pass the module's state as arrays (nnx.split)."
        )
    if outer is not None and call.has_modules:
        raise UnsupportedError(
            "strategy.run got an nnx module inside rx.function, whose trace could not update it. Call "
            "strategy.run outside of rx.function, or pass the module's state as arrays (nnx.split)."
        )


def _donates(options: RunOptions) -> bool:
    return bool(options.donate_args) and not options.check_finite
