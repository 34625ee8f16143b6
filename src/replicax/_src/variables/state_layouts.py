"""How divided variables lie over the replicas' devices: the rule of ``state_shards``, as shardings."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import NamedSharding

from replicax._src.topology import Topology
from replicax._src.variables.state_shards import StateShards

# On TPUs arrays are laid out in tiles of 8 rows: thinner pieces would be padded to that.
_LEAST_ROWS_ON_TPU = 8

# The variables that optimizers keep, by id: entries go with them.
_of_optimizers: set[int] = set()


def note_of_optimizer(variable: Any) -> None:
    """Remembers that a variable is one that an optimizer keeps."""
    _of_optimizers.add(id(variable))
    weakref.finalize(variable, _of_optimizers.discard, id(variable))


def is_of_optimizer(variable: Any) -> bool:
    """Whether a variable is one that an optimizer keeps."""
    return id(variable) in _of_optimizers


@final
class StateLayouts:
    """The layouts of one strategy's variables.

    Attributes:
      shards: What is divided, and into how many pieces.
      topology: Over which devices.
    """

    def __init__(self, shards: StateShards, topology: Topology):
        self.shards, self.topology = shards, topology
        self._least_rows = _LEAST_ROWS_ON_TPU if topology.devices[0].platform == "tpu" else 1
        self._of_shapes: dict[tuple[int, ...], NamedSharding | None] = {}

    def of(self, variable: Any) -> NamedSharding | None:
        """Where the pieces of a variable are; None: every device holds all of it."""
        is_trainable = bool(variable.trainable)
        if not self.shards.divides(is_trainable=is_trainable, is_of_optimizer=is_of_optimizer(variable)):
            return None
        return self.of_shape(variable.shape)

    def of_shape(self, shape: Sequence[int]) -> NamedSharding | None:
        """Where the pieces of a divided array are, such as a gradient; None: it stays whole."""
        shape = tuple(shape)
        if shape not in self._of_shapes:
            dim = self.shards.dim_of(shape, least_rows=self._least_rows)
            count = self.shards.num_shards
            self._of_shapes[shape] = None if dim is None else self.topology.in_shards(dim, count)
        return self._of_shapes[shape]

    def in_pieces(self, value: Any) -> Any:
        """A traced array, to be computed with in the pieces in which a divided one of its shape lies."""
        layout = self.of_shape(value.shape)
        return value if layout is None else jax.lax.with_sharding_constraint(value, layout)
