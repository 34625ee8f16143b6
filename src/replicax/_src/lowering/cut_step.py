"""A step of a global batch on the devices of all processes, cut at its rounds of sums.

None of its programs communicates: between them the processes add the arrays of a round on their hosts
(``devices/sums_of_processes.py``). ``global_view.py`` chooses between this and one program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from replicax._src.devices.sums_of_processes import SumsOfProcesses
from replicax._src.devices.topology import Topology
from replicax._src.lowering.cut_programs import CutPrograms
from replicax._src.lowering.held_state import HeldState
from replicax._src.lowering.round_programs import ReplicaOperand, RoundPrograms
from replicax._src.lowering.spmd import run_and_store
from replicax._src.tracing.bindings import state_lock
from replicax._src.tracing.row_partitioner.row_plan import RowsPlan


@final
class CutStep:
    """The programs of a step.

    Args:
      plan: The step, split by rows.
      name: The name of the step for messages.
      topology: The devices of all processes.
      sums: The sums of the processes.
      avals: The constants, the arrays of the state, and those of the batch, as they are on all devices.
      split: The positions of those whose rows are split over the replicas.
      num_consts: The number of constants.
      written: The positions of the arrays of the state that it changes.
      finish: Maps the results to the new values of these arrays and the outputs, in a trace.
      donates: True if the last program overwrites the memory of the arrays that it changes.
    """

    def __init__(
        self,
        plan: RowsPlan,
        name: str,
        topology: Topology,
        sums: SumsOfProcesses,
        avals: Sequence[Any],
        *,
        split: Sequence[int],
        num_consts: int,
        written: Sequence[int],
        finish: Callable[[list[Any]], Any],
        donates: bool,
    ):
        self._written = written
        programs = RoundPrograms(
            plan.in_rounds(),
            avals,
            name,
            topology,
            topology.num_replicas,
            ReplicaOperand(),
            donated=[num_consts + i for i in written],
            donates=donates,
            finish=finish,
            split=split,
        )
        self._programs = CutPrograms(programs, name, sums)

    def run(self, consts: Sequence[Any], state: HeldState, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the step and leaves the new state in ``state``. Returns the outputs.

        Args:
          consts: The constants.
          state: The state before the step.
          leaves: The arrays of the batch, on all devices.

        Raises:
          ClusterFailureError: Another process is gone.
        """
        with state_lock:  # first, as all programs do: ``followed`` takes the lock of the processes' sequence
            operands = [*consts, *state.values(), *leaves]
            with self._programs.followed(operands) as (compiled, args):
                del operands
                _, outputs = run_and_store(
                    compiled, args, lambda results: state.store(self._written, results[0])
                )
        return outputs
