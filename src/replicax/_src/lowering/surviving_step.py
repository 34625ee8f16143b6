"""A step of a loop that the live workers finish when one of them dies.

Each process has its own programs (``local_programs.py``). ``survivors.run`` exchanges their sums and, after a death,
repeats the step with the same batch. ``step_on`` chooses between this and ``global_view.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from replicax._src.cluster.peers import Peers
from replicax._src.devices.live_workers import LiveWorkers, not_for_survivors
from replicax._src.devices.topology import Topology
from replicax._src.fault_tolerance.first_step import StepDigests
from replicax._src.fault_tolerance.stepped_program import CombineRound, RoundArrays
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.lowering.global_view import GlobalStep
from replicax._src.lowering.held_state import HeldState
from replicax._src.lowering.local_programs import LocalPrograms, LocalStep
from replicax._src.lowering.spmd import StatePrograms
from replicax._src.lowering.traced_step import Step
from replicax._src.tracing import profile_names as names


def step_on(
    topology: Topology, step: Step, name: str, *, donates: bool, gives_rows: bool
) -> GlobalStep | SurvivingStep:
    """Returns a step on the devices of a topology.

    Args:
      topology: The devices.
      step: The step, which is traced once for each form of batch and state.
      name: The name of the step for messages.
      donates: True if programs may overwrite the memory of the state that they change.
      gives_rows: True if its outputs have a row for each row of the batch. Then the outputs of all steps of a call are
        returned, not only of the last.
    """
    if topology.survivors is None:
        return GlobalStep(step, name, topology, donates=donates, keeps_all=gives_rows)
    assert topology.peers is not None
    return SurvivingStep(
        step, name, topology, topology.peers, topology.survivors, donates=donates, gives_rows=gives_rows
    )


@final
class SurvivingStep:
    """A step with its programs, like ``GlobalStep``.

    Args:
      step, name, donates, gives_rows: See ``step_on``.
      topology: That of the survivors.
      peers: The processes, which compare their programs.
      survivors: The live workers.
    """

    def __init__(
        self,
        step: Step,
        name: str,
        topology: Topology,
        peers: Peers,
        survivors: LiveWorkers,
        *,
        donates: bool,
        gives_rows: bool,
    ):
        self._name, self._topology, self._peers, self._survivors = name, topology, peers, survivors
        self._may_donate = donates
        self._step = LocalStep(step, name, topology, topology.num_replicas, gives_rows=gives_rows)
        self._agreed: LocalPrograms | None = None

    def program(self, state: HeldState, batch: DatasetBatch, capacity: int) -> NoReturn:
        """Raises UnsupportedError: there is no single program to lower or plan."""
        raise not_for_survivors(
            f"A plan, or the lowered program, of {self._name} on the strategy's own devices"
        )

    def run(
        self,
        state: HeldState,
        batches: Sequence[DatasetBatch],
        capacity: int,
        prepare: Callable[[LocalPrograms], None],
    ) -> list[Any]:
        """Runs the step on batches of one form, one after the other, each until its sums are here. Returns the outputs.

        Args:
          state: The state, equal in all processes.
          batches: The global batches.
          capacity: Has no effect: a death can repeat one batch, not several.
          prepare: A function to call with the programs before they run.
        """
        del capacity
        return [self._run(state, batch, prepare) for batch in batches]

    def _run(self, state: HeldState, batch: DatasetBatch, prepare: Callable[[LocalPrograms], None]) -> Any:
        donates = self._may_donate and StatePrograms.keeper() is None
        programs = self._step.programs(state, batch, donates=donates)
        if programs is not self._agreed:
            self._peers.agree(self._name, programs.digest)
            self._agreed = programs
        prepare(programs)
        with names.launching(self._name, self._topology), self._peers.stepping(self._name):
            return self._survivors.run(_BatchStep(programs, state, batch), f"to run {self._name}")


@final
class _BatchStep:
    """The step of one batch, a ``SteppedProgram``. It keeps the batch until its sums are here."""

    def __init__(self, programs: LocalPrograms, state: HeldState, batch: DatasetBatch):
        self._programs, self._state, self._batch = programs, state, batch
        self.reductions = [[buffer.reduction for buffer in buffers] for buffers in programs.rounds]
        self.num_rows = batch.num_rows

    def digests(self) -> StepDigests:
        """Returns digests of the code, the state and the batch."""
        return self._programs.digests(self._state, self._batch)

    def sums(self, replicas: Sequence[int], combine: CombineRound) -> list[RoundArrays]:
        """Returns the sums of all rounds. It changes nothing."""
        return self._programs.sums(self._state, [self._batch] * len(replicas), replicas, combine)

    def update(self, sums: Sequence[RoundArrays]) -> Any:
        """Stores the new state. Returns the outputs."""
        return self._programs.update(self._state, self._batch, sums)
