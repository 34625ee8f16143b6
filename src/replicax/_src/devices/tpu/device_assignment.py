"""``DeviceAssignment``: the cores of a topology that are the logical devices of each replica."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from replicax._src.devices.tpu.positions import RANK, Topology
from replicax._src.devices.tpu.rings import ring
from replicax._src.vocabulary.errors import InvalidArgumentError


class DeviceOrderMode(enum.IntEnum):
    """The order in which cores are assigned.

    Source: tf.tpu.experimental.DeviceOrderMode.
    """

    AUTO = 0
    """Uses rings if the replicas fill the topology, otherwise meshes."""
    RING = 1
    """Neighbours in the order are neighbours in the topology."""
    MESH = 2
    """Row after row."""


@final
class DeviceAssignment:
    """The core of each logical device l of each replica r. ``build`` makes the usual assignments.

    Args:
      topology: The topology of the cores.
      core_assignment: [replicas, logical devices of a replica, 4] coordinates in the topology.

    Raises:
      InvalidArgumentError: The topology or the shape is invalid, or a core does not exist or is assigned twice.

    Source: tf.tpu.experimental.DeviceAssignment.
    """

    def __init__(self, topology: Topology, core_assignment: Any):
        if not isinstance(topology, Topology):
            raise InvalidArgumentError(
                f"topology must be a Topology object, got {type(topology)}. "
                "rx.tpu.experimental.initialize_tpu_system(resolver) returns the topology of the devices."
            )
        self._topology = topology
        cores = np.asarray(core_assignment)
        if cores.size and cores.dtype.kind not in "iu":
            raise InvalidArgumentError(f"core_assignment must have integers, got {core_assignment!r}.")
        self._core_assignment = cores.astype(np.int32)
        if self._core_assignment.ndim != 3 or self._core_assignment.shape[-1] != RANK:
            raise InvalidArgumentError(
                f"core_assignment must be a rank 3 array [replicas, logical devices, {RANK}], got shape "
                f"{self._core_assignment.shape}."
            )
        self._check_cores()

    def _check_cores(self) -> None:
        seen: set[tuple[int, ...]] = set()
        for core in map(tuple, self._core_assignment.reshape(-1, RANK).tolist()):
            is_inside = all(0 <= c < size for c, size in zip(core, self._topology.mesh_shape, strict=True))
            if not is_inside or self._topology.task_ordinal_at_coordinates(core) < 0:
                raise InvalidArgumentError(
                    f"core_assignment names core {core}, which does not exist in {self._topology}."
                )
            if core in seen:
                raise InvalidArgumentError(
                    f"core_assignment names core {core} twice; it can be one logical device only."
                )
            seen.add(core)

    @property
    def topology(self) -> Topology:
        """The topology of the cores."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self._core_assignment.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical devices of each replica."""
        return self._core_assignment.shape[1]

    @property
    def core_assignment(self) -> np.ndarray:
        """[replicas, logical devices, 4] the coordinates in the topology."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of a logical device.

        Raises:
          InvalidArgumentError: The replica or logical device does not exist.
        """
        sizes = {
            "replica": (replica, self.num_replicas),
            "logical_core": (logical_core, self.num_cores_per_replica),
        }
        for name, (given, size) in sizes.items():
            if not 0 <= given < size:
                raise InvalidArgumentError(f"{name} must be one of 0 to {size - 1} in {self}, got {given!r}.")
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose logical device of this number is in a task.

        Raises:
          InvalidArgumentError: There are no such replicas.
        """
        in_task = [
            replica
            for replica in range(self.num_replicas)
            if 0 <= logical_core < self.num_cores_per_replica
            and self._topology.task_ordinal_at_coordinates(self.coordinates(replica, logical_core)) == task_id
        ]
        if not in_task:
            raise InvalidArgumentError(
                f"Can not find any replica in task: {task_id} contains logical_core: {logical_core}. There are "
                f"{self._topology.num_tasks} task(s), and {self.num_cores_per_replica} logical device(s) in a replica."
            )
        return in_task

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number of a logical device among the devices of its task."""
        return self._topology.tpu_device_ordinal_at_coordinates(self.coordinates(replica, logical_core))

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns TensorFlow's name of the CPU on the host of a logical device."""
        return self._topology.cpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns TensorFlow's name of a logical device."""
        return self._topology.tpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def __repr__(self) -> str:
        return (
            f"DeviceAssignment(num_replicas={self.num_replicas}, num_cores_per_replica={self.num_cores_per_replica}, "
            f"{self._topology})"
        )

    @classmethod
    def build(
        cls,
        topology: Topology | bytes,
        computation_shape: Sequence[int] | np.ndarray | None = None,
        computation_stride: Sequence[int] | np.ndarray | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Assigns neighbouring cores to each replica.

        Args:
          topology: The topology of the cores, also in serialized form.
          computation_shape: [4] the block of cores of one replica, by default one core.
          computation_stride: [4] the distance between the cores of a block, by default 1.
          num_replicas: The number of replicas to place.
          device_order_mode: See ``DeviceOrderMode``.

        Raises:
          InvalidArgumentError: The replicas do not fit, or the arguments are not shapes.

        Source: tf.tpu.experimental.DeviceAssignment.build, which assigns the same cores.

        >>> import replicax as rx
        >>> places = [[[x, 0, 0, core] for x in range(2) for core in range(2)]]
        >>> topology = rx.tpu.experimental.Topology(mesh_shape=[2, 1, 1, 2], device_coordinates=places)
        >>> rx.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=2).coordinates(1, 0)
        (1, 0, 0, 0)
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        if not isinstance(topology, Topology):
            raise InvalidArgumentError(f"`topology` is not a Topology object; got {type(topology)}.")
        block = _Block(topology, computation_shape, computation_stride, num_replicas)
        if len(topology.missing_devices):
            return cls(topology, block.in_order_of_tasks())
        is_ring = block.can_be_a_ring if device_order_mode == DeviceOrderMode.AUTO else False
        if device_order_mode == DeviceOrderMode.RING:
            if not block.can_be_a_ring:
                raise InvalidArgumentError(
                    "device_order_mode=DeviceOrderMode.RING needs replicas that fill the topology, of whole chips, without "
                    f"a stride; got computation_shape={block.shape.tolist()}, computation_stride={block.stride.tolist()} and "
                    f"num_replicas={num_replicas} in {topology}. Use DeviceOrderMode.AUTO."
                )
            is_ring = True
        return cls(topology, block.in_rings() if is_ring else block.in_a_mesh())


