"""A program of all replicas on live workers, which finish its run when one of them dies.

It becomes programs of one device, with sums between them (``tracing/replica_rounds.py``), which a process runs for each
of its replicas and for those that it adopts. All processes have the operands and the results of all replicas, and the
same state. Only the last program changes the state, when all sums are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.cluster.counters import counters
from replicax._src.devices.live_workers import not_for_survivors
from replicax._src.devices.topology import Topology
from replicax._src.fault_tolerance.first_step import StepDigests, digests_of
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.local_programs import CombineRound, RoundArrays
from replicax._src.lowering.round_programs import ReplicaOperand, RoundPrograms
from replicax._src.lowering.spmd import ProgramState, StatePrograms, note_nan, run_and_store
from replicax._src.tracing import profile_names as names
from replicax._src.tracing.bindings import SyncPolicy, state_lock
from replicax._src.tracing.outer_trace import called_in_trace
from replicax._src.tracing.replica_rounds import UncutError, cut_at_sums


@final
class SurvivingProgram:
    """A program, compiled when it first runs.

    Args:
      function: Maps the written state, the read state and the operands to the new state, the sums that SUMMED variables
        show, and the results. What replicas do, each on its own, is in ``replicas_p``.
      name: The name of the program for messages.
      state: Its variables.
      topology: That of the survivors.
      donates: True if it may overwrite the memory of the state.

    Raises:
      UnsupportedError: A variable has a part of a sum in each replica.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        state: ProgramState,
        topology: Topology,
        *,
        donates: bool,
    ):
        for binding in state.bindings:
            if binding.sync_policy is SyncPolicy.PARTS:
                raise not_for_survivors(f"Variable {binding.name!r}, of which each replica keeps a part,")
        assert topology.survivors is not None
        assert topology.peers is not None
        self._function, self._name, self._state, self._topology = function, name, state, topology
        self._survivors, self._peers = topology.survivors, topology.peers
        self._donates = donates
        self._is_training = any(binding.variable.trainable for binding in state.written.bindings)
        self._programs: StatePrograms | None = None
        self._agreed: _Compiled | None = None

    # --- making the programs --------------------------------------------------------------------------

    def _compile(self, donates: bool, operands: Sequence[Any]) -> _Compiled:
        topology, bindings = self._topology, self._state.written.bindings
        written, read = self._state.described(topology)
        leaves, tree = jax.tree_util.tree_flatten((written, read, *operands))
        num_written = len(bindings)
        num_states = num_written + sum(s.sync_policy is SyncPolicy.SUMMED for s in bindings)

        def flat(*values: Any) -> list[Any]:
            writes, sums, outs, *_ = self._function(*tree.unflatten(values))
            return [*writes, *sums, *outs]

        avals = [jax_compat.shaped(leaf.shape, leaf.dtype) for leaf in leaves]
        jaxpr, consts = jax_compat.trace(flat, avals)
        consts = topology.put_whole(consts)
        replica = ReplicaOperand()
        try:
            rounds = cut_at_sums(jaxpr, replica, topology.num_replicas)
        except UncutError as reason:
            raise not_for_survivors(f"{self._name}: {reason}") from None
        # Neither may an array be of two variables, nor may a result be the memory of an operand.
        is_shared = [
            atom in rounds.inputs or atom in rounds.outputs[:i] for i, atom in enumerate(rounds.outputs)
        ]

        def finish(values: list[Any]) -> Any:
            results = [
                jnp.copy(value) if shared else jnp.asarray(value)
                for value, shared in zip(values, is_shared, strict=True)
            ]
            return results[:num_written], results[num_written:num_states], results[num_states:]

        programs = RoundPrograms(
            rounds,
            [*map(jax_compat.abstractify, consts), *avals],
            self._name,
            topology,
            topology.num_replicas,
            replica,
            donated=range(len(consts), len(consts) + num_written),
            donates=donates,
            finish=finish,
        )
        return _Compiled(programs, consts)

    # --- running them ---------------------------------------------------------------------------------

    def __call__(self, *operands: Any, num_rows: int | None = None) -> list[Any]:
        """Runs the program once, until its sums are here. Returns the results.

        Args:
          operands: Pytrees of arrays, of the same shapes in each call.
          num_rows: The number of rows of the batch, for the log.
        """
        if not jax_compat.is_evaluating():
            raise called_in_trace("strategy.run (or an rx.function)")
        counters.num_runs += 1
        if self._is_training:
            StatePrograms.note_training_step()
        if self._programs is None:
            self._programs = StatePrograms(lambda donates: self._compile(donates, operands), self._donates)
        with state_lock:
            self._state.load(for_donation=False)  # here all compare the values that the user's code has set
        compiled, donates = self._programs.form()
        if compiled is not self._agreed:
            self._peers.agree(self._name, compiled.programs.digest)
            self._agreed = compiled
        run = _Run(compiled, self._state, jax.tree_util.tree_leaves(operands), donates, num_rows)
        try:
            with names.launching(self._name, self._topology), self._peers.stepping(self._name):
                return self._survivors.run(run, f"to run {self._name}")
        except FloatingPointError as error:
            note_nan(error)
            raise


@final
class _Compiled:
    """The programs of one process, and their first operands, which are constant."""

    def __init__(self, programs: RoundPrograms, consts: Sequence[Any]):
        self.programs, self.consts = programs, consts
        self.reductions = [[buffer.reduction for buffer in buffers] for buffers in programs.rounds]


@final
class _Run:
    """One run, a ``SteppedProgram``. It keeps the operands until its sums are here."""

    def __init__(
        self,
        compiled: _Compiled,
        state: ProgramState,
        operands: Sequence[Any],
        donates: bool,
        num_rows: int | None,
    ):
        self._compiled, self._state, self._donates = compiled, state, donates
        self._given = operands
        self.reductions, self.num_rows = compiled.reductions, num_rows

    def digests(self) -> StepDigests:
        """Returns digests of the code, the variables and the operands, of which some are the batch."""
        with state_lock:
            written, read = self._state.load(for_donation=False)
        consts = self._compiled.consts
        names = [f"captured array {i}" for i in range(len(consts))]
        return StepDigests(
            self._compiled.programs.digest,
            digests_of(
                [*names, *(binding.name for binding in self._state.bindings)], [*consts, *written, *read]
            ),
            digests_of([f"argument {i}" for i in range(len(self._given))], self._given),
        )

    def sums(self, replicas: Sequence[int], combine: CombineRound) -> list[RoundArrays]:
        """Returns the sums of all rounds. It changes nothing."""
        programs = self._compiled.programs
        with state_lock:
            operands = self._operands(for_donation=False)
        slots_of = [programs.slots(operands) for _ in replicas]
        return programs.run_rounds(replicas, slots_of, combine)

    def update(self, sums: Sequence[RoundArrays]) -> list[Any]:
        """Stores the new state. Returns the results."""
        programs = self._compiled.programs
        with state_lock:
            slots = programs.slots(self._operands(for_donation=self._donates))
            compiled, operands = programs.finishing(slots, sums)
            del slots
            results = run_and_store(
                compiled, operands, lambda results: self._state.written.store(results[0], results[1])
            )
        return list(results[2])

    def _operands(self, *, for_donation: bool) -> list[Any]:
        written, read = self._state.load(for_donation=for_donation)
        return [*self._compiled.consts, *written, *read, *self._given]
