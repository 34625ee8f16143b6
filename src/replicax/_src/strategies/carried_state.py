"""Functional state that the steps of one program pass on: converts it for the program and checks what steps return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices.topology import Topology
from replicax._src.tracing import key
from replicax._src.tracing.bindings import made_by_each
from replicax._src.tracing.cache import ArgumentLeaf, array_leaf
from replicax._src.values.distributed import DistributedValues, PerReplica, is_value
from replicax._src.values.narrowing import as_numpy, narrowed_pytree
from replicax._src.vocabulary.errors import InvalidArgumentError, MixedStrategiesError, StructureError


@dataclass(frozen=True)
class CarriedLeaf:
    """One array of the state, in the form that the steps see.

    Attributes:
      path: The name in messages.
      kind: "row" (one component per replica) or "whole" (replicated).
      shape, dtype: The shape and dtype of a component.
      maker: The maker of the value, if a step made it; see ``ResultWatch.maker_of``.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    maker: Any = None

    def described(self, num_replicas: int) -> ArgumentLeaf:
        """Returns the leaf as the program takes it."""
        is_row = self.kind == "row"
        return ArgumentLeaf("whole", (num_replicas, *self.shape) if is_row else self.shape, self.dtype)

    def value_of(self, array: jax.Array, num_replicas: int) -> jax.Array | PerReplica:
        """Returns the argument of ``strategy.run`` for an array of the program."""
        if num_replicas == 1:
            return array
        return PerReplica(array, num_replicas, is_equal=self.kind == "whole", maker=self.maker)

    def returned(self, value: Any, num_replicas: int) -> jax.Array | PerReplica:
        """Returns the value that a step returned for this leaf, in the form for the next step.

        Raises:
          StructureError: The value is not an array, or has another shape or dtype.
        """
        if isinstance(value, (bool, int, float, complex)):
            keeps_dtype = jnp.result_type(value, self.dtype) == self.dtype
            value = jnp.asarray(value, self.dtype if keeps_dtype else None)
        if not (isinstance(value, PerReplica) or key.is_array(value)):
            raise StructureError(
                f"{self.path} is an array, but the step returned {value!r} for it. Return state with the structure of the argument."
            )
        shapes = None if not isinstance(value, PerReplica) else value.shapes
        shape = value.component_shape(0) if isinstance(value, PerReplica) else tuple(value.shape)
        if shapes is not None or shape != self.shape or value.dtype != self.dtype:
            returned = f"shapes {list(shapes)}" if shapes is not None else f"{value.dtype}{list(shape)}"
            raise StructureError(
                f"{self.path} is {self.dtype}{list(self.shape)}, but the step returned {returned} for it. All steps are one program, "
                "so state keeps its shapes and dtypes: convert it in the step, such as by .astype."
            )
        is_whole = not isinstance(value, PerReplica) or value.is_equal
        if self.kind == "row" and is_whole:
            array = value.stored if isinstance(value, PerReplica) else value
            return PerReplica(jnp.broadcast_to(array, (num_replicas, *self.shape)), num_replicas)
        return value


