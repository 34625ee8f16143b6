"""The placement of a value over devices, as data for pictures.

No value is read; shapes and shardings are enough.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax._src.cluster.peers import joined_peers
from replicax._src.devices.named_devices import device_name
from replicax._src.jax_internals import jax_compat
from replicax._src.values.distributed import Mirrored, PerReplica, is_value
from replicax._src.values.framework import is_variable
from replicax._src.variables.remote_array import RemoteArray
from replicax._src.variables.sharded import ShardedVariable
from replicax._src.vocabulary.errors import InvalidArgumentError

Index = tuple[tuple[int, int], ...]
"""For each dim the half-open interval of what a part has."""


@dataclass(frozen=True)
class ArrayPart:
    """A piece of an array and its location.

    Attributes:
      places: The devices, such as "cpu:0–3", with the task in front for another process.
      is_local: True if this process has it.
    """

    index: Index
    places: str
    is_local: bool = True


@dataclass(frozen=True)
class ArrayLayout:
    """An array and its placement.

    Attributes:
      told: The placement in words.
      pieces: The number of pieces along each dim.
      device_bytes: The bytes of it on one device or server.
      parts: The parts; empty if they are unknown or the array is on the host.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    told: str
    pieces: tuple[int, ...] = ()
    device_bytes: int = 0
    parts: tuple[ArrayPart, ...] = ()

    @property
    def kind(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def layouts_of(value: Any) -> list[ArrayLayout]:
    """Returns the layouts of all arrays of a value.

    Raises:
      InvalidArgumentError: The value contains no arrays.
    """
    named = _variables_of_keras(value)
    if named is None:
        leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_leaf)
        named = [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]
    elif not named:
        raise InvalidArgumentError(
            f"{value!r:.200} has no variables to draw yet. Build it, or call it on a batch."
        )
    found = [_layout(name or _name_of(leaf), leaf) for name, leaf in named]
    if not found or all(layout is None for layout in found):
        raise InvalidArgumentError(
            "rx.visualize draws arrays, variables, PerReplica values, Keras models, and pytrees of these; got "
            f"{value!r:.200}. For a distributed dataset pass an element: next(iter(dataset))."
        )
    return [layout for layout in found if layout is not None]


def _is_leaf(value: Any) -> bool:
    return is_value(value) or isinstance(value, (ShardedVariable, RemoteArray))


