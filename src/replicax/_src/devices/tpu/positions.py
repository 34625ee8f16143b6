"""``Topology``: the position and the task of each TPU core of a job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from replicax._src.vocabulary.errors import InvalidArgumentError

RANK = 4


@final
class TPUSystemMetadata(NamedTuple):
    """The facts that ``TPUClusterResolver.get_tpu_system_metadata`` returns about the TPUs of a job, or virtual
    devices.

    Attributes:
      num_cores: The number of cores of all hosts.
      num_hosts: The number of tasks of the job.
      num_of_cores_per_host: The number of cores of each host.
      topology: The positions of the cores.
      devices: The JAX devices, host by host.

    Source: tf.tpu.experimental.TPUSystemMetadata.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Topology
    devices: Sequence[Any]


_FIELDS = {1: "mesh_shape", 2: "num_tasks", 3: "num_tpu_devices_per_task", 4: "device_coordinates"}


@final
class Topology:
    """The mesh of the TPU cores of a job, with the task and device of each core.

    A core's coordinates are (x, y, z, core): those of its chip, and its number on the chip.

    Args:
      serialized: The result of ``serialized()``. Leave the other arguments out.
      mesh_shape: Four positive numbers, the sizes of the mesh.
      device_coordinates: [tasks, devices of a task, 4].

    Raises:
      InvalidArgumentError: The shapes do not match, coordinates are outside of the mesh or repeat, or ``serialized`` is
        not a topology.

    Source: tf.tpu.experimental.Topology.

    >>> import replicax as rx
    >>> rx.tpu.experimental.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]])
    Topology(mesh_shape=[1, 1, 1, 2], num_tasks=1, num_tpus_per_task=2)
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | np.ndarray | None = None,
        device_coordinates: Any = None,
    ):
        if serialized:
            mesh_shape, device_coordinates = _parsed(serialized)
        self._mesh_shape = _whole_numbers("mesh_shape", mesh_shape)
        self._device_coordinates = _whole_numbers("device_coordinates", device_coordinates)
        self._check()
        self._tasks = np.full(self._mesh_shape, -1, np.int32)
        self._ordinals = np.full(self._mesh_shape, -1, np.int32)
        for task, ordinal in np.ndindex(self._device_coordinates.shape[:2]):
            place = tuple(self._device_coordinates[task, ordinal])
            self._tasks[place], self._ordinals[place] = task, ordinal

    def _check(self) -> None:
        shape, coordinates = self._mesh_shape, self._device_coordinates
        if shape.shape != (RANK,) or (shape < 1).any():
            raise InvalidArgumentError(
                f"`mesh_shape` must be a sequence of 4 positive entries, the sizes in x, y, z and the cores of a chip; "
                f"got {shape.tolist()}."
            )
        if coordinates.ndim != 3 or coordinates.shape[2] != RANK:
            raise InvalidArgumentError(
                f"`device_coordinates` must be an array [tasks, devices, 4]; got one of shape {coordinates.shape}."
            )
        if (coordinates < 0).any() or (coordinates >= shape).any():
            raise InvalidArgumentError(
                f"`device_coordinates` must be inside the mesh {shape.tolist()}, from 0; the largest are "
                f"{coordinates.max((0, 1)).tolist()}."
            )
        flat = coordinates.reshape(-1, RANK)
        if len(np.unique(flat, axis=0)) != len(flat):
            raise InvalidArgumentError(
                "`device_coordinates` names a core twice; each device needs its own core."
            )

    @property
    def mesh_shape(self) -> np.ndarray:
        """[4] the sizes of the mesh in x, y, z, and the number of cores of a chip."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """4."""
        return RANK

    @property
    def device_coordinates(self) -> np.ndarray:
        """[tasks, devices of a task, 4]."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> np.ndarray:
        """[n, 4] the positions of the mesh without a device."""
        return np.argwhere(self._tasks < 0)

    @property
    def num_tasks(self) -> int:
        """The number of tasks (processes) with devices."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the task whose device is at these coordinates, or -1."""
        return int(self._tasks[tuple(device_coordinates)])

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the device at these coordinates among those of its task, or -1."""
        return int(self._ordinals[tuple(device_coordinates)])

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the device at these coordinates."""
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{self._task_name(device_coordinates, job)}/device:TPU:{ordinal}"

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the CPU on the host of the device at these coordinates."""
        return f"{self._task_name(device_coordinates, job)}/device:CPU:0"

    def _task_name(self, device_coordinates: Sequence[int], job: str | None) -> str:
        prefix = "" if job is None else f"/job:{job}"
        return f"{prefix}/task:{self.task_ordinal_at_coordinates(device_coordinates)}"

    def serialized(self) -> bytes:
        """Returns the topology as bytes: a ``TopologyProto``, as TensorFlow writes it."""
        sizes = self._device_coordinates.shape
        return b"".join(
            [
                _packed_field(1, self._mesh_shape.tolist()),
                _number_field(2, sizes[0]),
                _number_field(3, sizes[1]),
                _packed_field(4, self._device_coordinates.reshape(-1).tolist()),
            ]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.serialized() == other.serialized()

    def __hash__(self) -> int:
        return hash(self.serialized())

    def __repr__(self) -> str:
        return (
            f"Topology(mesh_shape={self._mesh_shape.tolist()}, num_tasks={self.num_tasks}, "
            f"num_tpus_per_task={self.num_tpus_per_task})"
        )


def full_mesh(mesh_shape: Sequence[int], num_tasks: int = 1) -> Topology:
    """Returns a topology with a device at each position, chip by chip, x first, and tasks in turn."""
    x, y, z, cores = mesh_shape
    places = [[i, j, k, core] for k in range(z) for j in range(y) for i in range(x) for core in range(cores)]
    return Topology(mesh_shape=mesh_shape, device_coordinates=np.reshape(places, (num_tasks, -1, RANK)))


def usual_mesh_shape(num_cores: int) -> tuple[int, int, int, int]:
    """Returns the shape of a host of TPUs with this many cores: two on a chip, with chips in a rectangle, if that is
    possible.

    >>> usual_mesh_shape(8), usual_mesh_shape(4), usual_mesh_shape(3)
    ((2, 2, 1, 2), (2, 1, 1, 2), (3, 1, 1, 1))
    """
    cores = 2 if num_cores % 2 == 0 else 1
    chips = num_cores // cores
    y = max(size for size in range(1, math.isqrt(chips) + 1) if chips % size == 0)
    return chips // y, y, 1, cores


def _whole_numbers(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"`{name}` must be an array of integers; got {value!r}.")
    return array.astype(np.int32)


# --- TopologyProto ------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    result = bytearray()
    while number >= 0x80:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*result, number])


def _number_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _packed_field(number: int, values: Sequence[int]) -> bytes:
    body = b"".join(map(_varint, values))
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _numbers(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields the varints of some bytes, each with the position after it."""
    value = shift = 0
    for place, byte in enumerate(data, 1):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value, place
            value = shift = 0
    if shift:
        raise ValueError("the last number is cut off")


def _parsed(serialized: bytes) -> tuple[list[int], np.ndarray]:
    found: dict[str, list[int]] = {name: [] for name in _FIELDS.values()}
    try:
        place = 0
        while place < len(serialized):
            tag, used = next(_numbers(serialized[place:]))
            value, used_by_value = next(_numbers(serialized[place + used :]))
            place += used + used_by_value
            numbers = [value]
            if tag & 7 == 2:
                numbers = [number for number, _ in _numbers(serialized[place : place + value])]
                place += value
            found.get(_FIELDS.get(tag >> 3, ""), []).extend(numbers)
        sizes = (found["num_tasks"][0], found["num_tpu_devices_per_task"][0], RANK)
        return found["mesh_shape"], np.reshape(found["device_coordinates"], sizes)
    except (ValueError, IndexError, StopIteration, TypeError) as error:
        raise InvalidArgumentError(
            "`serialized` is not a topology: it must be what Topology.serialized() returned, as bytes."
        ) from error