@dataclass(frozen=True)
class StateForm:
    """The structure, shapes and dtypes of a state.

    Attributes:
      tree: The structure of the pytree; None if there is no state.
      leaves: The arrays of the state.
      num_replicas: The number of replicas R.
    """

    tree: Any
    leaves: tuple[CarriedLeaf, ...]
    num_replicas: int

    def described(self) -> list[ArgumentLeaf]:
        """Returns the leaves, as a program takes them."""
        return [leaf.described(self.num_replicas) for leaf in self.leaves]

    def state_of(self, arrays: Sequence[jax.Array]) -> Any:
        """Returns the pytree that a step takes."""
        values = [leaf.value_of(a, self.num_replicas) for leaf, a in zip(self.leaves, arrays, strict=True)]
        return self.tree.unflatten(values)

    def returned(self, result: Any) -> tuple[list[jax.Array | PerReplica], Any]:
        """Splits what a step returned into the leaves of its state and the rest.

        Raises:
          StructureError: The result is not a pair, or its state has another structure.
        """
        if not isinstance(result, tuple) or len(result) != 2:
            raise StructureError(
                f"With state, a step returns a pair (state, result), got {type(result).__name__}. Write `return state, None` if it "
                "has no result."
            )
        state, rest = result
        values, tree = jax.tree_util.tree_flatten(state, is_leaf=is_value)
        if tree != self.tree:
            raise StructureError(
                f"The step got a state of the structure {self.tree} and returned {tree}. Return state with the structure of the argument, first in the pair."
            )
        return [
            leaf.returned(v, self.num_replicas) for leaf, v in zip(self.leaves, values, strict=True)
        ], rest

    def joined(self, kinds: Sequence[str], makers: Sequence[Any]) -> StateForm:
        """Returns the form after a step. A leaf that varies between replicas after one step varies in all steps."""
        leaves = [
            CarriedLeaf(leaf.path, "row", leaf.shape, leaf.dtype, maker) if kind == "row" else leaf
            for leaf, kind, maker in zip(self.leaves, kinds, makers, strict=True)
        ]
        return StateForm(self.tree, tuple(leaves), self.num_replicas)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the leaves."""
        return tuple(leaf.kind for leaf in self.leaves)


NO_STATE = StateForm(None, (), 1)


def opened(state: Any, topology: Topology) -> tuple[StateForm, list[jax.Array]]:
    """Returns the form of a state, and its arrays on the devices of the program.

    Raises:
      InvalidArgumentError: A leaf is not an array or number, or its components have different shapes.
      MixedStrategiesError: A leaf belongs to a strategy with another number of replicas.
      NarrowingError: A number does not fit into the dtype that JAX gives its array.
    """
    num_replicas = topology.num_replicas
    found, tree = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_value)
    leaves, arrays = [], []
    for path, leaf in found:
        name = f"state{jax.tree_util.keystr(path)}"
        if isinstance(leaf, DistributedValues):
            kind, shape, array = _distributed(name, leaf, num_replicas)
        elif key.is_array(leaf) or isinstance(leaf, (bool, int, float, complex)):
            array = narrowed_pytree(as_numpy(leaf), name)
            if not isinstance(array, jax.Array):
                array = jnp.asarray(array)
            kind, shape = "whole", tuple(array.shape)
        else:
            raise InvalidArgumentError(
                f"{name} is {leaf!r}, and state is a pytree of arrays and numbers. Variables need no passing: a step reads and assigns "
                "them directly. Other objects belong in the function's closure."
            )
        leaves.append(CarriedLeaf(name, kind, shape, array_leaf(array).dtype))
        arrays.append(array)
    if topology.peers is not None:
        _agree(leaves, arrays, topology)
    arrays = [
        topology.put_rows(array) if leaf.kind == "row" else topology.put_whole(array)
        for leaf, array in zip(leaves, arrays, strict=True)
    ]
    return StateForm(tree, tuple(leaves), num_replicas), arrays


def _agree(leaves: Sequence[CarriedLeaf], arrays: list[jax.Array], topology: Topology) -> None:
    """Replaces arrays that each process made itself by values that all processes agree on."""
    made = {i: made_by_each(arrays[i]) for i, leaf in enumerate(leaves) if leaf.kind == "whole"}
    here = {i: array for i, array in made.items() if array is not None}
    if here:
        agreed = topology.put_agreed(list(here.values()), [leaves[i].path for i in here])
        for i, array in zip(here, agreed, strict=True):
            arrays[i] = array


def _distributed(name: str, value: Any, num_replicas: int) -> tuple[str, tuple[int, ...], jax.Array]:
    if value.num_replicas != num_replicas:
        raise MixedStrategiesError(
            f"{name} is a value of {value.num_replicas} replicas, and this strategy has {num_replicas}: another strategy made it."
        )
    array = value.array
    if not isinstance(value, PerReplica) or value.is_equal:
        return "whole", tuple(array.shape), array
    if value.shapes is not None:
        raise InvalidArgumentError(
            f"{name} has components of different shapes, {list(value.shapes)}. State keeps one shape: pad it."
        )
    return "row", tuple(array.shape[1:]), array
