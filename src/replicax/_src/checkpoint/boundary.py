"""The state of a program at a boundary: references to its arrays, and copies of its Python state.

Taking it must be cheap, because it happens after each step. So the graph of the tracked objects is walked only when it
may have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import jax
import numpy as np

from replicax._src.checkpoint import agreement
from replicax._src.checkpoint.array_leaves import ArrayLeaf, Held, VariableLeaf
from replicax._src.checkpoint.contents import Contents, SavedObject
from replicax._src.checkpoint.directory import later_time
from replicax._src.checkpoint.graph import Graph, Node, kind_of
from replicax._src.checkpoint.host_copy import copy_here, holds_all
from replicax._src.checkpoint.pytrees import HeldPytree
from replicax._src.checkpoint.tracked import Growing, Leaf, escaped
from replicax._src.checkpoint.trees import HeldTree, StateLeaf
from replicax._src.checkpoint.writing import PendingCheckpoint, check_space, new_part, write_alone
from replicax._src.scope import context
from replicax._src.tracing.bindings import SyncPolicy
from replicax._src.values.framework import trackings, use_imported
from replicax._src.variables.remote_array import RemoteArray
from replicax._src.vocabulary.errors import DonatedError, UnsupportedError

_DIVIDED = (SyncPolicy.COMPONENTS, SyncPolicy.PARTS)  # each process holds only the components of its replicas


@final
class TakenState:
    """A Python state as it was taken. It becomes JSON only when it is needed.

    Args:
      leaf: The leaf.

    Attributes:
      as_json: Returns the state as it is saved. Raises UntrackableError if it is not JSON.
    """

    def __init__(self, leaf: StateLeaf):
        self.as_json = leaf.note()

    @property
    def digest(self) -> str:
        """A digest of the state as it is saved."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:32]


@final
@dataclass(frozen=True)
class Boundary:
    """The state of a program at a boundary.

    Attributes:
      graph: The tracked objects.
      labels: The name in messages of each array, by key.
      held: The arrays by key.
      states: The Python states by key.
      states_of_all: The states of all processes as JSON, by key, where they differ.
      version: The number of boundaries up to this one, equal in all processes.
      path: The path of the checkpoint with this state.
      number: The number of that checkpoint.
      is_saved: True if a regular save of it begins there.
      replaced: The identity of the checkpoint at the path before that save; None if there is none.
    """

    graph: Graph
    labels: Mapping[str, str]
    held: Mapping[str, Held]
    states: Mapping[str, TakenState]
    states_of_all: Mapping[str, Sequence[Any]]
    version: int
    path: str
    number: int
    is_saved: bool
    replaced: str | None

    def check_not_donated(self) -> None:
        """Checks that no program has taken the memory of an array.

        Raises:
          DonatedError: One has.
        """
        for key, now in self.held.items():
            if isinstance(now.value, jax.Array) and now.value.is_deleted():
                raise DonatedError(
                    f"save_on_failure keeps {self.labels[key]!r} as it was at the last boundary, but its array was donated to "
                    "a program (for example jax.jit with donate_argnums), and is deleted. Do not donate the state that the "
                    "checkpoint tracks, or leave save_on_failure out."
                )

    def write(self) -> int:
        """Writes it as a checkpoint, alone, in any thread. Waits for no other process, and takes no lock of programs.

        Returns:
          The number of bytes of its arrays.

        Raises:
          CheckpointError: It could not be written. No partial checkpoint has its name.
        """
        self.check_not_donated()
        copy = copy_here(self.held, self.labels, agreement.process_number())
        part = new_part(self.path)  # it makes a directory that was removed
        try:
            check_space(self.path, copy.num_bytes)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        states = {
            key: agreement.agreed_state(self.states_of_all.get(key) or [state.as_json()])
            for key, state in self.states.items()
        }
        contents = Contents(
            objects_of(self.graph, copy.arrays.keys() | states.keys()),
            copy.arrays,
            states,
            save=os.path.basename(part),
            processes=agreement.names(),
            number=self.number,
            time_s=later_time(os.path.dirname(self.path)),
        )
        number = agreement.process_number()
        return write_alone(
            self.path, PendingCheckpoint(part, contents, copy.pieces, copy.written, number, True)
        )


def objects_of(graph: Graph, known: Iterable[str]) -> tuple[SavedObject, ...]:
    """Returns the tracked objects as they are saved, without the leaves that have no value yet."""
    keys = set(known)
    is_saved = [node.leaf is None or node.key in keys for node in graph.nodes]
    return tuple(
        SavedObject(
            {name: child for name, child in node.children.items() if is_saved[child]},
            node.key if node.leaf is not None and is_saved[number] else "",
            kind_of(node.object),
        )
        for number, node in enumerate(graph.nodes)
    )


