"""The global view: a pure step of a global batch, compiled over the replicas' devices.

XLA's partitioner splits the program of one device. Every sum over the batch is
therefore over the global batch, and no formula is needed. State is replicated, and the rows of a batch are split. A
batch that cannot be split evenly is padded on the host, and the program first removes the padding.

The partitioner sums each array separately, and on CPUs devices and processes wait for each other at each sum. There
this module splits the program instead, if all its operations are known to keep rows apart
(``tracing/row_partitioner``), so that all sums of a step travel together. Where the hosts add faster than XLA's
collectives, it is also cut there (``cut_step.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.cluster.progress import batch_of_other_size, compiling
from replicax._src.collectives.in_replica import Packing, packed_sum
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering import whole_operations
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.lowering.cut_step import CutStep
from replicax._src.lowering.held_state import HeldState
from replicax._src.lowering.row_lookups import exchange_rows_globally
from replicax._src.lowering.spmd import StatePrograms, in_flight, run_and_store
from replicax._src.lowering.traced_step import Step, TracedStep
from replicax._src.tracing import profile_names as names
from replicax._src.tracing.bindings import is_stored_as_parts, parts_of, state_lock, sum_of_parts
from replicax._src.tracing.equations import evaluated
from replicax._src.tracing.gathers import evaluate_gathering
from replicax._src.tracing.markers import NUM_SCALARS, accumulate_p, accumulated
from replicax._src.tracing.row_partitioner.row_layouts import RowSplit
from replicax._src.tracing.row_partitioner.row_plan import RowsPlan, split_by_rows

log = logging.getLogger("replicax")
_DRAWING = frozenset({"random_bits", "rng_bit_generator", "threefry2x32"})


@final
class GlobalStep:
    """A step with its programs: one for each form of batch and state.

    Args:
      step: The step, which is traced once for each form.
      name: The name of the step for messages.
      topology: The devices.
      donates: True if programs may overwrite the memory of the state that they change.
      keeps_all: True to return the outputs of all steps of a call, not only of the last.
    """

    def __init__(self, step: Step, name: str, topology: Topology, *, donates: bool, keeps_all: bool):
        self._step, self._name, self._topology = step, name, topology
        self._may_donate, self._keeps_all = donates, keeps_all
        self._programs: dict[Hashable, _Program] = {}
        self._last_rows = 0

    @property
    def _donates(self) -> bool:
        return self._may_donate and StatePrograms.keeper() is None

    def program(self, state: HeldState, batch: DatasetBatch, capacity: int) -> _Program:
        """Returns the program for batches like this one, and traces and compiles it if there is none yet.

        Args:
          state: The state that the step will take.
          batch: One of the batches.
          capacity: The largest number of batches per call. More than 1 are stacked.
        """
        form = self._form(state, batch, capacity)
        program = self._programs.get(form)
        if program is None:
            program = _Program(
                self._step, self._name, state, batch, capacity, self._topology, self._donates, self._keeps_all
            )
            if capacity > 1 and (program.is_cut or program.is_slow_in_a_loop):
                program = self.program(state, batch, 1)
            self._programs[form] = program
        return program

    def run(
        self,
        state: HeldState,
        batches: Sequence[DatasetBatch],
        capacity: int,
        prepare: Callable[[_Program], None],
    ) -> list[Any]:
        """Runs the step on batches of one form: see ``_Program.__call__``.

        Args:
          capacity: See ``program``.
          prepare: A function to call with the program before it runs.
        """
        form = self._form(state, batches[0], capacity)
        program = self._programs.get(form)
        if program is not None:
            prepare(program)
            return program(state, batches)
        again = batch_of_other_size(batches[0].num_rows, self._last_rows) if self._programs else ""
        self._last_rows = batches[0].num_rows
        with compiling(self._name, self._topology.num_replicas, again):
            program = self.program(state, batches[0], capacity)
            prepare(program)
            return program(state, batches)

    def _form(self, state: HeldState, batch: DatasetBatch, capacity: int) -> Hashable:
        return (batch.signature, capacity, state.form, self._donates, jax.config.read("jax_enable_x64"))

    @property
    def num_programs(self) -> int:
        """The number of programs."""
        return len(self._programs)


def _bind_with_parts(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation in which the parts [R, ...] of a sum may stand for the sum.

    The first replica accumulates gradients, which are summed already.
    """
    are_parts = [is_stored_as_parts(v, atom.aval.shape) for v, atom in zip(operands, eqn.invars, strict=True)]
    if eqn.primitive is not accumulate_p or not any(are_parts):
        operands = [sum_of_parts(v) if is_part else v for v, is_part in zip(operands, are_parts, strict=True)]
        return jax_compat.bind_equation(eqn, operands)
    number = len(operands[are_parts.index(True)])
    rows = [
        v if is_part else parts_of(v, number) for v, is_part in list(zip(operands, are_parts))[NUM_SCALARS:]
    ]

    def total(sums: Sequence[Any]) -> list[Any]:
        zeros = [jnp.zeros_like(value[0]) for value in sums]
        return jax.lax.cond(operands[0], lambda: list(map(sum_of_parts, sums)), lambda: zeros)

    return accumulated(*operands[:NUM_SCALARS], *rows, total=total, is_conditional=False)


