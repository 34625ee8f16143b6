"""A step of a global batch as programs of one process, which exchanges the sums between them itself.

``global_view.py`` compiles a step for the devices of all processes. If one of them dies, no such program can run. Here
a step of C rounds of sums (``tracing/row_partitioner``) becomes C + 1 programs of one device. The number of the replica
is an operand, so a process runs the same programs for each of its replicas, and for others that it adopts. Only the
last program changes the state, and it starts when all sums are here: until then a step can fail, and be repeated with
the same results bit for bit. ``surviving_step.py`` runs them.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.cluster.progress import batch_of_other_size, compiling
from replicax._src.devices import memory
from replicax._src.devices.topology import Topology
from replicax._src.fault_tolerance.first_step import StepDigests, digests_of
from replicax._src.fault_tolerance.stepped_program import CombineRound, RoundArrays
from replicax._src.lowering.batch import BatchLayout, DatasetBatch
from replicax._src.lowering.held_state import HeldState
from replicax._src.lowering.round_buffers import RoundBuffer
from replicax._src.lowering.round_programs import ReplicaOperand, RoundPrograms
from replicax._src.lowering.spmd import run_and_store
from replicax._src.lowering.traced_step import Step, TracedStep
from replicax._src.tracing.bindings import state_lock
from replicax._src.tracing.gathers import evaluate_gathering
from replicax._src.tracing.rounds import Computation, RoundsOfSums
from replicax._src.tracing.row_partitioner.row_layouts import RowSplit
from replicax._src.tracing.row_partitioner.row_plan import split_by_rows
from replicax._src.vocabulary.errors import UnsupportedError

log = logging.getLogger("replicax")


@final
class LocalStep:
    """A step with its programs: for each form of batch and state, those of one process.

    Args:
      step: The step, which is traced once for each form.
      name: The name of the step for messages.
      topology: The one device of this process.
      num_replicas: The number R of replicas of all processes.
      gives_rows: True if its outputs have a row for each row of the batch, as predictions have. Then every process
        computes the whole batch.
    """

    def __init__(
        self, step: Step, name: str, topology: Topology, num_replicas: int, *, gives_rows: bool = False
    ):
        self._step, self._name, self._topology = step, name, topology
        self._num_replicas, self._gives_rows = num_replicas, gives_rows
        self._programs: dict[Hashable, LocalPrograms] = {}
        self._last_rows = 0

    def programs(self, state: HeldState, batch: DatasetBatch, *, donates: bool = True) -> LocalPrograms:
        """Returns the programs for batches like this one, and compiles them if there are none yet.

        Args:
          state: The state that the step will take.
          batch: One of the batches.
          donates: True if the last program overwrites the memory of the state that it changes.
        """
        form = batch.signature, state.form, donates, jax.config.read("jax_enable_x64")
        programs = self._programs.get(form)
        if programs is None:
            again = batch_of_other_size(batch.num_rows, self._last_rows) if self._programs else ""
            self._last_rows = batch.num_rows
            with compiling(self._name, self._num_replicas, again):
                programs = self._programs[form] = LocalPrograms(
                    self._step,
                    self._name,
                    state,
                    batch,
                    self._topology,
                    self._num_replicas,
                    donates=donates,
                    gives_rows=self._gives_rows,
                )
        return programs


@final
class LocalPrograms:
    """The compiled programs of a step for batches of one form.

    Attributes:
      rounds: The buffers of each round, whose arrays are flat. Empty if every process computes the whole batch.
      digest: A text that is equal in processes that run the same programs.
      written: The positions of the arrays of the state that the step changes.
    """

    def __init__(
        self,
        step: Step,
        name: str,
        state: HeldState,
        batch: DatasetBatch,
        topology: Topology,
        num_replicas: int,
        *,
        donates: bool,
        gives_rows: bool,
    ):
        assert not state.parts, "each replica would keep a part of a sum, which dies with it"
        self._name, self._topology = name, topology
        replica = ReplicaOperand()
        split = RowSplit(batch.sizes(num_replicas), replica)
        traced = TracedStep(step, name, state, batch, split, topology)
        self._layouts = traced.layouts
        self.written, self._outputs_tree = traced.written, traced.outputs_tree
        self._consts = topology.put_whole(traced.consts)
        why = "its outputs have a row for each row of the batch"
        program = why if gives_rows else self._split_by_rows(traced, split)
        if isinstance(program, str):
            self._take_whole_batch(batch, program)
            program = _without_rounds(traced.jaxpr)
        num_written, repeated, num_consts = len(self.written), traced.repeated, len(traced.consts)

        def finish(results: list[Any]) -> tuple[list[Any], list[Any]]:
            for i in repeated:
                results[i] = jnp.copy(results[i])
            return results[:num_written], results[num_written:]

        self._programs = RoundPrograms(
            program,
            [*self._consts, *state.values(), *(layout.described_rows() for layout in self._layouts)],
            name,
            topology,
            num_replicas,
            replica,
            donated=[num_consts + i for i in self.written],
            donates=donates,
            finish=finish,
        )
        self.rounds: tuple[tuple[RoundBuffer, ...], ...] = self._programs.rounds
        self.digest = self._programs.digest

    def _split_by_rows(self, traced: TracedStep, split: RowSplit) -> RoundsOfSums | str:
        """Returns the program of a replica, or the reason why every process computes the whole batch."""
        is_split = [layout.is_split for layout in self._layouts]
        if not any(is_split):
            return "the batch has no rows to split"
        has_rows = [False] * (len(traced.consts) + traced.num_state) + is_split
        plan = split_by_rows(traced.jaxpr, has_rows, split)
        if isinstance(plan, str):
            log.warning(
                "%s: every process computes the whole batch, which gives the same results and is slower: %s.",
                self._name,
                plan,
            )
            return plan
        log.info(
            "%s: the processes sum all arrays of a step together, in %d round(s).",
            self._name,
            plan.num_rounds,
        )
        return plan.in_rounds()

    def _take_whole_batch(self, batch: DatasetBatch, why: str) -> None:
        if batch.worker_sizes is not None:
            raise UnsupportedError(
                f"{self._name} cannot be split by rows: {why}. So every process would have to compute the whole batch, "
                "and with this dataset each process has only its own rows. Give arrays, or a dataset that every process "
                "reads in full."
            )
        whole = RowSplit([batch.num_rows])
        self._layouts = [BatchLayout(leaf, batch, whole, self._topology) for leaf in batch.leaves]

    # --- running a step -------------------------------------------------------------------------------

    def sums(
        self,
        state: HeldState,
        batches: Sequence[DatasetBatch],
        replicas: Sequence[int],
        combine: CombineRound,
    ) -> list[RoundArrays]:
        """Runs all programs but the last one, for each replica of this process. It changes nothing.

        It blocks until all rounds are combined, so the memory of the batches may be reused afterwards.

        Args:
          state: The state before the step.
          batches: For each of ``replicas``, the batch with its rows: the global batch for all of them, or one that has
            only the rows of this replica (``WorkerRows``).
          replicas: The numbers of the replicas that this process computes.
          combine: Combines the arrays of a round.

        Returns:
          The combined arrays of each round. With them, and the same state, any process can run ``update``.
        """
        if not self.rounds:
            return []
        programs = self._programs
        with state_lock:
            common = [*self._consts, *state.values()]
        slots_of = [
            programs.slots([*common, *self._rows(batch, replica)])
            for batch, replica in zip(batches, replicas, strict=True)
        ]
        return programs.run_rounds(replicas, slots_of, combine)

    def _rows(self, batch: DatasetBatch, replica: int) -> list[np.ndarray]:
        return [
            layout.rows_of(leaf, replica) for layout, leaf in zip(self._layouts, batch.leaves, strict=True)
        ]

    def digests(self, state: HeldState, batch: DatasetBatch) -> StepDigests:
        """Returns digests of the programs, the state and the batch, which is the global batch."""
        with state_lock:
            values = [*self._consts, *state.values()]
        names = [f"captured array {i}" for i in range(len(self._consts))]
        paths, _ = jax.tree_util.tree_flatten_with_path(batch.tree.unflatten(batch.leaves))
        of_batch = [f"batch{jax.tree_util.keystr(path)}" for path, _ in paths]
        return StepDigests(
            self.digest,
            digests_of([*names, *state.names], values),
            digests_of(of_batch, batch.leaves) if batch.worker_sizes is None else (),
        )

    def update(self, state: HeldState, batch: DatasetBatch, sums: Sequence[RoundArrays]) -> Any:
        """Runs the last program and leaves the new state in ``state``. It does not block.

        Args:
          state: The state before the step. Its arrays must be owned (``HeldState.adopt``).
          batch: One of the batches of the step. Arrays that are split over the replicas are not read.
          sums: The combined arrays of each round, from ``sums`` of this process or of another one.

        Returns:
          The outputs.
        """
        programs = self._programs
        # The program may still run when the owner of the batch writes the next one into its memory.
        leaves = [
            None
            if layout.is_split
            else leaf
            if isinstance(leaf, jax.Array)
            else memory.copy(layout.rows_of(leaf, 0))
            for layout, leaf in zip(self._layouts, batch.leaves, strict=True)
        ]
        with state_lock:
            slots = programs.slots([*self._consts, *state.values(), *leaves])
            compiled, operands = programs.finishing(slots, sums)
            del slots
            _, outputs = run_and_store(
                compiled, operands, lambda results: state.store(self.written, results[0])
            )
        return self._outputs_tree.unflatten(outputs)


def _without_rounds(jaxpr: Any) -> RoundsOfSums:
    """Returns the program of the whole batch, which has no rounds."""
    inputs = list(range(len(jaxpr.invars)))
    outputs = [len(inputs) + i for i in range(len(jaxpr.outvars))]
    whole = Computation(inputs, outputs, lambda args: evaluate_gathering(jaxpr, args))
    return RoundsOfSums(inputs, {}, [whole], [], outputs)
