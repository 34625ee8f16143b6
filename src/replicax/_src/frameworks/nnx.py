"""Support for flax nnx modules: arguments of ``run`` become arrays and are updated after it; checkpoints save them.

Splitting and updating cost a few hundred µs per step. State that is split once, outside of the loop, costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from replicax._src import context, jax_compat
from replicax._src.checkpoint.arrays import ArrayLeaf, Held, HostParts, Source
from replicax._src.checkpoint.tracked import Leaf, Parts, escaped
from replicax._src.errors import DivergenceError
from replicax._src.framework import Framework, Modules, Tracking, use
from replicax._src.tracing.capture import current_capture
from replicax._src.values import DistributedValues, PerReplica


@jax.tree_util.register_static
class _Definition:
    """The structure of the modules: a constant of the program."""

    def __init__(self, graph: Any):
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Definition) and self.graph == other.graph

    def __hash__(self) -> int:
        return hash(self.graph)


@jax.tree_util.register_static
class _Place:
    """The place of a module among the arguments."""

    def __init__(self, index: int):
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self.index == other.index

    def __hash__(self) -> int:
        return hash(self.index)


def install() -> None:
    """Makes ``run`` accept nnx modules and checkpoints save them. A second call does nothing."""
    use(NNX)


def _is_module(value: Any) -> bool:
    return isinstance(value, (nnx.Module, nnx.Optimizer, nnx.Rngs))


def _is_leaf(value: Any) -> bool:
    return _is_module(value) or isinstance(value, DistributedValues)


def _open(pytree: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Replaces modules in the arguments by their state. The second result writes the new state back."""
    leaves, tree = jax.tree_util.tree_flatten(pytree, is_leaf=_is_leaf)
    places = [i for i, leaf in enumerate(leaves) if _is_module(leaf)]
    if not places:
        return None
    modules = tuple(leaves[i] for i in places)
    graph, state = nnx.split(modules)
    for number, place in enumerate(places):
        leaves[place] = _Place(number)
    rest = jax.tree_util.tree_unflatten(tree, leaves)
    # A plain dict has one array object for each variable, because an nnx.State cannot contain PerReplica leaves.
    found = jax.tree_util.tree_flatten_with_path(state)[0]
    flat = OrderedDict((jax.tree_util.keystr(path), leaf) for path, leaf in found)
    structure = jax.tree_util.tree_structure(state)

    def close(result: Any) -> Any:
        returned, new = result
        arrays = [_single(value, path) for value, path in zip(new, flat, strict=True)]
        nnx.update(modules, jax.tree_util.tree_unflatten(structure, arrays))
        return returned

    return (_Definition(graph), _Definition(structure), rest, flat), close


def _single(value: Any, path: str) -> Any:
    """Returns the one array of a value that is proven to be the same on all replicas.

    Raises:
      DivergenceError: The value may differ between replicas.
    """
    if isinstance(value, PerReplica):
        if not value.is_equal:
            raise DivergenceError(
                f"The state {path} of an nnx module differs (or may differ) between replicas after run: its copies would "
                f"fall out of sync, and the module was left as it was. Sum gradients over replicas first: put "
                f"rx.optax.aggregate_gradients() first in the optax chain of nnx.Optimizer, or all_reduce them."
            )
        return value.as_array()
    return value


def _enter(opened: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Makes modules from traced state, inside the function. The second result adds their new state to its results."""
    definition, structure, rest, named = opened
    flat = list(named.values())
    state = jax.tree_util.tree_unflatten(structure.graph, flat)
    types = _variable_types(state)
    communicator = _communicator()
    entered = [_stream(value, kind, communicator) for value, kind in zip(flat, types, strict=True)]
    modules = nnx.merge(definition.graph, jax.tree_util.tree_unflatten(structure.graph, entered))
    pytree = jax.tree_util.tree_map(
        lambda leaf: modules[leaf.index] if isinstance(leaf, _Place) else leaf,
        rest,
        is_leaf=lambda leaf: isinstance(leaf, (_Place, DistributedValues)),
    )

    def finish(result: Any) -> Any:
        new = jax.tree_util.tree_leaves(nnx.state(modules))
        shared = [
            _shared(value, old, kind, communicator) for value, old, kind in zip(new, flat, types, strict=True)
        ]
        return result, shared

    return pytree, finish


def _variable_types(state: Any) -> list[type]:
    found: list[type] = []
    for leaf in jax.tree_util.tree_leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        kind = type(leaf) if isinstance(leaf, nnx.Variable) else object
        found += [kind] * len(jax.tree_util.tree_leaves(leaf))
    return found


def _communicator() -> Any:
    replica = context.get_replica_context()
    assert replica is not None
    return replica.communicator


def _stream(value: Any, kind: type, communicator: Any) -> Any:
    """Returns the random keys of this replica. Replica 0 has the module's own keys."""
    if not issubclass(kind, nnx.RngKey) or communicator.num_replicas == 1:
        return value
    index = communicator.replica_id()
    own = jax.random.fold_in(value, index)
    return jax.lax.cond(index == 0, lambda: value, lambda: own)


def _shared(value: Any, old: Any, kind: type, communicator: Any) -> Any:
    """Returns the shared state: random keys unchanged, and moving statistics averaged over rows."""
    if communicator.num_replicas == 1:
        return value
    if issubclass(kind, nnx.RngKey):
        return old
    if issubclass(kind, nnx.BatchStat) and jnp.issubdtype(value.dtype, jnp.inexact):
        capture = current_capture()
        rows = capture.uneven.rows if capture is not None and capture.uneven is not None else 1
        weight = jnp.full((), rows, jnp.float32)
        weighed = jnp.where(weight > 0, value * weight.astype(value.dtype), 0)
        total, count = communicator.sum([weighed, weight])
        return (total / count).astype(value.dtype)
    return value


# --- in checkpoints -----------------------------------------------------------------------------------


@final
class _SavedVariable(ArrayLeaf):
    def __init__(self, variable: Any):
        self.of, self.label = variable, type(variable).__name__
        value = variable.get_value()
        self._is_key = jax_compat.is_typed_key(getattr(value, "dtype", None))
        self._impl = jax.random.key_impl(value) if self._is_key else None
        self._array = jax.random.key_data(value) if self._is_key else jnp.asarray(value)
        self.shape, self.dtype = tuple(self._array.shape), np.dtype(self._array.dtype)

    def held(self) -> Held:
        return Held(self._array)

    def fetch(self, source: Source) -> HostParts:
        return HostParts.like(self._array, source.read)

    def give(self, fetched: HostParts) -> None:
        placed = fetched.placed()
        self.of.set_value(jax.random.wrap_key_data(placed, impl=self._impl) if self._is_key else placed)


def _walk(tracked: Any) -> Leaf | Parts | None:
    """Returns a module's variables by path, with random keys as arrays of their data."""
    if isinstance(tracked, nnx.Variable):
        return _SavedVariable(tracked)
    if not _is_module(tracked):
        return None
    found = ((path, value) for path, value in nnx.iter_graph(tracked) if isinstance(value, nnx.Variable))
    return {"/".join(escaped(str(name)) for name in path): variable for path, variable in found}


NNX: Final = Framework(
    "flax.nnx", modules=Modules(open=_open, enter=_enter), tracking=Tracking(parts_of=_walk)
)