@final
class _Program:
    """The compiled step for batches of one form.

    Attributes:
      written: The positions of the arrays of the state that it changes. The others are only inputs.
    """

    def __init__(
        self,
        step: Step,
        name: str,
        state: HeldState,
        batch: DatasetBatch,
        capacity: int,
        topology: Topology,
        donates: bool,
        keeps_all: bool,
    ):
        self._name = name
        self._topology, self._capacity, self._donates = topology, capacity, donates
        self._keeps_all = keeps_all and capacity > 1
        self._gives_rows = keeps_all
        self._counts: dict[int, jax.Array] = {}
        self._split = RowSplit(batch.sizes(topology.num_replicas))
        traced = TracedStep(step, name, state, batch, self._split, topology)
        self._layouts = traced.layouts
        self._jaxpr, self._outputs_tree = traced.jaxpr, traced.outputs_tree
        self.written, self._read, self._repeated = traced.written, traced.read, traced.repeated
        num_consts, num_state = len(traced.consts), traced.num_state
        self._consts = topology.put_whole(traced.consts)
        self._shardings = state.shardings
        self._parts = frozenset(state.parts)
        self._is_sharded = not self._parts and any(s != topology.replicated for s in self._shardings)
        self._plan = self._plan_by_rows(num_consts, num_state)
        if self._plan is None and any(layout.is_split for layout in self._layouts):
            self._make_wrong_operations_whole()
        if self._is_sharded:
            self._jaxpr, more = exchange_rows_globally(self._jaxpr)
            self._consts = [*topology.put_whole(more), *self._consts]
        self._needs_token = topology.needs_token
        self._compiled = self._compile()
        self._cut = self._cut_at_sums(state, num_consts) if capacity == 1 else None

    def _make_wrong_operations_whole(self) -> None:
        is_padded = any(layout.is_padded for layout in self._layouts)
        rule = whole_operations.rule_of_batches(self._split.num_rows, self._topology, is_padded=is_padded)
        jaxpr = self._jaxpr
        if not whole_operations.has_wrong(jaxpr, rule):
            return

        def whole(value: Any) -> Any:
            return jax.lax.with_sharding_constraint(value, self._topology.replicated)

        self._jaxpr, consts = jax_compat.trace(
            lambda *args: whole_operations.evaluate(jaxpr, args, rule, whole),
            [var.aval for var in jaxpr.invars],
        )
        self._consts = [*self._topology.put_whole(list(consts)), *self._consts]

    @property
    def is_slow_in_a_loop(self) -> bool:
        """True if the step is slower inside of a loop than alone. On CPU, XLA's convolution in a loop slowed a small
        network by a factor of 3 to 5 (jax 0.10).
        """
        return self._topology.is_cpu and "conv_general_dilated" in jax_compat.primitives_of(self._jaxpr)

    @property
    def is_cut(self) -> bool:
        """True if the processes exchange sums between programs, so that several steps cannot be one program."""
        return self._plan is not None and self._topology.host_sums is not None and not self._parts

    def _cut_at_sums(self, state: HeldState, num_consts: int) -> CutStep | None:
        """Returns the step as several programs, if that is faster and possible."""
        sums = self._topology.host_sums
        if self._plan is None or sums is None or not self.is_cut:
            return None
        avals = [*self._consts, *state.values(), *(layout.described() for layout in self._layouts)]
        first = len(avals) - len(self._layouts)
        num_written, repeated = len(self.written), self._repeated

        def finish(results: list[Any]) -> tuple[list[Any], list[Any]]:
            for i in repeated:
                results[i] = jnp.copy(results[i])
            return results[:num_written], results[num_written:]

        return CutStep(
            self._plan,
            self._name,
            self._topology,
            sums,
            avals,
            split=[first + i for i, layout in enumerate(self._layouts) if layout.is_split],
            num_consts=num_consts,
            written=self.written,
            finish=finish,
            donates=self._donates,
        )

    @property
    def _is_faster_in_a_process(self) -> bool:
        """True if a step that is split by rows is faster on the devices of this process.

        There the partitioner divides random bits among the devices. A step that is split by rows draws all of them on
        each device.
        """
        draws = jax_compat.primitives_of(self._jaxpr) & _DRAWING
        return self._topology.num_replicas > 1 and not draws

    def _plan_by_rows(self, num_consts: int, num_state: int) -> RowsPlan | None:
        """Returns the program split by rows, if that is faster and possible; else None."""
        topology = self._topology
        is_faster = topology.is_cpu and (topology.peers is not None or self._is_faster_in_a_process)
        if (
            not (is_faster or self._parts)
            or self._gives_rows
            or topology.num_logical_devices > 1
            or self._is_sharded
        ):
            return None
        has_rows = [False] * (num_consts + num_state) + [layout.is_split for layout in self._layouts]
        kept = {n for n, i in enumerate(self.written) if i in self._parts}
        plan = split_by_rows(self._jaxpr, has_rows, self._split, {num_consts + i for i in self._parts}, kept)
        if isinstance(plan, str) and topology.peers is None and not self._parts:
            return None
        if isinstance(plan, str):
            log.warning(
                "%s: %s: %s.",
                self._name,
                "replicas exchange gradients after each small batch, not once for each update"
                if self._parts
                else "the processes sum each array separately (the global view), not all together, which is slower",
                plan,
            )
            return None
        if topology.peers is not None:
            log.info(
                "%s: the processes sum all arrays of a step together, in %d round(s).",
                self._name,
                plan.num_rounds,
            )
        return plan

    def _compile(self) -> Any:
        run = self._run_one if self._capacity == 1 else self._run_several
        whole = self._topology.replicated
        written, read = [[self._shardings[i] for i in some] for some in (self.written, self._read)]
        batch = [layout.sharding(is_stacked=self._capacity > 1) for layout in self._layouts]
        shardings = (written, read, whole, batch, *[whole] * (self._capacity > 1))
        if self._plan is not None:
            specs = jax.tree_util.tree_map(lambda sharding: sharding.spec, shardings)
            run = self._topology.on_replicas(
                run, in_specs=specs, out_specs=(specs[0], whole.spec, whole.spec)
            )
        return self._topology.compile(
            run,
            self._name,
            has_one_form=True,
            in_shardings=shardings,
            out_shardings=(written, whole, whole),
            donate_argnums=(0,) if self._donates else (),
        )

    def _evaluate(self, written: Any, read: Any, consts: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
        state: list[Any] = [None] * (len(self.written) + len(self._read))
        has_own = self._plan is not None  # a replica has its own part only, [1, ...]
        for i, value in zip([*self.written, *self._read], [*written, *read], strict=True):
            state[i] = value[0] if has_own and i in self._parts else value
        outs = self._evaluate_whole([*consts, *state], leaves)
        for i in self._repeated:
            outs[i] = jnp.copy(outs[i])
        for n, i in enumerate(self.written):
            if has_own and i in self._parts:
                outs[n] = outs[n][None]
            elif i in self._parts and not is_stored_as_parts(outs[n], self._jaxpr.outvars[n].aval.shape):
                outs[n] = parts_of(outs[n], self._topology.num_replicas)
        return outs[: len(self.written)], outs[len(self.written) :]

    def _evaluate_whole(self, args: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        if self._plan is not None:
            packing = Packing.on(self._topology)

            def add(values: Sequence[Any]) -> list[Any]:
                with jax.named_scope("sum_together"):
                    return packed_sum(values, packing)

            return self._plan.evaluate([*args, *leaves], add)
        rows = [layout.without_padding(leaf) for layout, leaf in zip(self._layouts, leaves, strict=True)]
        if self._parts:
            return evaluated(self._jaxpr, [*args, *rows], _bind_with_parts)
        return evaluate_gathering(self._jaxpr, [*args, *rows])

    def _run_one(self, written: Any, read: Any, consts: Any, leaves: Any) -> Any:
        new, outputs = self._evaluate(written, read, consts, leaves)
        return new, outputs, self._token()

    def _run_several(self, written: Any, read: Any, consts: Any, leaves: Any, num_steps: Any) -> Any:
        num_written = len(self.written)
        avals = [var.aval for var in self._jaxpr.outvars[num_written:]]
        kept = [(self._capacity, *aval.shape) if self._keeps_all else aval.shape for aval in avals]
        first = [jnp.zeros(shape, aval.dtype) for shape, aval in zip(kept, avals, strict=True)]

        def one(index: Any, carry: Any) -> Any:
            state, outputs = carry
            batch = [jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False) for leaf in leaves]
            state, new = self._evaluate(state, read, consts, batch)
            if self._keeps_all:
                new = [
                    jax.lax.dynamic_update_index_in_dim(o, n, index, 0)
                    for o, n in zip(outputs, new, strict=True)
                ]
            return state, new

        new, outputs = jax.lax.fori_loop(0, num_steps, one, (list(written), first))
        return new, outputs, self._token()

    def _placed_count(self, count: int) -> jax.Array:
        if count not in self._counts:
            self._counts[count] = self._topology.put_whole(np.int32(count))
        return self._counts[count]

    def _token(self) -> list[Any]:
        return [jnp.zeros((), jnp.int8)] if self._needs_token else []

    def described(self, state: HeldState) -> tuple[Any, list[Any]]:
        """Returns the program from ``jax.jit``, and descriptions of its arguments for one batch."""
        values = state.values()
        written, read = [values[i] for i in self.written], [values[i] for i in self._read]
        return self._compiled, [written, read, self._consts, [layout.described() for layout in self._layouts]]

    def __call__(self, state: HeldState, batches: Sequence[DatasetBatch]) -> list[Any]:
        """Runs the step on each batch and leaves the new state in ``state``. Does not block.

        Returns:
          The outputs: of all steps if ``keeps_all``, else at least those of the last one.
        """
        if self._capacity == 1:
            return [output for batch in batches for output in self._call(state, [batch])]
        return self._call(state, batches)

    def _call(self, state: HeldState, batches: Sequence[DatasetBatch]) -> list[Any]:
        if names.current is not None:
            with names.current.launch(self._name, self._topology):
                return self._launch(state, batches)
        return self._launch(state, batches)

    def _launch(self, state: HeldState, batches: Sequence[DatasetBatch]) -> list[Any]:
        columns = zip(*(batch.leaves for batch in batches), strict=True)
        if self._capacity == 1:
            leaves = [layout.put(column[0]) for layout, column in zip(self._layouts, columns, strict=True)]
        else:
            leaves = [
                layout.put_stacked(column, self._capacity)
                for layout, column in zip(self._layouts, columns, strict=True)
            ]
        if self._cut is not None:
            return [self._outputs_tree.unflatten(self._cut.run(self._consts, state, leaves))]
        # (A Python number would miss jit's fast dispatch path.)
        counts = [self._placed_count(len(batches))] if self._capacity > 1 else []
        with state_lock:
            values = state.values()
            written = [values[i] for i in self.written]
            read = [values[i] for i in self._read]
            del values
            _, outputs, tokens = run_and_store(
                self._compiled,
                (written, read, self._consts, leaves, *counts),
                lambda results: state.store(self.written, results[0]),
            )
        for token in tokens:
            in_flight.add(token)
        if self._keeps_all:
            on_host = [np.asarray(leaf) for leaf in outputs]
            return [self._outputs_tree.unflatten([leaf[i] for leaf in on_host]) for i in range(len(batches))]
        return [self._outputs_tree.unflatten(outputs)]
