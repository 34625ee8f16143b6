"""Pytrees of arrays, numbers and strings that an attribute holds, and objects whose state is JSON."""

from __future__ import annotations

import abc
import base64
import json
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.checkpoint.array_leaves import ArrayLeaf, Held, HostParts, ValueReader
from replicax._src.checkpoint.errors import CheckpointMismatchError, UntrackableError
from replicax._src.checkpoint.tracked import Leaf, Parts, Trackable, escaped, untrackable
from replicax._src.jax_internals import jax_compat
from replicax._src.untrusted.strict_json import MOST_DEPTH, read_json
from replicax._src.vocabulary.errors import ReplicaxError

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_MOST_DEPTH = MOST_DEPTH // 2  # the manifest and the messages between processes put it into other lists
_PLAIN = (bool, int, float, str)


@final
class HeldTree(Trackable):
    """A pytree that an attribute holds. A restore replaces it, and does not change it in place.

    Args:
      holder: The object that has it, by name.
      name: The name of the attribute, or of the item of a container.
      label: A name for messages; by default ``name``.
    """

    def __init__(self, holder: Any, name: Any, label: str | None = None):
        self._holder, self._name = holder, name
        self.label = str(name) if label is None else label
        self._new: dict[int, Any] = {}

    def parts(self) -> Parts:
        """Returns its leaves, by their paths."""
        flat, _ = jax.tree_util.tree_flatten_with_path(self._holder[self._name])
        return {_name_of(path): self._leaf(i, _name_of(path), leaf) for i, (path, leaf) in enumerate(flat)}

    def _leaf(self, number: int, name: str, leaf: Any) -> Leaf:
        label = f"{self.label}/{name}" if name else self.label
        if isinstance(leaf, _ARRAYS) and _is_numeric(leaf.dtype):
            return _TreeArray(self, number, label, leaf)
        if isinstance(leaf, _PLAIN):
            return TreeNumber(self, number, label, leaf)
        raise untrackable(label, leaf)

    def grow(self, lacking: Mapping[str, Any]) -> bool:
        """Makes room for more values of a checkpoint, because programs start with ``history = []`` and ``best =
        None``.

        Args:
          lacking: The saved numbers and strings, by name; None for other values.

        Returns:
          True if there is room now: lists of values are longer, or values have replaced None.
        """
        if not lacking:
            return False
        value = self._holder[self._name]
        places, tree = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_growing)
        grown = [_grown(place, _below(_name_of(path), lacking)) for path, place in places]
        if all(new is place for new, (_, place) in zip(grown, places, strict=True)):
            return False
        self._holder[self._name] = jax.tree_util.tree_unflatten(tree, grown)
        return True

    def give(self, number: int, leaf: Any) -> None:
        """Sets the value of a leaf, which ``finish`` puts into the new pytree."""
        self._new[number] = leaf

    def finish(self) -> None:
        """Replaces the pytree by one with the new values."""
        if not self._new:
            return
        leaves, tree = jax.tree_util.tree_flatten(self._holder[self._name])
        leaves = [self._new.get(i, leaf) for i, leaf in enumerate(leaves)]
        self._new = {}
        self._holder[self._name] = jax.tree_util.tree_unflatten(tree, leaves)


def _is_growing(place: Any) -> bool:
    return place is None or (type(place) is list and jax.tree_util.all_leaves(place))