def _variables_of_keras(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the variables of a model, layer, optimizer or metric; None for other values."""
    keras: Any = sys.modules.get("keras")
    if keras is None:
        return None
    kinds: Any = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
    if not isinstance(value, kinds):
        return None
    variables = list(getattr(value, "variables", ()))
    optimizer = getattr(value, "optimizer", None)
    if isinstance(value, keras.Model) and isinstance(optimizer, keras.optimizers.Optimizer):
        variables += getattr(optimizer, "variables", ())
    return [(variable.path, variable) for variable in {id(v): v for v in variables}.values()]


def _name_of(leaf: Any) -> str:
    name = getattr(leaf, "path", None) or getattr(leaf, "name", None)
    if isinstance(name, str) and name:
        return name
    return "array" if isinstance(leaf, jax.Array) else type(leaf).__name__


def _layout(name: str, leaf: Any) -> ArrayLayout | None:
    """Returns the layout of one leaf; None if it is not an array."""
    if isinstance(leaf, ShardedVariable):
        held = list(leaf.shards.held)
        if len(held) > 1:
            return _in_variables(name, leaf)
        leaf = held[0]
    if isinstance(leaf, PerReplica):
        return _of_replicas(name, leaf)
    if isinstance(leaf, Mirrored):
        return _of_array(name, leaf._array)
    if is_variable(leaf):
        stored = getattr(leaf, "_value", None)
        if getattr(leaf, "has_components", False) and isinstance(stored, jax.Array):
            return _of_replicas(name, PerReplica(stored, stored.shape[0]))
        if stored is None or isinstance(stored, jax_compat.Tracer):
            return ArrayLayout(name, tuple(leaf.shape), str(leaf.dtype), "has no value here yet")
        leaf = stored
    return _of_remote(name, leaf) if isinstance(leaf, RemoteArray) else _of_array(name, leaf)


def _of_array(name: str, array: Any) -> ArrayLayout | None:
    if array is None:
        return ArrayLayout(name, (), "", "was given to a program (donate_args)")
    if isinstance(array, (np.ndarray, np.generic, bool, int, float, complex)):
        host = np.asarray(array)
        if host.dtype.kind not in "biufcV":
            return None
        return ArrayLayout(name, host.shape, str(host.dtype), "on the host", (1,) * host.ndim, host.nbytes)
    if not isinstance(array, jax.Array):
        return None
    shape, dtype = tuple(array.shape), str(array.dtype)
    if isinstance(array, jax_compat.Tracer):
        return ArrayLayout(name, shape, dtype, "is traced: it has no devices yet")
    if array.is_deleted():
        return ArrayLayout(name, shape, dtype, "was deleted, or given to a program")
    by_index = _devices_by_index(array)
    parts = tuple(ArrayPart(index, *_places(devices)) for index, devices in by_index.items())
    pieces = tuple(len({index[dim] for index in by_index}) for dim in range(len(shape)))
    of_device = math.prod(array.sharding.shard_shape(shape)) * array.dtype.itemsize
    return ArrayLayout(name, shape, dtype, _told(by_index, pieces), pieces, of_device, parts)


def _devices_by_index(array: jax.Array) -> dict[Index, list[Any]]:
    """Returns the devices of all processes that hold each part."""
    found: dict[Index, list[Any]] = {}
    for device, slices in array.sharding.devices_indices_map(array.shape).items():
        index = tuple(s.indices(size)[:2] for s, size in zip(slices or (), array.shape, strict=False))
        found.setdefault(index, []).append(device)
    return dict(sorted(found.items()))


def _told(by_index: Mapping[Index, Sequence[Any]], pieces: Sequence[int]) -> str:
    copies = len(next(iter(by_index.values())))
    cuts = [f"dim {dim} in {count} pieces" for dim, count in enumerate(pieces) if count > 1]
    if not cuts:
        devices = next(iter(by_index.values()))
        return f"whole on each of {copies} devices" if copies > 1 else f"on {device_name(devices[0])}"
    return ", ".join(cuts) + (f", each on {copies} devices" if copies > 1 else ", one on each device")


def _places(devices: Sequence[Any]) -> tuple[str, bool]:
    """Returns short text for devices, and True if this process has one of them."""
    here = jax.process_index()
    by_process: dict[int, list[Any]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    if list(by_process) == [here] and joined_peers() is None:
        return _short(devices), True
    told = "; ".join(f"{_task(process)} {_short(of_it)}" for process, of_it in sorted(by_process.items()))
    return told, here in by_process


def _task(process: int) -> str:
    peers = joined_peers()
    return f"process {process}" if peers is None or process >= len(peers) else peers.names[process]


def _short(devices: Sequence[Any]) -> str:
    """Returns text such as ``cpu:0–3, 6``."""
    numbers = sorted(device.id for device in devices)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return f"{devices[0].platform}:" + ", ".join("–".join(map(str, one)) for one in ranges)


def _of_replicas(name: str, value: PerReplica) -> ArrayLayout | None:
    """Returns the layout of a value with a component for each replica, drawn below one another."""
    array = value._array
    if array is None or not isinstance(array, jax.Array) or isinstance(array, jax_compat.Tracer):
        return _of_array(name, array)
    if value.is_equal:
        found = _of_array(name, array)
        assert found is not None
        return ArrayLayout(name, found.shape, found.dtype, f"proven equal; {found.told}", *_rest(found))
    places: dict[int, list[Any]] = {}
    for index, devices in _devices_by_index(array).items():
        for replica in range(*index[0]):
            places.setdefault(replica, []).extend(devices)
    shapes = [value.component_shape(r) for r in range(value.num_replicas)]
    is_even = len(set(shapes)) == 1
    parts = []
    for replica, shape in enumerate(shapes):
        where, is_local = _places(places[replica])
        said = f"replica {replica} · {where}" + ("" if is_even else f" · {list(shape)}")
        parts.append(ArrayPart(((replica, replica + 1), *((0, size) for size in shape)), said, is_local))
    of_device = math.prod(array.shape[1:]) * array.dtype.itemsize
    told = f"one component for each of {value.num_replicas} replicas"
    shape = (value.num_replicas, *(shapes[0] if is_even else ()))
    pieces = (value.num_replicas, *(1 for _ in shape[1:]))
    told = told if is_even else f"{told}, of different shapes"
    return ArrayLayout(name, shape, str(array.dtype), told, pieces, of_device, tuple(parts))


def _rest(layout: ArrayLayout) -> tuple[Any, ...]:
    return layout.pieces, layout.device_bytes, layout.parts


def _of_remote(name: str, array: RemoteArray) -> ArrayLayout:
    if not array.places:
        told = "on the parameter servers once it is first used"
        return ArrayLayout(name, array.shape, array.dtype.name, told)
    parts = tuple(
        ArrayPart(
            (rows or (0, array.shape[0]), *((0, size) for size in array.shape[1:])) if array.shape else (),
            place,
            is_local=False,
        )
        for place, rows, _ in array.places
    )
    count = len(parts)
    told = f"dim 0 in {count} shards" if count > 1 else f"on {parts[0].places}"
    pieces = (count, *(1 for _ in array.shape[1:])) if array.shape else ()
    largest = max(num_bytes for _, _, num_bytes in array.places)
    return ArrayLayout(name, array.shape, array.dtype.name, told, pieces, largest, parts)


def _in_variables(name: str, variable: ShardedVariable) -> ArrayLayout:
    """Returns the layout of a variable whose shards are variables."""
    parts, sizes = [], []
    for shard, rows in zip(variable.shards.held, variable.shards.rows, strict=True):
        layout = _layout(name, shard)
        places = ", ".join(dict.fromkeys(part.places for part in layout.parts)) if layout else ""
        is_local = layout is not None and any(part.is_local for part in layout.parts)
        parts.append(ArrayPart((rows, *((0, size) for size in variable.shape[1:])), places, is_local))
        sizes.append(layout.device_bytes if layout else 0)
    pieces = (len(parts), *(1 for _ in variable.shape[1:]))
    told = f"dim 0 in {len(parts)} shards"
    return ArrayLayout(
        name, variable.shape, str(np.dtype(variable.dtype)), told, pieces, max(sizes), tuple(parts)
    )
