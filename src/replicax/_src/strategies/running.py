"""How ``Strategy.run`` runs a function: arguments to leaves, a cache of programs, results to values."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.cluster.progress import compiling
from replicax._src.devices.topology import Topology
from replicax._src.errors import (
    CrossReplicaContextError,
    TraceError,
    UnsupportedError,
)
from replicax._src.framework import use_imported
from replicax._src.lowering.spmd import Launcher
from replicax._src.options import RunOptions
from replicax._src.strategies import drift
from replicax._src.strategies.replica_tracing import describe_distributed, results_of, trace_replicas
from replicax._src.tracing import key
from replicax._src.tracing.arguments import ClosureCheck, as_arguments, paths_of, used_by
from replicax._src.tracing.cache import (
    FunctionPrograms,
    Leaf,
    ProgramCache,
    array_leaf,
    jax_state,
    static_leaf,
)
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.finite import watched
from replicax._src.tracing.holders import held_elsewhere
from replicax._src.tracing.modules import Close, open_modules
from replicax._src.tracing.program import check_no_leaks
from replicax._src.tracing.slots import own_copy
from replicax._src.user_code import user_line
from replicax._src.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    Results,
    is_value,
)

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy


class PlacedFunction:
    """A function traced, compiled and ready, and how its results become values."""

    def __init__(
        self,
        launcher: Launcher,
        results: Results,
        tell_drift: Callable[[Sequence[Any]], None],
        check_closure: ClosureCheck,
    ):
        self.launcher, self.check_closure = launcher, check_closure
        self.tell_drift = tell_drift  # given the arguments' leaves
        self._results = results

    def wrap(self, arrays: Sequence[Any], close: Close | None = None) -> Any:
        """The results of a call as ``run`` returns them."""
        result = self._results.wrap(arrays)
        return result if close is None else close(result)


DEFAULT_OPTIONS = RunOptions()


class Runner:
    """Runs functions on the replicas of one strategy.

    Args:
      strategy: Its ``slots``, ``variable_placement`` and ``reduce_in_replica`` are used.
      topology: The replicas' devices.
    """

    def __init__(self, strategy: Strategy, topology: Topology):
        self._strategy = strategy
        self._topology = topology
        self._cache: ProgramCache[PlacedFunction] = ProgramCache()
        self._last: PlacedFunction | None = None
        self._has_drifted: set[Any] = set()  # functions of which it has been said
        # With one replica arrays are plain: those that nobody else holds a buffer of, for donate_args.
        self._owned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def num_programs(self) -> int:
        """How many programs are held."""
        return len(self._cache)

    @property
    def last_launcher(self) -> Launcher:
        """The launcher of the program that was traced last: for looking at what was compiled."""
        assert self._last is not None, "nothing has been traced yet"
        return self._last.launcher

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> Any:
        """Runs ``fn`` once per replica; see ``Strategy.run``."""
        fn = key.unwrap(fn)
        cells = key.lifted_cells(fn)
        is_plain = not (kwargs or cells or options is not DEFAULT_OPTIONS)
        if is_plain and current_capture() is None:
            found = self._shallow(args)
            if found is not None:
                placed = self._cache.programs_of(fn).shallow.get(found[0])
                if placed is not None:
                    return placed.wrap(placed.launcher(found[1]))
        use_imported()
        nest = (tuple(args), dict(kwargs), cells)
        opened, close = open_modules(nest)
        if close is not None and options.donate_args:
            raise UnsupportedError(
                "RunOptions(donate_args=…) does not go with nnx modules as arguments, whose arrays the modules hold. Leave "
                "it out, or pass the module's state as arrays (nnx.split)."
            )
        leaves, tree = jax.tree_util.tree_flatten(opened, is_leaf=is_value)
        leaves = as_arguments(leaves, tree, has_modules=close is not None)
        outer = current_capture()
        if outer is not None:
            if outer.is_replica:
                raise CrossReplicaContextError(
                    "strategy.run was called in merge_call, whose function is part of a replica program that is being "
                    "traced. Do that work in the replica function, or after run."
                )
            if close is not None:
                raise UnsupportedError(
                    "strategy.run got an nnx module inside rx.function, whose trace could not update it. Call "
                    "strategy.run outside of rx.function, or pass the module's state as arrays (nnx.split)."
                )
            described, arrays = self._describe(leaves, None, is_traced=True)
            donated = [False] * len(arrays)
            placed = self._last = self._trace(
                fn, tree, leaves, described, donated, options, close is not None
            )
            placed.check_closure(leaves)
            return placed.wrap(self._run_inline(placed, outer, arrays), close)
        programs = self._cache.programs_of(fn)
        described, arrays = self._describe(leaves, programs, is_traced=False)
        donated = self._donated(nest[0], leaves, described, options)
        signature = (
            tree,
            tuple(described),
            tuple(donated),
            tuple(sorted((options.experimental_xla_options or {}).items())),
            options.check_same,
            options.check_finite,
            jax_state(),
        )
        placed = programs.get(signature)
        if placed is not None and options.check_same:
            placed.tell_drift(leaves)

        def launched(placed: PlacedFunction) -> Any:
            placed.check_closure(leaves)
            if is_plain and close is None:
                found = self._shallow(args)
                if found is not None:
                    programs.shallow[found[0]] = placed
            given = self._give_away(leaves, arrays, donated, described) if _donates(options) else arrays
            results = placed.launcher(given)
            if options.donate_args and self._topology.num_replicas == 1:
                for array in results:
                    self.owned(array)
            return placed.wrap(results, close)

        if placed is not None:
            return launched(placed)
        with compiling(key.name_of(fn), self._topology.num_replicas):
            try:
                placed = self._trace(fn, tree, leaves, described, donated, options, close is not None)
            except Exception as error:
                programs.note_new_structure(error, tree)
                raise
            programs.put(signature, described, placed)
            self._cache.report_trace(fn, described)
            self._last = placed
            return launched(placed)

    def place(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> tuple[PlacedFunction, list[Any]]:
        """The program that ``run`` would run, and what it takes, to be lowered: nothing is run or kept."""
        use_imported()
        fn = key.unwrap(fn)
        nest = (tuple(args), dict(kwargs), key.lifted_cells(fn))
        opened, close = open_modules(nest)
        leaves, tree = jax.tree_util.tree_flatten(opened, is_leaf=is_value)
        leaves = as_arguments(leaves, tree, has_modules=close is not None)
        described, arrays = self._describe(leaves, None, is_traced=False)
        donated = self._donated(nest[0], leaves, described, options)
        return self._trace(fn, tree, leaves, described, donated, options, close is not None), arrays

    def owned(self, array: Any) -> Any:
        """Remembers that ``array`` is in buffers that nobody else holds; returns it."""
        self._owned[id(array)] = array
        return array

    def _shallow(self, args: Sequence[Any]) -> tuple[Any, list[Any]] | None:
        """The signature and the arrays of the arguments that loops mostly have: placed values, or tuples of such.

        For everything else None: ``_describe`` knows it all, and takes longer.
        """
        signature: list[Any] = [jax_state()]
        arrays: list[Any] = []
        for arg in args:
            if type(arg) is tuple:
                signature.append(len(arg))
                is_known = all(self._add_shallow(leaf, signature, arrays) for leaf in arg)
            else:
                is_known = self._add_shallow(arg, signature, arrays)
            if not is_known:
                return None
        return tuple(signature), arrays

    def _add_shallow(self, leaf: Any, signature: list[Any], arrays: list[Any]) -> bool:
        kind = type(leaf)
        if kind is PerReplica:
            is_row = not leaf.is_equal
            mark: Any = (leaf.shapes, is_row)
        elif kind is Mirrored:
            is_row, mark = False, None
        else:
            return False
        if leaf.num_replicas != self._topology.num_replicas:
            return False
        array = leaf.stored
        wanted = self._topology.per_replica if is_row else self._topology.replicated
        sharding = getattr(array, "sharding", None)
        if sharding is not wanted and sharding != wanted:
            return False
        signature.append((array.shape, array.dtype, mark))
        arrays.append(array)
        return True

    # --- arguments ------------------------------------------------------------------------------------

    def _describe(
        self, leaves: Sequence[Any], programs: FunctionPrograms | None, *, is_traced: bool
    ) -> tuple[list[Leaf], list[Any]]:
        """What each leaf is, and the arrays to pass."""
        described: list[Leaf] = []
        arrays: list[Any] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, (PerReplica, Mirrored)):
                if isinstance(leaf.stored, jax_compat.Tracer) and not is_traced:
                    raise _foreign_trace()
                described.append(describe_distributed(leaf, self._strategy, self._topology.num_replicas))
                arrays.append(self._placed(leaf.stored, leaf, is_traced))  # type: ignore[attr-defined]
            elif key.is_array(leaf):
                if isinstance(leaf, jax_compat.Tracer) and not is_traced:
                    raise _foreign_trace()
                described.append(array_leaf(leaf))
                arrays.append(self._placed(leaf, None, is_traced))
            elif type(leaf) is float and programs is not None and programs.is_varying(position, leaf):
                described.append(Leaf("whole", (), jnp.result_type(float), weak_type=True))
                arrays.append(leaf)
            else:
                described.append(static_leaf(leaf))
        return described, arrays

    def _placed(self, array: Any, distributed: DistributedValues | None, is_traced: bool) -> Any:
        if is_traced or not isinstance(array, jax.Array):
            return array
        is_row = isinstance(distributed, PerReplica) and not distributed.is_equal
        wanted = self._topology.per_replica if is_row else self._topology.replicated
        sharding = array.sharding
        if sharding is wanted or sharding == wanted:
            return array
        return self._topology.put_rows(array) if is_row else self._topology.put_whole(array)

    # --- donation -------------------------------------------------------------------------------------

    def _donated(
        self, args: Sequence[Any], leaves: Sequence[Any], described: Sequence[Leaf], options: RunOptions
    ) -> list[bool]:
        """Which array leaves are donated: those of the arguments named in ``donate_args``."""
        is_chosen = [False] * len(leaves)
        start = 0
        for position, arg in enumerate(args if _donates(options) else ()):
            stop = start + len(jax.tree_util.tree_leaves(arg, is_leaf=is_value))
            if position in options.donate_args or position - len(args) in options.donate_args:
                is_chosen[start:stop] = [True] * (stop - start)
            start = stop
        return [
            chosen and (isinstance(leaf, DistributedValues) or self._is_plain_state(leaf))
            for chosen, leaf, one in zip(is_chosen, leaves, described, strict=True)
            if one.kind != "static"
        ]

    def _is_plain_state(self, leaf: Any) -> bool:
        return self._topology.num_replicas == 1 and isinstance(leaf, jax.Array)

    def _give_away(
        self, leaves: Sequence[Any], arrays: Sequence[Any], donated: Sequence[bool], described: Sequence[Leaf]
    ) -> list[Any]:
        """Copies the donated arrays that somebody else may hold, and empties the values that held the others."""
        holders = [leaf for leaf, d in zip(leaves, described, strict=True) if d.kind != "static"]
        # Ours are those of ``leaves`` and ``holders``, and the user's nest has one.
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

    def _trace(
        self,
        fn: Callable[..., Any],
        tree: Any,
        leaves: Sequence[Any],
        described: Sequence[Leaf],
        donated: Sequence[bool],
        options: RunOptions,
        has_modules: bool,
    ) -> PlacedFunction:
        program, rows = trace_replicas(
            self._strategy,
            self._topology,
            fn,
            tree,
            described,
            slot_of=self._strategy.slots.slot_of,
            has_modules=has_modules,
        )
        function, paths = drift.identity_of(fn), paths_of(tree, has_modules=has_modules)
        traced, name, told = program, key.name_of(fn), self._has_drifted

        def tell_drift(leaves: Sequence[Any]) -> None:
            drifted = drift.drifted_paths(function, traced, paths, described, leaves)
            if drifted and (options.check_same or function not in told):
                told.add(function)
                drift.tell(name, drifted, raises=options.check_same)

        tell_drift(leaves)
        inputs = [leaf for leaf in described if leaf.kind != "static"]
        if current_capture() is None:
            for variant in program.variants:
                check_no_leaks(variant)
        results = results_of(program, self._topology, function, drift.shared_shapes(paths, described))
        check = None
        if options.check_finite:
            self._check_may_watch()
            names = [path for path, leaf in zip(paths, described, strict=True) if leaf.kind != "static"]
            program, check = watched(program, f"{name}, run at {user_line()}", names, rows)
        launcher = Launcher(
            program,
            name,
            self._strategy.variable_placement,
            [leaf.kind == "row" for leaf in inputs],
            donated,
            rows,
            dict(options.experimental_xla_options or {}) or None,
            check,
        )
        jaxprs = [variant.jaxpr for variant in program.variants]
        check_closure = ClosureCheck(
            tree, described, lambda: used_by(jaxprs, len(inputs)), has_modules=has_modules
        )
        return PlacedFunction(launcher, results, tell_drift, check_closure)

    def _check_may_watch(self) -> None:
        if self._strategy.variable_placement.layouts is not None:
            raise UnsupportedError(
                "RunOptions(check_finite=True) does not go with shard_state: replicas hold pieces of the variables. Look for the value "
                "that is not finite with the same strategy without shard_state."
            )

    # --- running --------------------------------------------------------------------------------------

    def _run_inline(self, placed: PlacedFunction, outer: Any, arrays: Sequence[Any]) -> list[Any]:
        """Places the program in the middle of the cross-replica function that is being traced."""
        outer.use_strategy(self._strategy)
        written, read = placed.launcher.state_slots
        new, _, outs, _ = placed.launcher.placed(
            [outer.read(s.variable) for s in written],
            [outer.read(s.variable) for s in read],
            placed.launcher.consts,
            [],
            list(arrays),
        )
        for slot, value in zip(written, new, strict=True):
            outer.write(slot.variable, value)
        if placed.launcher.check is not None:
            if outer.checks is None or outer.is_in_branch or outer.is_in_inner_trace():
                raise UnsupportedError(
                    "RunOptions(check_finite=True) works in strategy.run and rx.function, not in run_steps, a plan, or a loop or condition "
                    "of JAX or rx.cond around strategy.run. Run the steps one by one to find the value that is not finite."
                )
            outer.checks.append((placed.launcher.check, outs.pop()))
        return outs


def _donates(options: RunOptions) -> bool:
    return bool(options.donate_args) and not options.check_finite


def _foreign_trace() -> TraceError:
    return TraceError(
        "strategy.run got a tracer as an argument outside its trace: the value was computed in a "
        "function that JAX traced (jax.jit, jax.grad, or an earlier run) and kept. Return it from "
        "that function; or call run inside rx.function instead of jax.jit."
    )