@final
class StateReader:
    """Reads the state of tracked objects, without copies of arrays on devices.

    Args:
      root: The checkpoint.
    """

    def __init__(self, root: Any):
        self._root = root
        self._plan: _Plan | None = None

    def forget(self) -> None:
        """Makes the next read look for all objects again."""
        self._plan = None

    def read(self) -> tuple[Graph, dict[str, str], dict[str, Held], dict[str, TakenState]]:
        """Returns the graph of the objects, the labels and the arrays by key, and the Python states by key.

        Raises:
          UnsupportedError: The processes hold different parts of an array.
        """
        if self._plan is None or not self._plan.is_current():
            use_imported()
            self._plan = _Plan(self._root)
        plan = self._plan
        values = plan.read()
        if values is None:  # a pytree has other leaves now
            plan = self._plan = _Plan(self._root)
            values = plan.read()
            assert values is not None
        return plan.graph, plan.labels, *values


@final
class _LeafOfTree(Leaf):
    """Stands for a leaf of a pytree in a graph that is kept.

    The leaf itself holds the array that the pytree had at the walk, and would keep it alive: a third copy of the state.
    """

    label, of = "", None


class _Plan:
    """The objects of one walk through the graph, by the way in which they are read."""

    def __init__(self, root: Any):
        self.graph = Graph(root)
        self.labels = {key: leaf.label for key, leaf in self.graph.leaves()}
        self._num_owned = context.num_owned()
        objects = [node.object for node in self.graph.nodes]
        self._is_growing = any(t.is_growing(one) for one in objects for t in trackings())
        readers = (t.in_loop(one) for one in objects for t in trackings())
        self._loops: list[Callable[[], Mapping[int, Any]]] = [one for one in readers if one is not None]
        self._attributes = self._noted_attributes()
        self._pytrees = self._noted_pytrees()
        self._trees = self._trees_without_leaves()
        self._groups = self._variables_by_accessor()
        self._others = self._other_arrays()
        self._states = self._checked_states()
        self._checked: dict[str, tuple[Any, Any]] = {}

    def _noted_attributes(self) -> list[tuple[Any, dict[Any, _Attribute]]]:
        """Returns each checkpoint, and its attributes."""
        return [
            (node.object, _noted(self.graph, node, _attributes(node.object)))
            for node in self.graph.nodes
            if isinstance(node.object, Growing)
        ]

    def _noted_pytrees(self) -> list[tuple[HeldPytree, dict[Any, _Attribute]]]:
        """Returns each pytree with objects, and its items."""
        return [
            (node.object, _noted(self.graph, node, node.object.items()))
            for node in self.graph.nodes
            if isinstance(node.object, HeldPytree)
        ]

    def _trees_without_leaves(self) -> list[tuple[HeldTree, dict[str, str]]]:
        """Returns each pytree of arrays and numbers, and the keys of its leaves by name. Takes the leaves out of the
        graph, because each read makes new ones.
        """
        nodes, trees = self.graph.nodes, []
        for node in [node for node in nodes if isinstance(node.object, HeldTree)]:
            trees.append((node.object, {name: nodes[child].key for name, child in node.children.items()}))
            for child in node.children.values():
                nodes[child].object = nodes[child].leaf = _LeafOfTree()
        return trees

    def _variables_by_accessor(self) -> list[tuple[Any, list[str], list[Any], list[int]]]:
        """Returns each accessor with the keys, holders and identities of the variables that it reads at once."""
        variables = [(key, leaf) for key, leaf in self.graph.leaves() if isinstance(leaf, VariableLeaf)]
        by_accessor: dict[Any, list[tuple[str, VariableLeaf]]] = {}
        for key, leaf in variables:
            _check_not_divided(leaf)
            by_accessor.setdefault(leaf.binding.accessor, []).append((key, leaf))
        return [
            (
                accessor,
                [key for key, _ in group],
                [leaf.binding.holder for _, leaf in group],
                [id(leaf.of) for _, leaf in group],
            )
            for accessor, group in by_accessor.items()
        ]

    def _other_arrays(self) -> list[tuple[str, ArrayLeaf]]:
        """Returns the arrays that are neither variables nor in pytrees, by key."""
        return [
            (key, leaf)
            for key, leaf in self.graph.leaves()
            if isinstance(leaf, ArrayLeaf) and not isinstance(leaf, VariableLeaf)
        ]

    def _checked_states(self) -> list[tuple[str, StateLeaf]]:
        """Returns the Python states outside of pytrees, by key. Raises UntrackableError if one is not JSON."""
        states = [(key, leaf) for key, leaf in self.graph.leaves() if isinstance(leaf, StateLeaf)]
        for _, leaf in states:
            leaf.take()
        return states

    def is_current(self) -> bool:
        """True if no object was added or replaced, as far as is known without another walk."""
        return (
            not self._is_growing
            and context.num_owned() == self._num_owned
            and all(_is_same(_attributes(checkpoint), then) for checkpoint, then in self._attributes)
            and all(_is_same(pytree.items(), then) for pytree, then in self._pytrees)
        )

    def read(self) -> tuple[dict[str, Held], dict[str, TakenState]] | None:
        """Returns the arrays and the states; None if a pytree has other leaves than those of the walk."""
        held: dict[str, Held] = {}
        states: dict[str, TakenState] = {}
        in_loops: dict[int, Any] = {}
        for read_loop in self._loops:
            in_loops.update(read_loop())
        for accessor, keys, holders, ids in self._groups:
            for key, value, number in zip(keys, accessor.get(holders), ids, strict=True):
                value = in_loops.get(number) if value is None else value
                if value is not None:
                    held[key] = Held(value)
        for key, leaf in self._others:
            if (now := leaf.held()) is not None:
                held[key] = now
        for tree, keys in self._trees:
            parts = cast(Mapping[str, Leaf], tree.parts())
            if parts.keys() != keys.keys():
                return None
            for name, leaf in parts.items():
                if isinstance(leaf, StateLeaf):
                    states[keys[name]] = TakenState(leaf)
                elif isinstance(leaf, ArrayLeaf) and (now := leaf.held()) is not None:
                    is_own = isinstance(now.value, np.ndarray)  # the program may change it in place
                    held[keys[name]] = Held(np.array(now.value)) if is_own else now
        for key, leaf in self._states:
            states[key] = TakenState(leaf)
        for key, now in held.items():
            self._check(key, now)
        return held, states

    def _check(self, key: str, now: Held) -> None:
        """Checks that this process holds all of an array."""
        form = (type(now.value), getattr(now.value, "sharding", None))
        if self._checked.get(key) == form:
            return
        if now.value is None or isinstance(now.value, RemoteArray) or not holds_all(now.value):
            raise divided_state_error(self.labels.get(key, key))
        self._checked[key] = form


