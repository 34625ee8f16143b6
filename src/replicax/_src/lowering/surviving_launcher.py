"""``SurvivingLauncher``: a replica function on live workers, for which ``surviving_program.py`` makes programs of one
process. On the devices of all replicas, ``spmd.Launcher`` takes its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.devices.live_workers import not_for_survivors
from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.spmd import ProgramState, replica_body
from replicax._src.lowering.surviving_program import SurvivingProgram
from replicax._src.scope.any_placement import Placement
from replicax._src.tracing.bindings import Binding, SyncPolicy
from replicax._src.tracing.program import ReplicaProgram
from replicax._src.tracing.replica_rounds import replicas_p


@final
class SurvivingLauncher:
    """A compiled replica function with the state that it reads and writes, like ``spmd.Launcher``.

    Args:
      program, name, placement, is_row, rows_of_replica: See ``spmd.Launcher``.
      donated: Has no effect: the memory of an argument is needed until the run can no longer fail.
      compiler_options, check: Not supported.

    Raises:
      UnsupportedError: An option is not supported, or replicas keep parts of a sum.
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
        del donated
        if compiler_options:
            raise not_for_survivors("RunOptions(experimental_xla_options=...)")
        if check is not None:
            raise not_for_survivors("RunOptions(check_finite=True)")
        topology = placement.topology
        self.program, self.check = program, check
        self._topology, self._rows_of_replica, self._is_row = topology, rows_of_replica, list(is_row)
        written = [program.bindings[i] for i in program.written]
        self.state = ProgramState(program.bindings, written, placement, name)
        self.consts = [topology.put_whole(v.consts) for v in program.variants]
        self._program = SurvivingProgram(
            self.placed, name, self.state, topology, donates=not program.has_callbacks
        )

    @property
    def state_bindings(self) -> tuple[list[Binding], list[Binding]]:
        """The bindings written and those only read, in the order in which ``placed`` takes them."""
        return self.state.written.bindings, self.state.read.bindings

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the function once. Returns the array outputs.

        Args:
          args: The arrays: [R, ...] where ``is_row``.
        """
        return self._program(self.consts, [], list(args), num_rows=self._num_rows(args))

    def _num_rows(self, args: Sequence[Any]) -> int | None:
        if self._rows_of_replica is not None:
            return sum(self._rows_of_replica)
        shapes = [arg.shape for arg, row in zip(args, self._is_row, strict=True) if row and arg.ndim > 1]
        return shapes[0][0] * shapes[0][1] if shapes else None

    def placed(
        self,
        written: Sequence[Any],
        read: Sequence[Any],
        consts: Any,
        given: Sequence[Any],
        kept: Sequence[Any],
    ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Evaluates the function for all replicas in a trace, like ``spmd.Launcher.placed``.

        Returns:
          The new written state, the sums that SUMMED variables show, the array outputs, and no token.
        """
        operands, tree = jax.tree_util.tree_flatten((written, read, consts, [*given, *kept]))
        operands = list(map(jnp.asarray, operands))
        avals = [jax_compat.shaped(each.shape, each.dtype) for each in operands]
        jaxpr, more = jax_compat.trace(
            lambda *values: self._of_one_replica(*tree.unflatten(values)), avals, self._topology.axes
        )
        results = replicas_p.bind(*more, *operands, jaxpr=jaxpr)
        num_written = len(self.state.written.bindings)
        num_states = num_written + len(self._summed)
        return results[:num_written], results[num_written:num_states], results[num_states:], []

    @property
    def _summed(self) -> list[Binding]:
        return [s for s in self.state.written.bindings if s.sync_policy is SyncPolicy.SUMMED]

    def _of_one_replica(
        self, written: Sequence[Any], read: Sequence[Any], consts: Any, args: Sequence[Any]
    ) -> list[Any]:
        """Computes the results in a trace of one replica. Those that differ between replicas become rows of all."""
        program = self.program
        index = jax.lax.axis_index(REPLICA_AXIS)

        def own(value: Any, is_row: bool) -> Any:
            return jax.lax.dynamic_index_in_dim(value, index, keepdims=False) if is_row else value

        def of_all(value: Any, is_row: bool) -> Any:
            if not is_row:
                return value
            return jax_compat.on_words(
                lambda words: jax.lax.all_gather(words, REPLICA_AXIS), jnp.asarray(value)
            )

        state = {
            id(s): own(value, s.sync_policy.is_per_replica)
            for s, value in zip(self.state.bindings, itertools.chain(written, read), strict=True)
        }
        body = replica_body(program, self._topology, self._rows_of_replica)
        outs, writes, sums = body(
            consts, [state[id(s)] for s in program.bindings], list(map(own, args, self._is_row))
        )
        bindings = [program.bindings[i] for i in program.written]
        new = {id(s): value for s, value in zip(bindings, writes, strict=True)}
        summed = [s for s in bindings if s.sync_policy is SyncPolicy.SUMMED]
        totals = {id(s): total for s, total in zip(summed, sums, strict=True)}
        return [
            *(of_all(new[id(s)], s.sync_policy.is_per_replica) for s in self.state.written.bindings),
            *(totals[id(s)] for s in self._summed),
            *(of_all(out, not same) for out, same in zip(outs, program.same_outputs, strict=True)),
        ]