class _Block:
    """The cores of one replica, and the positions of its copies."""

    def __init__(self, topology: Topology, shape: Any, stride: Any, num_replicas: int):
        self._topology, self._mesh = topology, topology.mesh_shape
        self.shape = _sizes("computation_shape", shape)
        self.stride = _sizes("computation_stride", stride)
        is_number = isinstance(num_replicas, (int, np.integer)) and not isinstance(num_replicas, bool)
        if not is_number or num_replicas < 1:
            raise InvalidArgumentError(f"num_replicas must be a number of at least 1, got {num_replicas!r}.")
        self._num_replicas = int(num_replicas)
        self._footprint = self.shape * self.stride
        if (self._footprint > self._mesh).any():
            raise InvalidArgumentError(
                f"computation footprint {self._footprint.tolist()} does not fit in TPU topology shape "
                f"{self._mesh.tolist()}. Make computation_shape={self.shape.tolist()} or computation_stride="
                f"{self.stride.tolist()} smaller."
            )
        self._counts = self._mesh // self._footprint * self.stride
        self._most = int(np.prod(self._counts))
        if num_replicas > self._most:
            raise InvalidArgumentError(
                f"requested {num_replicas} replicas but only {self._most} replicas with shape {self.shape.tolist()} and "
                f"computation_stride {self.stride.tolist()} fit in a TPU mesh of shape {self._mesh.tolist()}."
            )

    @property
    def can_be_a_ring(self) -> bool:
        """True if the replicas fill the topology, chip by chip."""
        return (
            self.shape[-1] == self._mesh[-1]
            and int(np.prod(self.stride)) == 1
            and self._num_replicas == self._most
        )

    def _replica_shape(self) -> list[int]:
        """Returns the number of adjacent replicas in each direction: nearly a cube, the tightest direction first.

        Among equally tight directions the cores of a chip come first, then x, y and z, so that neighbours share a host.
        """
        shape = [0] * RANK
        left = self._num_replicas
        order = sorted(range(RANK), key=lambda dim: (self._counts[dim], (dim + 1) % RANK))
        for position, dim in enumerate(order):
            wanted = math.ceil(left ** (1.0 / (RANK - position)))
            shape[dim] = min(wanted, int(self._counts[dim]))
            left = -(-left // shape[dim])
        return shape

    def in_rings(self) -> np.ndarray:
        """Assigns replicas in a ring, with the chips of each in a ring."""
        cores = int(self._mesh[-1])
        inner = np.repeat(ring(*self.shape[:3].tolist()), cores, axis=0)
        core = np.tile(np.arange(cores), len(inner) // cores)[:, None]
        return np.stack(
            [
                np.concatenate([np.asarray(place) * self.shape[:3] + inner, core], axis=1)
                for place in ring(*self._replica_shape()[:3])
            ]
        )

    def in_a_mesh(self) -> np.ndarray:
        """Assigns replicas row by row, those on one chip first, with the cores of each in the order of their
        coordinates.
        """
        *sizes, cores = self._replica_shape()
        block = np.stack(np.meshgrid(*map(np.arange, self.shape), indexing="ij"), -1).reshape(-1, RANK)
        replicas = []
        for replica in range(self._num_replicas):
            core, rest = replica % cores, replica // cores
            x, rest = rest % sizes[0], rest // sizes[0]
            place = np.array([x, rest % sizes[1], rest // sizes[1], core])
            start = place // self.stride * self._footprint + place % self.stride
            replicas.append(start + block * self.stride)
        return np.stack(replicas)

    def in_order_of_tasks(self) -> np.ndarray:
        """Assigns the existing devices, task by task, if the topology lacks devices."""
        devices = self._topology.device_coordinates.reshape(-1, RANK)
        size = int(np.prod(self.shape))
        if int(np.prod(self.stride)) != 1 or self._num_replicas * size > len(devices):
            raise InvalidArgumentError(
                f"{self._topology} lacks {len(self._topology.missing_devices)} device(s): {self._num_replicas} replicas of "
                f"{size} devices need {self._num_replicas * size} of the {len(devices)} existing devices, and a "
                "computation_stride of 1."
            )
        return devices[: self._num_replicas * size].reshape(self._num_replicas, size, RANK)


def _sizes(name: str, value: Any) -> np.ndarray:
    sizes = np.ones(RANK, np.int32) if value is None else np.asarray(value)
    if sizes.shape != (RANK,) or sizes.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{name} must have shape [{RANK}] and integers; got {value!r}.")
    if (sizes < 1).any():
        raise InvalidArgumentError(f"{name} must be positive; got {name}={sizes.tolist()}.")
    return sizes.astype(np.int32)