def _below(name: str, lacking: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the lacking values at a place, by their names there."""
    start = f"{name}/" if name else ""
    below = {key.removeprefix(start): value for key, value in lacking.items() if key.startswith(start)}
    return {"": lacking[name]} if name in lacking else below


def _grown(place: Any, lacking: Mapping[str, Any]) -> Any:
    """Returns a list extended by the values that it lacks, or a value in place of None; unchanged if it cannot fit."""
    if not lacking or any(value is None for value in lacking.values()):
        return place
    if place is None:
        return lacking.get("")
    if not _is_growing(place) or {*lacking} != {str(len(place) + i) for i in range(len(lacking))}:
        return place
    return [*place, *(lacking[str(len(place) + i)] for i in range(len(lacking)))]


def _is_numeric(dtype: Any) -> bool:
    """True if files can have such arrays. They cannot have strings, dates and Python objects."""
    if jax_compat.is_typed_key(dtype) or dtype == np.bool_:
        return True
    lacks = ("mm", "fg", "cG")  # time spans, and floats and complex numbers of more than 64 bits per number
    return jnp.issubdtype(dtype, np.number) and dtype.kind + dtype.char not in lacks


def _name_of(path: Any) -> str:
    """Returns the path of a leaf: names of attributes, keys, and positions."""
    return "/".join(escaped(jax.tree_util.keystr((entry,), simple=True)) for entry in path)


@final
class _TreeArray(ArrayLeaf):
    def __init__(self, tree: HeldTree, number: int, label: str, array: Any):
        self.of, self.place, self.label = tree, number, label
        self._array, self._data = array, array
        self._is_key = jax_compat.is_typed_key(getattr(array, "dtype", None))
        if self._is_key:
            self._data = jax.random.key_data(array)
        elif not isinstance(array, jax.Array):
            self._data = np.asarray(array, array.dtype.newbyteorder("="))
        self.shape, self.dtype = tuple(self._data.shape), np.dtype(self._data.dtype)

    def held(self) -> Held:
        return Held(self._data)

    def fetch(self, source: ValueReader) -> Any:
        is_on_device = isinstance(self._array, jax.Array)
        return HostParts.like(self._data, source.read) if is_on_device else source.read()

    def give(self, fetched: Any) -> None:
        self.of.give(self.place, self._placed(fetched))

    def _placed(self, fetched: Any) -> Any:
        if not isinstance(fetched, HostParts):
            return fetched[()] if isinstance(self._array, np.generic) else fetched
        if self._is_key:
            return jax.random.wrap_key_data(fetched.placed(), impl=jax.random.key_impl(self._array))
        return fetched.placed()


# --- states -----------------------------------------------------------------------------------------------


class StateLeaf(Leaf):
    """A value that is JSON: the position of an iterator, or a number."""

    @abc.abstractmethod
    def get(self) -> Any:
        """Returns the current state."""

    @abc.abstractmethod
    def set(self, state: Any) -> None:
        """Resumes from a state."""

    def take(self) -> Any:
        """Returns the current state as JSON.

        Raises:
          UntrackableError: The state is not JSON.
        """
        return self.as_json(self.get())

    def note(self) -> Callable[[], Any]:
        """Notes the current state. Returns a function that returns it as JSON, at any later time, in any thread.

        The function raises UntrackableError if the state is not JSON.
        """
        state = self.get()
        try:
            pickled = pickle.dumps(state, pickle.HIGHEST_PROTOCOL)  # three times faster than JSON
        except Exception:
            taken = self.as_json(state)
            return lambda: taken
        return lambda: self.as_json(pickle.loads(pickled))

    def as_json(self, state: Any) -> Any:
        """Returns a state that ``get`` has returned as JSON.

        Raises:
          UntrackableError: The state is not JSON.
        """
        state = {"bytes": base64.b64encode(state).decode()} if isinstance(state, bytes) else [state]
        try:
            _check_keys(state if isinstance(state, dict) else state[0], "")
            return read_json(json.dumps(state), most_depth=_MOST_DEPTH)
        except (TypeError, ValueError, RecursionError) as error:
            raise UntrackableError(
                f"The state of {self.label} cannot be saved: the result of get_state() is not JSON ({error}). "
                "Return numbers, strings, lists and dicts of these with strings as keys, or bytes."
            ) from error

    def merged(self, saved: Sequence[Any]) -> Any:
        """Returns one saved state for any process, from those of another number of processes; None if there is none."""
        del saved

    def difference(self, saved: Any) -> str:
        """Returns why a saved state does not fit here; "" if it does."""
        del saved
        return ""

    def give(self, saved: Any) -> None:
        """Sets the state from its saved form. None leaves it as it is: this process had none when it was saved."""
        if saved is None:
            return
        self.set(base64.b64decode(saved["bytes"]) if isinstance(saved, dict) else saved[0])


def _check_keys(state: Any, path: str) -> None:
    """Refuses keys that JSON would change into strings."""
    if isinstance(state, (list, tuple)):
        state = {str(position): item for position, item in enumerate(state)}
    for key, item in state.items() if isinstance(state, dict) else ():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} is not a string, at {path.lstrip('/')!r}")
        _check_keys(item, f"{path}/{key}")


@final
class TreeNumber(StateLeaf):
    """A number or a string in a pytree."""

    def __init__(self, tree: HeldTree, number: int, label: str, value: Any):
        self.of, self.place, self.label, self._value = tree, number, label, value

    @property
    def is_text(self) -> bool:
        return isinstance(self._value, str)

    def get(self) -> Any:
        return self._value

    def difference(self, saved: Any) -> str:
        value = saved[0] if isinstance(saved, list) else saved
        if isinstance(value, _PLAIN) and isinstance(value, str) == self.is_text:
            try:
                self._converted(value)
            except OverflowError:
                return f"{value!r:.60} was saved, which is too large for a float, and {self._value!r} is here"
            return ""
        return f"{value!r:.60} was saved ({type(value).__name__}), but {self._value!r:.60} is here"

    def set(self, state: Any) -> None:
        self.of.give(self.place, self._converted(state))

    def _converted(self, state: Any) -> Any:
        """Converts to the type of the current value, unless that is an int or a bool and another kind was saved.

        Programs start with ``best = 0``, and save 0.25.
        """
        here = type(self._value)
        is_kept = issubclass(here, (float, str)) or issubclass(here, bool) == isinstance(state, bool)
        is_cut = issubclass(here, int) and isinstance(state, float)
        return here(state) if is_kept and not is_cut else state


class NotedState(abc.ABC):
    """An object with a large state that can be noted for less than a copy of it."""

    @abc.abstractmethod
    def note_state(self) -> Callable[[], Any]:
        """Returns a function that returns what ``get_state`` returns now, at any later time, in any thread."""


@final
class _ObjectState(StateLeaf):
    def __init__(self, of: Any):
        self.of, self.label = of, type(of).__name__

    def get(self) -> Any:
        return self.of.get_state()

    def note(self) -> Callable[[], Any]:
        if not isinstance(self.of, NotedState):
            return super().note()
        noted = self.of.note_state()
        return lambda: self.as_json(noted())

    def set(self, state: Any) -> None:
        try:
            self.of.set_state(state)
        except ReplicaxError:
            raise
        except Exception as error:
            raise CheckpointMismatchError(
                f"{self.label}.set_state cannot take the saved state ({type(error).__name__}: {error!s:.200}), so arrays "
                f"were not restored: it is the state of another version of {self.label}, or was changed. Make set_state "
                "accept it, or restore another checkpoint."
            ) from error

    def merged(self, saved: Sequence[Any]) -> Any:
        return (
            [self.of.merge_states([each[0] for each in saved])] if isinstance(self.of, MergesStates) else None
        )


@runtime_checkable
class MergesStates(Protocol):
    """An object whose states of several processes can be restored in another number of processes."""

    def merge_states(self, states: Sequence[Any]) -> Any:
        """Returns one state, for ``set_state`` in every process."""
        ...


def leaf_of_state(tracked: Any) -> Leaf | None:
    """Returns the leaf of an object with ``get_state`` and ``set_state``; None for other objects."""
    get, set_ = getattr(tracked, "get_state", None), getattr(tracked, "set_state", None)
    if isinstance(tracked, type) or not callable(get) or not callable(set_):
        return None
    return _ObjectState(tracked)


class HostRandomState(NotedState):
    """The random state of this process's ``random`` and ``numpy.random``, which shuffle arrays in Keras.

    Save it with ``rx.Checkpoint(model=model, host_random=rx.checkpoint.HostRandomState())``. JAX's keys are arrays,
    and
    Keras's seed generators belong to their layers, so neither needs this.
    """

    def get_state(self) -> dict[str, Any]:
        """Returns the current state."""
        return self.note_state()()

    def note_state(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that returns the state of now. Private."""
        version, numbers, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return lambda: {
            "random": [version, list(numbers), gauss],
            "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes from a state."""
        version, numbers, gauss = state["random"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, np.uint32), *rest))
