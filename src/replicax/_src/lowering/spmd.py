"""The SPMD lowering: one ``jit(shard_map(program))`` over the mesh, with donated variables.

It handles the inputs and outputs of state: adoption, donation, and the limit of programs in flight. ``uneven.py``
evaluates uneven batches inside the same ``shard_map``.
"""

from __future__ import annotations

import collections
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax._src.cluster.counters import counters
from replicax._src.collectives.in_replica import Packing, packed_sum
from replicax._src.devices.jax_backend import cpu_pool_is_large
from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.combined_sums import in_rounds
from replicax._src.lowering.cut_run import CutRun, ReplicaFunction
from replicax._src.lowering.row_lookups import ExchangedProgram, exchange_rows
from replicax._src.lowering.uneven import UnevenEvaluator
from replicax._src.lowering.uneven_gathers import evaluate_uneven_gathering
from replicax._src.lowering.whole_operations import make_whole
from replicax._src.scope.any_placement import Placement
from replicax._src.tracing import profile_names as names
from replicax._src.tracing.bindings import (
    Binding,
    LateValues,
    SyncPolicy,
    adopt,
    check_no_tracer,
    own_copy,
    spread_sum,
    state_lock,
)
from replicax._src.tracing.gathers import Sharded, evaluate_gathering
from replicax._src.tracing.holders import held_elsewhere
from replicax._src.tracing.outer_trace import called_in_trace
from replicax._src.tracing.passes import compare_sizes
from replicax._src.tracing.program import ReplicaProgram
from replicax._src.tracing.replication import has_backward_pass
from replicax._src.tracing.update_phase import Updates, cut_before_updates
from replicax._src.variables.layouts import VariableLayouts, is_of_optimizer, sharded
from replicax._src.vocabulary.errors import NotFiniteError

log = logging.getLogger("replicax")
_WHOLE = PartitionSpec()
_ROW = PartitionSpec(REPLICA_AXIS)
_IN_FLIGHT = 4


# --- programs in flight -------------------------------------------------------------------------------


class _InFlight:
    """Limits the number of programs with collectives in the queues of CPU devices.

    More of them would exhaust the thread pool of the collectives, and XLA would abort the process.
    """

    def __init__(self) -> None:
        self._tokens: collections.deque[Any] = collections.deque()
        self._limit: int | None = None

    def add(self, token: Any) -> None:
        if self._limit is None:
            self._limit = self._choose_limit()
        self._tokens.append(token)
        if len(self._tokens) > self._limit:
            self._tokens.popleft().block_until_ready()

    def _choose_limit(self) -> int:
        if cpu_pool_is_large():
            return _IN_FLIGHT
        log.warning(
            "JAX's CPU backend was started before replicax could enlarge its thread pool, so steps run one at a "
            "time. Call replicax.config.set_local_devices(n), or make the strategy, before JAX is first used; or "
            "start Python with PJRT_NPROC=16."
        )
        return 1


in_flight = _InFlight()


# --- the body of a program, on one replica ------------------------------------------------------------


def replica_body(
    program: ReplicaProgram, topology: Topology, rows_of_replica: Sequence[int] | None
) -> Callable[..., tuple[list[Any], list[Any], list[Any]]]:
    """Returns the computation of one replica.

    Args:
      rows_of_replica: The local batch sizes, as weights of statistics; None if they are equal.

    Returns:
      A function of (constants by variant, state by binding, arguments) that returns the array outputs, the new values
      of written variables, and the sums that SUMMED variables show.
    """
    is_sharded = topology.num_logical_devices > 1
    evaluate_uneven = UnevenEvaluator(program, is_sharded) if len(program.variants) > 1 else None
    is_alone = is_sharded and topology.num_replicas == 1 and program.has_collectives
    evaluate_whole = _evaluate_alone if is_alone else jax_compat.eval_jaxpr
    position = {id(binding): i for i, binding in enumerate(program.bindings)}
    orders = [[position[id(e.binding)] for e in v.entries] for v in program.variants]

    def body(consts: Sequence[Sequence[Any]], state: Sequence[Any], args: Sequence[Any]):
        by_variant = [[state[i] for i in order] for order in orders]
        has_shards = any(isinstance(value, Sharded) for value in state)
        if evaluate_uneven is None:
            variant = program.variants[0]
            evaluate = evaluate_gathering if has_shards else evaluate_whole
            outs = evaluate(variant.jaxpr, [*consts[0], *by_variant[0], *args])
            outs, writes = outs[: variant.num_arrays], outs[variant.num_arrays :]
        elif has_shards:
            outs, writes = evaluate_uneven_gathering(
                program, consts, by_variant, args, evaluates_all=is_sharded
            )
        else:
            outs, writes = evaluate_uneven(consts, by_variant, args)
        ordered = _in_written_order(program, writes)
        writes, sums = _share_writes(program, topology, ordered, rows_of_replica)
        return outs, writes, sums

    return body