def _noted(graph: Graph, node: Node, values: Mapping[Any, Any]) -> dict[Any, _Attribute]:
    """Notes the attributes of a checkpoint, or the items of a pytree with objects."""
    children = {name: graph.nodes[child].object for name, child in node.children.items()}
    return {
        name: _Attribute(value, isinstance(children.get(escaped(str(name))), HeldTree))
        for name, value in values.items()
    }


def _attributes(checkpoint: Any) -> dict[str, Any]:
    """Returns the tracked attributes of a checkpoint."""
    return {n: v for n, v in vars(checkpoint).items() if not n.startswith("_") and n != "save_counter"}


_PLAIN = (jax.Array, np.ndarray, np.generic, bool, int, float, str)


def _is_plain(value: Any) -> bool:
    """True for a pytree of arrays and numbers. Each read looks at its leaves."""
    return all(isinstance(leaf, _PLAIN) for leaf in jax.tree_util.tree_leaves(value))


@final
class _Attribute:
    """The value of an attribute at the time of a walk. Arrays are not kept alive."""

    def __init__(self, value: Any, is_tree: bool):
        self._is_tree = is_tree
        self._value = None if is_tree else value

    def is_like(self, value: Any) -> bool:
        """True if the attribute needs no other walk."""
        return _is_plain(value) if self._is_tree else value is self._value


def _is_same(now: Mapping[Any, Any], then: Mapping[Any, _Attribute]) -> bool:
    """True if a checkpoint or a pytree has the same objects. Arrays, numbers and pytrees of these may be others."""
    return len(now) == len(then) and all(n in then and then[n].is_like(v) for n, v in now.items())


def _check_not_divided(leaf: VariableLeaf) -> None:
    if leaf.binding.sync_policy in _DIVIDED and agreement.names()[1:]:
        raise divided_state_error(leaf.label)
    strategy = context.owner_of(leaf.of)
    layouts = None if strategy is None else strategy.variable_placement.layouts
    if layouts is not None and layouts.shards is not None and layouts.topology.peers is not None:
        raise divided_state_error(leaf.label)


def divided_state_error(label: str) -> UnsupportedError:
    """Returns the error for a value of which each process holds a part."""
    return UnsupportedError(
        f"save_on_failure=True needs the full state in every process, but {label!r} is divided over the processes: the part of "
        "a process that dies is lost. (Sharded state, ON_READ variables, accumulated gradients and parameter servers are "
        "divided.) Leave save_on_failure out; with shard_state, local_directory and local_every save often."
    )


def check_not_divided(root: Any) -> None:
    """Checks what is known of tracked objects before they have values.

    Raises:
      UnsupportedError: A value is divided over the processes.
    """
    for _, leaf in Graph(root).leaves():
        if isinstance(leaf, VariableLeaf):
            _check_not_divided(leaf)
