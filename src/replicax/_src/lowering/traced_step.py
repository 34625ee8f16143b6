"""The trace of a step of a loop: its program for a global batch, and the arrays of the state that it changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.batch import BatchLayout, DatasetBatch
from replicax._src.lowering.held_state import HeldState
from replicax._src.tracing.row_partitioner.row_layouts import RowSplit
from replicax._src.user.listening import listener

Step = Callable[[Any, Any], tuple[Any, Any]]
"""Maps the state and a batch to the outputs and the new state, which has the structure of the state."""


@final
class TracedStep:
    """A step as a program: (constants, state, batch) to (new values of the arrays that it changes, outputs).

    Args:
      step: The step.
      name: The name of the step for messages.
      state: The state that the step will take.
      batch: A batch like those that it will take.
      split: The rows of the batch that each replica has.
      topology: The devices that the program is for.

    Attributes:
      layouts: The layout of each array of the batch.
      jaxpr: The program.
      consts: The constants.
      outputs_tree: The structure of the outputs.
      num_state: The number of arrays in the state.
      written: The positions of the arrays of the state that it changes.
      read: The positions of the others.
      repeated: The positions of new values that are also earlier ones.
    """

    def __init__(
        self,
        step: Step,
        name: str,
        state: HeldState,
        batch: DatasetBatch,
        split: RowSplit,
        topology: Topology,
    ):
        self.outputs_tree: Any = None
        self.layouts = [BatchLayout(leaf, batch, split, topology) for leaf in batch.leaves]
        jaxpr, consts = self._trace(step, state, [layout.aval for layout in self.layouts], batch.tree)
        listener().lowering(jaxpr, topology, name)
        self.consts = list(consts)
        self.num_state = sum(state.sizes)
        invars = jaxpr.invars[len(consts) : len(consts) + self.num_state]
        new = jaxpr.outvars[: self.num_state]
        self.written = [i for i, (old, var) in enumerate(zip(invars, new, strict=True)) if var is not old]
        self.read = [i for i in range(self.num_state) if i not in set(self.written)]
        # State that does not change need not be an output.
        outs = [new[i] for i in self.written] + list(jaxpr.outvars[self.num_state :])
        self.jaxpr = jax_compat.rebuild(jaxpr, outvars=outs)
        # Two outputs may be one value and share one buffer, which cannot be donated twice.
        self.repeated = [i for i, var in enumerate(outs[: len(self.written)]) if var in outs[:i]]

    def _trace(self, step: Step, held: HeldState, batch_avals: Sequence[Any], tree: Any) -> Any:
        sizes = held.sizes

        def flat(state: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
            remaining = iter(state)
            groups = tuple([next(remaining) for _ in range(size)] for size in sizes)
            outputs, new = step(groups, tree.unflatten(leaves))
            outputs, self.outputs_tree = jax.tree_util.tree_flatten(outputs)
            new = list(itertools.chain.from_iterable(new))
            # A weakly typed value would cause a recompilation when it is the next input.
            new = [
                value if value is old else jax.lax.convert_element_type(value, old.dtype)
                for value, old in zip(new, state, strict=True)
            ]
            return [*new, *map(jnp.asarray, outputs)]

        avals = [
            jax_compat.shaped(shape, value.dtype)
            for shape, value in zip(held.shapes, held.values(), strict=True)
        ]
        return jax_compat.trace(flat, (avals, list(batch_avals)))