def _evaluate_alone(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a program with collectives, for a single replica with several devices.

    XLA's partitioner fails for collectives over an axis of size 1 if their operands are sharded (jax 0.10). Collectives
    over a vmapped axis disappear before compilation.
    """
    mapped = jax.vmap(
        lambda *values: jax_compat.eval_jaxpr(jaxpr, values), axis_name=REPLICA_AXIS, axis_size=1
    )
    return [out[0] for out in mapped(*(jnp.asarray(arg)[None] for arg in args))]


def _in_written_order(program: ReplicaProgram, writes: Sequence[Any]) -> list[Any]:
    bindings = [id(e.binding) for e in program.variants[0].written]
    by_binding = dict(zip(bindings, writes, strict=True))
    return [by_binding[id(program.bindings[i])] for i in program.written]


def _share_writes(
    program: ReplicaProgram, topology: Topology, writes: list[Any], rows_of_replica: Sequence[int] | None
) -> tuple[list[Any], list[Any]]:
    """Combines the written values of shared variables in one packed all-reduce."""
    sync_policies = [program.bindings[i].sync_policy for i in program.written]
    summed = [i for i, sync_policy in enumerate(sync_policies) if sync_policy is SyncPolicy.SUMMED]
    differing = [i for i, same in enumerate(program.same_writes) if not same]
    if topology.num_replicas == 1 or not (summed or differing):
        return writes, [writes[i] for i in summed]
    averaged = [i for i in differing if sync_policies[i] is SyncPolicy.AVERAGED]
    firsts = [i for i in differing if sync_policies[i] in (SyncPolicy.FIRST, SyncPolicy.SEED)]
    operands = [writes[i] for i in summed]
    index = jax.lax.axis_index(REPLICA_AXIS)
    if averaged:
        weight, total = _weight(rows_of_replica, topology.num_replicas, index)
        # The statistics of a replica without rows may be NaN, so do not compute 0 * NaN.
        operands += [jnp.where(weight > 0, writes[i] * weight.astype(writes[i].dtype), 0) for i in averaged]
    operands += [jnp.where(index == 0, writes[i], jnp.zeros_like(writes[i])) for i in firsts]
    with jax.named_scope("share_variables"):
        results = packed_sum(operands, Packing.on(topology))
    shared = list(writes)
    for i, value in zip(averaged, results[len(summed) :], strict=False):
        shared[i] = (value / total).astype(writes[i].dtype)
    for i, value in zip(firsts, results[len(summed) + len(averaged) :], strict=True):
        shared[i] = value.astype(writes[i].dtype)
    return shared, results[: len(summed)]


def _weight(rows_of_replica: Sequence[int] | None, num_replicas: int, index: Any) -> tuple[Any, float]:
    if rows_of_replica is None:
        return jnp.float32(1), float(num_replicas)
    return jnp.asarray(rows_of_replica, jnp.float32)[index], float(max(sum(rows_of_replica), 1))


_placed = operator.attrgetter("placed")

# --- launching ----------------------------------------------------------------------------------------


class BindingGroup:
    """Bindings of one program, whose values it reads and writes with few Python operations.

    The group that stored last keeps its values in one list, and updates its bindings only when another program runs. A
    loop of one program therefore touches no binding. Hold the ``state_lock`` to use it.
    """

    _last: ClassVar[weakref.ref[BindingGroup] | None] = None  # weak, because programs may be deleted

    def __init__(self, bindings: Sequence[Binding], placement: Placement):
        kinds = {id(accessor): n for n, accessor in enumerate(dict.fromkeys(s.accessor for s in bindings))}
        self.bindings = sorted(bindings, key=lambda s: kinds[id(s.accessor)])
        self._topology = placement.topology
        self._parameter_device = placement.parameter_device
        self._accessors = list(dict.fromkeys(s.accessor for s in self.bindings))
        self._holders = [[s.holder for s in self.bindings if s.accessor is a] for a in self._accessors]
        self._summed = [i for i, s in enumerate(self.bindings) if s.sync_policy is SyncPolicy.SUMMED]
        self._written: Sequence[Any] | None = None  # values that are not yet in the bindings
        self._reference: weakref.ref[BindingGroup] = weakref.ref(self)
        self._late: LateValues | None = None
        self._may_be_late = False  # all arrays of the variables are donated
        if len(self._accessors) == 1 and not self._summed and self._parameter_device is None:
            self._late = self._accessors[0].late(self._holders[0])
        if self._late is not None:
            weakref.finalize(self, self._late.end).atexit = False

    @classmethod
    def update_bindings(cls, but: BindingGroup | None = None) -> None:
        """Updates all bindings with the values that were written last, except those of the group ``but``."""
        last = None if BindingGroup._last is None else BindingGroup._last()
        if last is not None and last is not but:
            last._update_bindings()

    def _update_bindings(self) -> None:
        if self._written is not None:
            for binding, value in zip(self.bindings, self._written, strict=True):
                if binding.sync_policy is not SyncPolicy.SUMMED:  # their bindings are up to date
                    binding.placed = value
            self._written = None

    def load(self, *, for_donation: bool, beside: BindingGroup | None = None) -> Sequence[Any]:
        """Returns the values for the program. Adopts those that it did not write. For donation, copies those that
        somebody else holds.

        Args:
          beside: The program's group of other variables, which may keep late values.
        """
        late = None if self._late is None else self._late.values
        if late is not None:
            self._may_be_late = for_donation
            return late
        values = self._held(beside)
        if self._parameter_device is not None:
            return self._fetch(values)
        known = map(_placed, self.bindings) if self._written is None else self._written
        if not all(map(operator.is_, values, known)):
            self._update_bindings()
            for i, binding in enumerate(self.bindings):
                if binding.placed is not values[i]:
                    adopt(binding, values[i], self._topology)
            values = self._held(beside)
        for i in self._summed:
            values[i] = self.bindings[i].components
        if for_donation:
            # Own references: the variable's, and the binding's or that of ``_written``. Components have only the
            # binding's.
            held = set(held_elsewhere(values, num_own=2))
            if self._summed:
                held.update(set(self._summed).intersection(held_elsewhere(values, num_own=1)))
            for i in held:
                values[i] = own_copy(values[i], values[i].sharding)
            self._may_be_late = not held
        else:
            self._may_be_late = False
        return values

    def _fetch(self, values: Sequence[Any]) -> list[Any]:
        """Copies the variables from the device that stores them to the devices that compute."""
        whole, row = self._topology.replicated, self._topology.per_replica
        for binding, value in zip(self.bindings, values, strict=True):
            check_no_tracer(binding, value)
        for i in self._summed:
            if self.bindings[i].placed is not values[i]:
                self.bindings[i].components = spread_sum(jnp.asarray(values[i]), self._topology)
        return [
            s.components
            if s.sync_policy is SyncPolicy.SUMMED
            else own_copy(v, row if s.sync_policy.is_per_replica else whole)
            for s, v in zip(self.bindings, values, strict=True)
        ]

    def _held(self, beside: BindingGroup | None) -> list[Any]:
        if self._late is not None:
            if beside is None or beside._late is None or beside._late.values is None:
                LateValues.give()
            return self._late.held()
        if len(self._accessors) == 1:
            return self._accessors[0].get(self._holders[0])
        return [v for a, group in zip(self._accessors, self._holders, strict=True) for v in a.get(group)]

    def store(self, values: Sequence[Any], sums: Sequence[Any]) -> None:
        """Gives the variables the values that the program wrote."""
        shown = list(values)
        for i, total in zip(self._summed, sums, strict=True):
            self.bindings[i].components, shown[i] = values[i], total
        if self._parameter_device is not None:
            shown = [
                v if s.sync_policy is SyncPolicy.COMPONENTS else jax.device_put(v, self._parameter_device)
                for s, v in zip(self.bindings, shown, strict=True)
            ]
        for i in self._summed:
            self.bindings[i].placed = shown[i]
        if self._late is not None and self._may_be_late and not LateValues.is_read:
            self._late.put(shown)
        elif len(self._accessors) == 1:
            self._accessors[0].set(self._holders[0], shown)
        else:
            remaining = iter(shown)
            for accessor, group in zip(self._accessors, self._holders, strict=True):
                accessor.set(group, [next(remaining) for _ in group])
        LateValues.is_read = False
        BindingGroup.update_bindings(but=self)  # another thread's program may have stored meanwhile
        if self._written is None:
            for binding in self.bindings:  # otherwise the earlier arrays would stay alive
                if binding.sync_policy is not SyncPolicy.SUMMED:
                    binding.placed = None
        self._written = shown
        BindingGroup._last = self._reference


def note_nan(error: FloatingPointError) -> None:
    """Notes on the error how to find the line of a NaN that ``jax_debug_nans`` found in a compiled program."""
    error.add_note(
        "(A compiled program has no lines. strategy.run(step, args=..., options=rx.RunOptions(check_finite=True)) names the "
        "operation that gave the first NaN, and its line.)"
    )


def note_loss(error: BaseException, donated: Sequence[Any]) -> None:
    """Notes on the error of a failed program that the donated state is lost."""
    if any(value.is_deleted() for value in donated):
        error.add_note(
            "The program failed after it had been given the variables' memory, so their values are lost. Make the "
            "variables again, or restore them from a checkpoint."
        )


def run_and_store(
    compiled: Callable[..., Any], args: Sequence[Any], store: Callable[[Sequence[Any]], None]
) -> Sequence[Any]:
    """Runs a program that owns the state, the first of ``args``, and stores its results, even if Ctrl-C interrupts it.

    Args:
      store: Stores the state among the results. It may be called twice with the same results.
    """
    kept: list[Any] = []
    try:
        # No bytecode runs between the call and the list: Ctrl-C comes before, or finds the results.
        kept.extend(itertools.starmap(compiled, [args]))
    except jax.errors.JaxRuntimeError as error:
        note_loss(error, args[0])
        raise
    finally:
        if kept:
            try:
                store(kept[0])
            except KeyboardInterrupt:
                store(kept[0])
                raise
    return kept[0]


class ProgramState:
    """The variables that one compiled program writes and those that it only reads.

    Args:
      name: The name of the program for messages; only for programs that run.
    """

    def __init__(
        self,
        bindings: Sequence[Binding],
        written: Sequence[Binding],
        placement: Placement,
        name: str = "",
    ):
        self._name, self._topology = name, placement.topology
        changed = {id(s) for s in written}
        self.written = BindingGroup(written, placement)
        self.read = BindingGroup([s for s in bindings if id(s) not in changed], placement)

    @property
    def bindings(self) -> list[Binding]:
        """All bindings, in the order in which a program takes them: the written ones, then the others."""
        return [*self.written.bindings, *self.read.bindings]

    def load(self, *, for_donation: bool) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the values of the written and of the read group."""
        BindingGroup.update_bindings(but=self.written)
        written = self.written.load(for_donation=for_donation)
        if not self.read.bindings:
            return written, []
        return written, self.read.load(for_donation=False, beside=self.written)

    def described(self, topology: Topology) -> tuple[list[Any], list[Any]]:
        """Returns the shapes, dtypes and shardings of both groups, as a program takes them."""
        groups = self.written.bindings, self.read.bindings
        written, read = ([binding.described(topology) for binding in group] for group in groups)
        return written, read

    def run(
        self,
        compiled: Callable[..., Any],
        args: Sequence[Any],
        donates: bool,
        check: Callable[[list[Any]], None] | None = None,
    ) -> list[Any]:
        """Passes the state to a program and stores the returned state.

        Args:
          compiled: Takes the written state, the read state and ``args``. Returns the new state, the sums that SUMMED
            variables show, the results, and the tokens to wait for.
          donates: True if the program owns the written state. A program that calls back into Python does not, because a
            callback may read the state; it stores the new state when it has finished.
          check: Called with the results before the new state is stored, of a program that does not own the state.
        """
        if not jax_compat.is_evaluating():
            raise called_in_trace("strategy.run (or an rx.function)")
        counters.num_runs += 1
        try:
            if names.current is None:
                return self._run(compiled, args, donates, check)
            with names.current.launch(self._name, self._topology):
                return self._run(compiled, args, donates, check)
        except FloatingPointError as error:
            if not isinstance(error, NotFiniteError):
                note_nan(error)
            raise

    def _run(
        self,
        compiled: Callable[..., Any],
        args: Sequence[Any],
        donates: bool,
        check: Callable[[list[Any]], None] | None,
    ) -> list[Any]:
        if donates:
            assert check is None
            with state_lock:
                written, read = self.load(for_donation=True)
                _, _, outs, tokens = run_and_store(
                    compiled, (written, read, *args), lambda results: self.written.store(*results[:2])
                )
        else:
            with state_lock:
                written, read = self.load(for_donation=False)
            new, sums, outs, tokens = compiled(written, read, *args)
            if check is not None:
                check(outs)
            jax.block_until_ready((new, outs))
            with state_lock:
                self.written.store(new, sums)
        for token in tokens:
            in_flight.add(token)
        return outs


def followed_by_updates(
    placed: Callable[..., Any],
    before: ProgramState,
    whole: ProgramState,
    updates: Updates,
    layouts: VariableLayouts,
) -> Callable[..., Any]:
    """Returns a lowered program that is followed by its updates on the shards of variables.

    Args:
      placed: The program before the updates, as lowered by ``Launcher``.
      before, whole: The variables of that program, and those of the full program.
      layouts: The layouts of the strategy.
    """

    def run(written: Sequence[Any], read: Sequence[Any], *others: Any) -> tuple[Any, Any, Any, Any]:
        values = {id(s): v for s, v in zip(whole.bindings, [*written, *read], strict=True)}
        state = [[values[id(s)] for s in group.bindings] for group in (before.written, before.read)]
        early, sums, outs, token = placed(*state, *others)
        num_outs = len(outs) - updates.num_handed
        pieces = [sharded(values[id(s)], layouts.update_layout(s.variable)) for s in updates.read]
        late = jax_compat.eval_jaxpr(updates.jaxpr, [*pieces, *outs[num_outs:]])
        values.update((id(s), v) for s, v in zip(before.written.bindings, early, strict=True))
        values.update((id(s), v) for s, v in zip(updates.written, late, strict=True))
        return [values[id(s)] for s in whole.written.bindings], sums, outs[:num_outs], token

    return run


def _cut(program: ReplicaProgram) -> tuple[ReplicaProgram, Updates] | None:
    cut = cut_before_updates(program)
    if cut is None:
        return None
    before, updates = compare_sizes(cut[0]), cut[1]
    # (An update takes only values that are the same on all replicas.)
    handed = before.same_outputs[len(before.same_outputs) - updates.num_handed :]
    return (before, updates) if all(handed) else None


def _trains(program: ReplicaProgram, written: Sequence[Binding]) -> bool:
    """Returns True if a program changes trainable variables by gradients and does not only assign them."""
    variables = [binding.variable for binding in written]
    return any(v.trainable for v in variables) and (
        any(map(is_of_optimizer, variables)) or any(has_backward_pass(v.jaxpr) for v in program.variants)
    )


class StateKeeper(Protocol):
    """Keeps references to the arrays of the state between two runs."""

    def note_training_step(self) -> None:
        """Called before each program that trains.

        Raises:
          ReplicaxError: The program must not continue without the state being kept.
        """
        ...


@final
class StatePrograms:
    """One program in two forms: it overwrites the memory of the state that it is given, or leaves it unchanged.

    Args:
      compile_program: Compiles the form that donates the state, or the other one.
      donates: True if the program may own the state at all.
    """

    # Of all programs of the process: what is kept may belong to any strategy. Weak, because a manager may be dropped.
    _keeper: ClassVar[weakref.ref[StateKeeper] | None] = None

    @classmethod
    def keep(cls, keeper: StateKeeper) -> None:
        """Makes all programs leave old state unchanged, until the keeper lets it go or does not exist anymore."""
        cls._keeper = weakref.ref(keeper)

    @classmethod
    def let_go(cls, keeper: StateKeeper) -> None:
        """Ends ``keep``. May be called twice."""
        if cls.keeper() is keeper:
            cls._keeper = None

    @classmethod
    def keeper(cls) -> StateKeeper | None:
        """Returns the keeper of the state; None if programs may overwrite it."""
        return None if cls._keeper is None else cls._keeper()

    @classmethod
    def note_training_step(cls) -> None:
        """Tells the keeper that a program trains next.

        Raises:
          ReplicaxError: The program must not continue without the state being kept.
        """
        keeper = None if cls._keeper is None else cls.keeper()
        if keeper is not None:
            keeper.note_training_step()

    def __init__(self, compile_program: Callable[[bool], Any], donates: bool):
        self._compile, self._donates = compile_program, donates
        self._forms: dict[bool, Any] = {}

    def form(self) -> tuple[Any, bool]:
        """Returns the form to run now, and True if it owns the state."""
        donates = self._donates and (StatePrograms._keeper is None or self.keeper() is None)
        compiled = self._forms.get(donates)
        if compiled is None:
            compiled = self._forms[donates] = self._compile(donates)
        return compiled, donates


class Launcher:
    """A compiled program with the state that it reads and writes.

    Args:
      name: The name of the function for messages.
      is_row: For each argument leaf, True if device r holds only row r of it.
      shapes: The padded local shape of each argument leaf; only for several variants.
      donated: For each argument leaf, True if it is donated.
      rows_of_replica: See ``replica_body``.
      check: Takes the last array output before anything is stored, and raises an error if the step is wrong.
    """

    def __init__(
        self,
        program: ReplicaProgram,
        name: str,
        placement: Placement,
        is_row: Sequence[bool],
        donated: Sequence[bool],
        rows_of_replica: Sequence[int] | None = None,
        compiler_options: dict[str, Any] | None = None,
        check: Callable[[Any], None] | None = None,
    ):
        topology = placement.topology
        if topology.num_logical_devices > 1:
            program = make_whole(program, topology)
        self.program = program
        self._topology = topology
        self._layouts = placement.layouts
        self._is_row = list(is_row)
        self._donated_args = list(donated)
        self._donates_args = any(donated)
        self.check = check
        donates = not program.has_callbacks and check is None
        written = [program.bindings[i] for i in program.written]
        self.state = ProgramState(program.bindings, written, placement, name)
        if placement.layouts is not None and _trains(program, written):
            placement.layouts.check_used(is_training=True)  # the trained variables exist by now
        # The compiler does it, with its own collectives.
        is_sharded = topology.num_logical_devices > 1 or any(s.layout is not None for s in program.bindings)
        self._replica_function: ReplicaFunction | None = None
        self._needs_token = (program.has_collectives or is_sharded) and topology.needs_token
        has_shards = placement.layouts is not None and placement.layouts.shards is not None
        cut = _cut(program) if has_shards and is_sharded else None
        if cut is None:
            exchanged = exchange_rows(program, placement.layouts)
            self.consts = [topology.put_whole(v.consts) for v in exchanged.program.variants]
            self.placed = self._place(exchanged, self.state, rows_of_replica)
        else:
            self.placed = self._place_cut(*cut, placement, rows_of_replica)

        def compile_program(donates: bool) -> Any:
            whole = topology.compile(
                self.placed,
                name,
                has_one_form=True,
                donate_argnums=((0,) if donates else ()) + ((3,) if any(self._donated_args) else ()),
                compiler_options=compiler_options,
                # Without this the compiler would choose the sharding of the results.
                out_shardings=self._shardings_of_results() if is_sharded else None,
            )
            replica, sums = self._replica_function, topology.host_sums
            if sums is None or replica is None or not program.has_collectives or program.has_callbacks:
                return whole
            if any(self._donated_args) or compiler_options or check is not None:
                return whole
            return CutRun(replica, whole, name, topology, sums, donates=donates)

        self._programs = StatePrograms(compile_program, donates)
        self._is_training = any(binding.variable.trainable for binding in written)

    @property
    def compiled(self) -> Any:
        """The compiled program."""
        return self._programs.form()[0]

    @property
    def state_bindings(self) -> tuple[list[Binding], list[Binding]]:
        """The bindings written and those only read, in the order in which ``placed`` takes them."""
        return self.state.written.bindings, self.state.read.bindings

    def lower(self, args: Sequence[Any]) -> Any:
        """Returns the program lowered for ``args``, as ``jax.jit(...).lower`` does."""
        return self.compiled.lower(*self.described(args))

    def described(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments of ``compiled`` for ``args``, with a description of the state."""
        given, kept = self._split(args)
        return [*self.state.described(self._topology), self.consts, given, kept]

    def _place_cut(
        self,
        before: ReplicaProgram,
        updates: Updates,
        placement: Placement,
        rows: Sequence[int] | None,
    ) -> Callable[..., Any]:
        """Returns the program of ``_place``, with its updates after the ``shard_map``, on the devices' shards."""
        written = [before.bindings[i] for i in before.written]
        state = ProgramState(before.bindings, written, placement)
        assert placement.layouts is not None
        first_handed = len(before.same_outputs) - updates.num_handed
        exchanged = exchange_rows(before, placement.layouts, first_handed)
        self.consts = [self._topology.put_whole(v.consts) for v in exchanged.program.variants]
        placed = self._place(exchanged, state, rows)
        self._replica_function = None  # that of ``placed`` is not all of the program
        return followed_by_updates(placed, state, self.state, updates, placement.layouts)

    def _place(
        self, exchanged: ExchangedProgram, program_state: ProgramState, rows: Sequence[int] | None
    ) -> Callable[..., Any]:
        """Returns a program over the mesh: (written state, read state, constants, donated arguments, other
        arguments) -> (written state, sums shown by SUMMED variables, array outputs, token)."""
        single, program, shards = self._topology.num_replicas == 1, exchanged.program, exchanged.shards
        body = replica_body(program, self._topology, rows)
        loaded, written_bindings = program_state.bindings, program_state.written.bindings
        position = {id(s): i for i, s in enumerate(loaded)}
        from_loaded = [position[id(s)] for s in program.bindings]
        order = {id(program.bindings[i]): n for n, i in enumerate(program.written)}
        to_written = [order[id(s)] for s in written_bindings]
        summed = [
            s for s in (program.bindings[i] for i in program.written) if s.sync_policy is SyncPolicy.SUMMED
        ]
        sum_order = {id(s): n for n, s in enumerate(summed)}
        to_sums = [sum_order[id(s)] for s in written_bindings if s.sync_policy is SyncPolicy.SUMMED]
        given, kept = self._split(self._is_row)
        layouts = self._layouts
        is_late = {
            id(s): id(s) in exchanged.tables
            or (layouts is not None and layouts.is_gathered_late(s.shape, s.dtype, s.layout))
            for s in loaded
        }

        def component(binding: Binding, value: Any, layouts: Any = layouts) -> Any:
            if is_late[id(binding)] and id(binding) not in exchanged.tables:
                return layouts.sharded_from_row(value[0], binding.shape, binding.layout)
            return value[0] if binding.sync_policy.is_per_replica or is_late[id(binding)] else value

        def on_device(written, read, consts, given_args, kept_args):
            state = list(map(component, loaded, [*written, *read]))
            args = self._join(given_args, kept_args)
            args = [a[0] if row else a for a, row in zip(args, self._is_row, strict=True)]
            with jax.named_scope("replica"):
                outs, writes, sums = body(consts, [state[i] for i in from_loaded], args)
            writes = [writes[i] for i in to_written]
            writes = [
                w[None] if s.sync_policy.is_per_replica else w
                for s, w in zip(written_bindings, writes, strict=True)
            ]
            outs = [o if same else o[None] for o, same in zip(outs, out_same, strict=True)]
            token = [jnp.zeros((), jnp.int8)] if self._needs_token else []
            return writes, [sums[i] for i in to_sums], outs, token

        is_joined = self._topology.peers is not None and program.has_collectives
        out_same = [(single or same) and i not in shards for i, same in enumerate(program.same_outputs)]
        groups = program_state.written.bindings, program_state.read.bindings
        in_specs = (
            *(
                [_ROW if s.sync_policy.is_per_replica or is_late[id(s)] else _WHOLE for s in g]
                for g in groups
            ),
            _WHOLE,
            [_ROW if row else _WHOLE for row in given],
            [_ROW if row else _WHOLE for row in kept],
        )
        out_specs = (
            [_ROW if s.sync_policy.is_per_replica else _WHOLE for s in written_bindings],
            _WHOLE,
            [_WHOLE if same else _ROW for same in out_same],
            _WHOLE,
        )
        placed = self._topology.on_replicas(
            in_rounds(on_device, Packing.on(self._topology)) if is_joined else on_device,
            in_specs=in_specs,
            out_specs=out_specs,
        )
        if all(s.layout is None for s in loaded):
            self._replica_function = ReplicaFunction(on_device, in_specs, out_specs)
            return placed

        def given_to_replicas(binding: Binding, value: Any) -> Any:
            if binding.layout is None or layouts is None:
                return value
            if is_late[id(binding)]:
                return layouts.in_rows(value, binding.layout)
            return sharded(value, layouts.gathered(binding.layout))

        def with_layouts(written: Sequence[Any], read: Sequence[Any], *others: Any) -> Any:
            state = (
                list(map(given_to_replicas, *group)) for group in zip(groups, (written, read), strict=True)
            )
            new, sums, outs, tokens = placed(*state, *others)
            outs = [shards[i].joined(out) if i in shards else out for i, out in enumerate(outs)]
            return new, sums, outs, tokens

        return with_layouts

    def _shardings_of_results(self) -> Any:
        topology, program = self._topology, self.program
        is_whole = [topology.num_replicas == 1 or same for same in program.same_outputs]
        return (
            [binding.placement_on(topology) for binding in self.state.written.bindings],
            topology.replicated,
            [topology.replicated if whole else topology.per_replica for whole in is_whole],
            topology.replicated,
        )

    def _split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        given = [v for v, d in zip(values, self._donated_args, strict=True) if d]
        kept = [v for v, d in zip(values, self._donated_args, strict=True) if not d]
        return given, kept

    def _join(self, given: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        sources = iter(given), iter(kept)
        return [next(sources[0] if donated else sources[1]) for donated in self._donated_args]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the program once.

        Args:
          args: The arrays: rows [R, ...] where ``is_row``, else replicated.

        Returns:
          The array outputs: replicated if proven the same (or R is 1), else rows [R, ...].
        """
        given, kept = self._split(args) if self._donates_args else ([], args)

        check = None if self.check is None else self._check_last
        if self._is_training:
            StatePrograms.note_training_step()
        compiled, donates = self._programs.form()
        return self.state.run(compiled, (self.consts, given, kept), donates, check)

    def _check_last(self, outs: list[Any]) -> None:
        assert self.check is not None
        self.check(outs.pop())
