"""Support for flax nnx modules: arguments of ``run`` become arrays and are updated after it; checkpoints save them.

A module keeps one array on one device for each variable. If it comes back unchanged, a step takes the replicated array
of the last step's result instead (``values.local_views``), so that nothing is copied between devices.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from replicax._src.checkpoint.array_leaves import ArrayLeaf, Held, HostParts, ValueReader
from replicax._src.checkpoint.tracked import Leaf, Parts, escaped
from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.tracing.capture import current_capture
from replicax._src.values.distributed import DistributedValues, PerReplica, local_views
from replicax._src.values.framework import Framework, Modules, Tracking, use
from replicax._src.vocabulary.errors import DivergenceError


@jax.tree_util.register_static
class _Definition:
    """The structure of the modules: a constant of the program."""

    def __init__(self, graph: Any):
        self.graph, self._hash = graph, hash(graph)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Definition) and self.graph == other.graph)

    def __hash__(self) -> int:
        return self._hash


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
    for number, place in enumerate(places):
        leaves[place] = _Place(number)
    rest = jax.tree_util.tree_unflatten(tree, leaves)
    split, arrays, variables = _splits.of(modules)
    # A plain dict has one array object for each variable, because an nnx.State cannot contain PerReplica leaves.
    flat = OrderedDict(zip(split.paths, arrays, strict=True))

    def close(result: Any) -> Any:
        returned, new = result
        for value, path in zip(new, split.paths, strict=True):
            _check_is_equal(value, path)
        arrays = local_views.views_of(modules, new)
        if variables is None:
            nnx.update(modules, jax.tree_util.tree_unflatten(split.structure.graph, arrays))
        else:
            for variable, array in zip(variables, arrays, strict=True):
                # As ``nnx.update`` does: the check of traces takes as long as all else here (flax 0.12).
                variable.set_raw_value(array, _unsafe_bypass_check=True)
        return returned

    return (split.definition, split.structure, rest, flat), close


# --- nnx.split, once for each structure -----------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Split:
    """The result of ``nnx.split``, without arrays.

    Attributes:
      definition: The graph.
      structure: The structure of the state.
      paths: The names of the state's arrays.
      order: The number of the variable that holds each of them, in the order of ``_Walk``; None if unknown.
      compared: See ``_Walk``.
    """

    definition: _Definition
    structure: _Definition
    paths: tuple[str, ...]
    order: tuple[int, ...] | None
    compared: Sequence[Any]


class _UnknownPartError(Exception):
    """A module has a part whose meaning for ``nnx.split`` is unknown here. It never leaves this file."""


@final
class _Walk:
    """The structure of modules: all that decides the result of ``nnx.split`` except arrays.

    ``nnx.split`` and ``nnx.update`` take 2 ms for 66 arrays (flax 0.12), this a tenth.

    Attributes:
      parts: The types, names and static values, hashable.
      variables: The variables, each once.
      compared: The mappings that ``parts`` holds as ids. They must live as long as ``parts`` is used.

    Raises:
      _UnknownPartError: A part is neither a module, a variable of one array, a list, tuple or dict, nor static.
    """

    def __init__(self, modules: Sequence[Any]):
        self.parts: list[Any] = []
        self.variables: list[Any] = []
        self.compared: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._visit(modules)

    def _visit(self, members: Iterable[Any]) -> None:
        parts, numbers = self.parts, self._numbers
        for part in members:
            cls = type(part)
            kind = _kinds.get(cls) or _kinds.of(part)
            parts.append(cls)
            if kind == "static":
                parts.append(part)
                continue
            if kind == "variable" or kind == "module":
                known = numbers.get(id(part))
                parts.append(known)
                if known is not None:
                    continue
                numbers[id(part)] = len(numbers)
            if kind == "variable":
                if not _is_array(type(part.get_raw_value())):
                    raise _UnknownPartError
                parts.append(tuple(part.get_metadata().items()))
                self.variables.append(part)
            elif kind == "module" or kind == "mapping":
                named = vars(part) if kind == "module" else part
                parts.append(tuple(named))
                self._visit(named.values())
            elif kind == "sequence":
                parts.append(len(part))
                self._visit(part)
            elif kind == "constant_mapping":
                parts.append(id(part))  # nnx has one in each module, and takes long to compute its hash
                self.compared.append(part)
            else:
                leaves, tree = jax.tree_util.tree_flatten(part)
                if leaves:
                    raise _UnknownPartError
                parts.append(tree)


@functools.lru_cache(maxsize=512)
def _is_array(cls: type) -> bool:
    return issubclass(cls, (jax.Array, np.ndarray))


_CLASSES: Final = (
    ("variable", nnx.Variable),
    ("module", nnx.Pytree),
    ("sequence", (list, tuple)),
    ("mapping", (dict, nnx.State)),
    ("other", (jax.Array, np.ndarray)),
)


class _Kinds(dict[type, str]):
    """The kind of object that ``nnx.split`` takes each class for."""

    def of(self, part: Any) -> str:
        cls = type(part)
        kind = next((kind for kind, classes in _CLASSES if issubclass(cls, classes)), None)
        if kind is None and issubclass(cls, Mapping) and cls.__hash__ is not None:
            kind = "constant_mapping"
        if kind is None:
            kind = "static" if part is None or jax.tree_util.all_leaves([part]) else "other"
        self[cls] = kind
        return kind


_kinds: Final = _Kinds()


@final
class _Splits:
    """The results of ``nnx.split`` for the structures that were met."""

    _MOST = 64

    def __init__(self) -> None:
        self._known: dict[Any, _Split] = {}

    def of(self, modules: Any) -> tuple[_Split, list[Any], list[Any] | None]:
        """Returns the split of modules, the arrays, and the variables that hold them (None if they are unknown)."""
        try:
            walk = _Walk(modules)
            structure = tuple(walk.parts)
            split = self._known.get(structure)
        except (_UnknownPartError, TypeError, AttributeError):
            # A TypeError: a static value has no hash. An AttributeError: flax 0.12.0 has no ``get_raw_value``.
            return *_split(modules), None
        if split is None:
            split, arrays = _split(modules, walk)
            if split.order is None:
                return split, arrays, None
            if len(self._known) >= self._MOST:
                self._known.clear()
            self._known[structure] = split
        assert split.order is not None
        variables = [walk.variables[i] for i in split.order]
        return split, [variable.get_raw_value() for variable in variables], variables


_splits: Final = _Splits()


def _split(modules: Any, walk: _Walk | None = None) -> tuple[_Split, list[Any]]:
    variables = [] if walk is None else walk.variables
    graph, state = nnx.split(modules)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    paths = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
    arrays = [array for _, array in leaves]
    numbers = {id(variable.get_raw_value()): i for i, variable in enumerate(variables)}
    is_known = len(numbers) == len(variables) == len(arrays) and all(id(array) in numbers for array in arrays)
    order = tuple(numbers[id(array)] for array in arrays) if is_known else None
    structure = jax.tree_util.tree_structure(state)
    compared = () if walk is None else walk.compared
    return _Split(_Definition(graph), _Definition(structure), paths, order, compared), arrays


def _check_is_equal(value: Any, path: str) -> None:
    """Checks that a value is proven to be the same on all replicas.

    Raises:
      DivergenceError: The value may differ between replicas.
    """
    if isinstance(value, PerReplica) and not value.is_equal:
        raise DivergenceError(
            f"The state {path} of an nnx module differs (or may differ) between replicas after run: its copies would "
            f"fall out of sync, and the module was left as it was. Sum gradients over replicas first: put "
            f"rx.optax.aggregate_gradients() first in the optax chain of nnx.Optimizer, or all_reduce them."
        )


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

    def fetch(self, source: ValueReader) -> HostParts:
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
