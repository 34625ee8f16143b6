"""Devices, replicas and the mesh between them; all index arithmetic; how arrays and programs get onto them."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._src import jax_compat
from replicax._src.cluster.layout import TASKS_ON_HOST_VARIABLE, num_usable_cores
from replicax._src.cluster.peers import Peers, joined_peers
from replicax._src.cluster.shared_program import SharedProgram
from replicax._src.devices.autoshard import WorkerShare
from replicax._src.errors import BackendStartedError, DeviceError, InvalidArgumentError
from replicax._src.jax_compat import Device

REPLICA_AXIS = "replica"
LOGICAL_AXIS = "logical"
GROUP_AXIS, SHARD_AXIS = "group", "shard"
log = logging.getLogger("replicax")

# What JAX's installation page names in 2026.
_NVIDIA = '"jax[cuda13]" (or "jax[cuda12]", for older drivers)'
_PACKAGES = {"gpu": _NVIDIA, "cuda": _NVIDIA, "rocm": '"jax[rocm7-local]"', "tpu": '"jax[tpu]"'}

# XLA runs the collectives of all virtual CPU devices on one thread pool of this many threads; with fewer
# threads than waiting participants the process is aborted after 40 s (seen with jax 0.10 on 2 cores).
_CPU_POOL_THREADS = 16
# How many processes of a job a launcher has started on this host: set by ours, torchrun and Open MPI.
_TASKS_ON_HOST = (TASKS_ON_HOST_VARIABLE, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_DEVICE_NAME = re.compile(
    r"^(?:/?job:[^/]+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(?P<kind>[A-Za-z]+)(?::(?P<index>\d+))?$"
)


def replica_mesh(grid: Sequence[Sequence[Device]]) -> Mesh:
    """The mesh of R replicas of L devices each. Here axes are named, nowhere else.

    The logical devices of a replica are one axis, or, where L is no prime, one for each prime factor, so that an array
    can be cut along several dims. With one logical device there is no such axis.

    Args:
      grid: [R][L], R and L at least 1.
    """
    num_logical = len(grid[0])
    factors = _prime_factors(num_logical)
    names = [LOGICAL_AXIS] if len(factors) == 1 else [f"{LOGICAL_AXIS}_{i}" for i in range(len(factors))]
    devices = np.empty((len(grid), num_logical), dtype=object)
    devices[:] = [list(of_replica) for of_replica in grid]
    return Mesh(devices.reshape(len(grid), *factors), (REPLICA_AXIS, *names))


def is_replica_mesh(mesh: Any) -> bool:
    """Whether a mesh has the axes of one that ``replica_mesh`` makes."""
    first, *others = mesh.axis_names
    return first == REPLICA_AXIS and all(name.partition("_")[0] == LOGICAL_AXIS for name in others)


def _prime_factors(number: int) -> list[int]:
    factors, factor = [], 2
    while number > 1:
        while number % factor:
            factor += 1
        factors.append(factor)
        number //= factor
    return factors


@dataclass(frozen=True, eq=False)
class Topology:
    """The devices of R replicas as a mesh with the axis ``replica``: one for each replica, or L logical ones.

    In several processes all have the same topology, and each the devices of some adjacent replicas.

    Attributes:
      devices: R devices, the first one of each replica, in replica order; none of those of another process, a worker
        with variables on servers.
      peers: The processes that they belong to; None if they are all of this one.
      mesh: The mesh over them.
      replicated: The sharding of an array that every device holds whole.
      per_replica: The sharding of an array [R, ...] of which device r holds row r.
      stacked: The sharding of an array [steps, R, ...] of several such.
      bytes_per_pack: In buffers of how many bytes arrays that are summed together travel; 0 is what suits the devices.
      is_ahead: Nothing runs on the devices, which may not be here: arrays for them are only described.
    """

    devices: tuple[Device, ...]
    peers: Peers | None
    mesh: Mesh | AbstractMesh
    replicated: NamedSharding
    per_replica: NamedSharding
    stacked: NamedSharding
    bytes_per_pack: int = 0
    is_ahead: bool = False

    @classmethod
    def of(cls, devices: Sequence[Device], bytes_per_pack: int = 0) -> Topology:
        """The topology of ``devices``, replica r on the r-th."""
        return cls.of_mesh(replica_mesh([[device] for device in devices]), bytes_per_pack)

    @classmethod
    def of_mesh(cls, mesh: Mesh, bytes_per_pack: int = 0, *, is_ahead: bool = False) -> Topology:
        """The topology of a mesh that ``replica_mesh`` has made."""
        is_shared = len({device.process_index for device in mesh.devices.flat}) > 1 and not is_ahead
        peers = joined_peers() if is_shared else None
        return cls(
            tuple(mesh.devices.reshape(len(mesh.devices), -1)[:, 0]),
            peers,
            mesh,
            NamedSharding(mesh, PartitionSpec()),
            NamedSharding(mesh, PartitionSpec(REPLICA_AXIS)),
            NamedSharding(mesh, PartitionSpec(None, REPLICA_AXIS)),
            bytes_per_pack,
            is_ahead,
        )

    @classmethod
    def elsewhere(cls, num_replicas: int, *, is_cpu: bool = True) -> Topology:
        """That of another process, for which programs are made here. Values are kept on the host."""
        # jax 0.12 would have explicit axes otherwise, unlike those of a Mesh.
        mesh = AbstractMesh((num_replicas,), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
        whole, row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
        topology = cls((), None, mesh, whole, row, NamedSharding(mesh, PartitionSpec(None, REPLICA_AXIS)))
        vars(topology)["is_cpu"] = is_cpu
        return topology

    @functools.cached_property
    def num_replicas(self) -> int:
        return self.mesh.shape[REPLICA_AXIS]

    @functools.cached_property
    def num_logical_devices(self) -> int:
        """L: how many devices each replica has."""
        return self.mesh.size // self.num_replicas

    def logical_spec(self, pieces: Sequence[int], otherwise: Any = None) -> PartitionSpec:
        """How an array is cut into ``pieces`` along its dims, L in all, one for each logical device.

        Args:
          otherwise: Of dims that are not cut: None (whole on each device), or ``PartitionSpec.UNCONSTRAINED``.
        """
        axes = {name: self.mesh.shape[name] for name in self.mesh.axis_names[1:]}
        dims = []
        for count in pieces:
            names = []
            for name in list(axes):
                if count % axes[name] == 0:
                    count //= axes.pop(name)
                    names.append(name)
            dims.append(tuple(names) or otherwise)
        return PartitionSpec(*dims)

    def in_shards(self, dim: int, num_shards: int) -> NamedSharding:
        """The sharding of an array that is cut along ``dim``, a piece for each of ``num_shards`` adjacent replicas.

        The mesh has the same devices in the same order, with the replica axis in two: programs take arrays of both.
        """
        devices = np.array(self.devices, dtype=object).reshape(-1, num_shards)
        spec = PartitionSpec(*[None] * dim, SHARD_AXIS)
        return NamedSharding(Mesh(devices, (GROUP_AXIS, SHARD_AXIS)), spec)

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """[R, L]: the devices of each replica; none, [R, 0], of those of another process."""
        if isinstance(self.mesh, AbstractMesh):
            return np.empty((self.num_replicas, 0), dtype=object)
        return self.mesh.devices.reshape(self.num_replicas, -1)

    @functools.cached_property
    def device_set(self) -> frozenset[Device]:
        """All devices of all replicas."""
        return frozenset(self.grid.flat)

    @functools.cached_property
    def is_cpu(self) -> bool:
        return self.devices[0].platform == "cpu"

    # --- this process's part --------------------------------------------------------------------------

    @functools.cached_property
    def local_replicas(self) -> range:
        """The numbers of this process's replicas."""
        if self.peers is None:
            return range(self.num_replicas)
        count = self.num_replicas // len(self.peers)
        return range(self.peers.number * count, (self.peers.number + 1) * count)

    @functools.cached_property
    def share(self) -> WorkerShare:
        """Which part of the input this process feeds."""
        if self.peers is None:
            return WorkerShare(num_replicas=self.num_replicas)
        return WorkerShare(len(self.peers), self.peers.number, self.num_replicas)

    @functools.cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """The devices of this process's replicas: of each the first one."""
        return tuple(self.devices[r] for r in self.local_replicas) if self.devices else ()

    @property
    def all_local_devices(self) -> tuple[Device, ...]:
        """All devices of this process's replicas."""
        return tuple(device for _, device in self._placed_parts)

    @functools.cached_property
    def _placed_parts(self) -> tuple[tuple[int, Device], ...]:
        """All devices of this process's replicas, in the mesh's order, each with the number of its replica among
        them.
        """
        return tuple((i, device) for i, r in enumerate(self.local_replicas) for device in self.grid[r])

    @functools.cached_property
    def needs_token(self) -> bool:
        """Whether programs that meet are to be counted: on CPU too many of them must not wait. See ``in_flight``."""
        return self.is_cpu and bool(self.devices) and self.mesh.size > 1 and self.peers is None

    # --- arrays onto the devices ------------------------------------------------------------------------

    def put_whole(self, pytree: Any) -> Any:
        """Arrays [...] of this process, or host values, whole on every device.

        In several processes each has to give the same values; nobody compares them.
        """
        return self._put(pytree, self.replicated)

    def put_rows(self, pytree: Any) -> Any:
        """Arrays [R, ...], or host values, row r on the device of replica r. Each process takes its own rows."""
        return self._put(pytree, self.per_replica)

    def put_by(self, value: Any, sharding: NamedSharding) -> Any:
        """An array that lies on all devices, or a host value that all processes have, by ``sharding``."""
        return self._put(value, sharding)

    def _put(self, pytree: Any, sharding: NamedSharding) -> Any:
        if self.is_ahead:
            return jax.tree_util.tree_map(lambda value: jax_compat.described(value, sharding), pytree)
        if not self.devices:
            return pytree
        if self.peers is None:
            return jax.device_put(pytree, sharding)
        return jax.tree_util.tree_map(lambda value: self._put_shared(value, sharding), pytree)

    def _put_shared(self, value: Any, sharding: NamedSharding) -> jax.Array:
        is_elsewhere = isinstance(value, jax.Array) and not isinstance(value, jax_compat.Tracer)
        if is_elsewhere and not value.is_fully_addressable and value.sharding != sharding:
            return self.compile(_unchanged, "placing an array", out_shardings=sharding)(value)
        return jax_compat.put(value, sharding)

    def join_rows(self, rows: Sequence[Any], shape: Sequence[int]) -> jax.Array:
        """The array [R, ...] of which this process has ``rows``.

        Args:
          rows: [1, ...] for each replica of this process; in a trace for each of all replicas.
          shape: Of one row.
        """
        if not self.devices or (len(rows) == self.num_replicas and not jax_compat.is_evaluating()):
            return jax.numpy.concatenate(rows)
        parts = [jax.device_put(rows[i], device) for i, device in self._placed_parts]
        return jax.make_array_from_single_device_arrays((self.num_replicas, *shape), self.per_replica, parts)

    def put_parts(
        self, shape: tuple[int, ...], parts: Sequence[np.ndarray], sharding: NamedSharding
    ) -> jax.Array:
        """The array of a shape of which each replica of this process has one of ``parts``, by ``sharding``."""
        if self.num_logical_devices > 1:
            parts = [parts[i] for i, _ in self._placed_parts]
        return jax_compat.put_parts(shape, parts, sharding)

    def put_stacked(self, pytree: Any) -> Any:
        """Arrays [steps, rows of this process's replicas, ...] as [steps, R, ...]."""
        if self.peers is None:
            return jax.device_put(pytree, self.stacked)
        return jax.tree_util.tree_map(self._put_stacked_shared, pytree)

    def _put_stacked_shared(self, value: Any) -> jax.Array:
        shape = (value.shape[0], self.num_replicas, *value.shape[2:])
        parts = [jax.device_put(value[:, i : i + 1], device) for i, device in self._placed_parts]
        return jax.make_array_from_single_device_arrays(shape, self.stacked, parts)

    def put_leaders(self, value: Any) -> jax.Array:
        """The first process's value, whole on every device; the others give one of the same shape and dtype."""
        if self.peers is None:
            return self.put_whole(value)
        rows = self.join_rows([value[None]] * len(self.local_replicas), value.shape)
        return self._take_first(rows)

    def put_agreed(self, values: Sequence[jax.Array], names: Sequence[str]) -> list[jax.Array]:
        """Values of variables, or of state, that each process has made by itself, whole on every device.

        Where they differ, all take the first process's, and say so.

        Raises:
          InvalidArgumentError: The processes have set different variables.
          ClusterFailureError: Another process has set none.
        """
        if self.peers is None:
            return [self.put_whole(value) for value in values]
        of_all = self.peers.gather_before_program(
            "comparing values that were set outside of programs",
            [[name, _digest(value)] for name, value in zip(names, values, strict=True)],
        )
        if any([name for name, _ in their] != list(names) for their in of_all):
            have = "\n".join(
                f"  {task}: {', '.join(name for name, _ in their)}"
                for task, their in zip(self.peers.names, of_all, strict=True)
            )
            raise InvalidArgumentError(
                f"The workers have set different variables since the last program:\n{have}\n"
                "What is set outside of programs (weights that are loaded, say, or the state of run_steps) must be set by all workers."
            )
        differ = [i for i in range(len(values)) if len({their[i][1] for their in of_all}) > 1]
        if differ:
            shown = ", ".join(names[i] for i in differ[:5]) + (", …" if len(differ) > 5 else "")
            log.warning(
                "The workers gave %d array(s) different values (%s): all go on with those of %s. Give the same values "
                "everywhere; for random ones use the same seed.",
                len(differ),
                shown,
                self.peers.names[0],
            )
        return [self.put_leaders(v) if i in differ else self.put_whole(v) for i, v in enumerate(values)]

    @functools.cached_property
    def _take_first(self) -> Any:
        return self.compile(
            _first_row, "taking the first worker's initial value", out_shardings=self.replicated
        )

    # --- programs ---------------------------------------------------------------------------------------

    def on_replicas(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """``jax.shard_map`` of what one replica computes; over its logical devices the compiler divides it."""
        return jax_compat.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )

    def compile(
        self, function: Callable[..., Any], name: str, *, has_one_form: bool = False, **options: Any
    ) -> Any:
        """``jax.jit`` for the devices. In several processes all must call the result, in the same order.

        Args:
          function: Pure.
          name: For people.
          has_one_form: The result is always called with arrays of the same shapes and dtypes.
          **options: Of ``jax.jit``.
        """
        if not self.devices:
            options.pop("out_shardings", None)
        compiled = jax.jit(function, **options)
        if self.peers is None:
            return compiled
        return SharedProgram(compiled, name, self.peers, has_one_form=has_one_form)


def _digest(value: jax.Array) -> str:
    return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()


def _unchanged(value: Any) -> Any:
    return value


def _first_row(rows: Any) -> Any:
    return rows[0]


def local_devices() -> list[Device]:
    """The devices of JAX's default backend in this process; starts it if it has not started."""
    prepare_backend()
    return list(jax.local_devices())


def set_local_devices(num_devices: int) -> None:
    """Makes ``num_devices`` virtual CPU devices in this process, to try a program on without accelerators.

    Call it before anything else uses JAX: the devices cannot change once JAX's backend has started.

    Args:
      num_devices: At least 1.

    Raises:
      BackendStartedError: The backend has started with another number of CPU devices.
      DeviceError: ``num_devices`` is not a positive int.
    """
    if not isinstance(num_devices, int) or isinstance(num_devices, bool) or num_devices < 1:
        raise DeviceError(f"set_local_devices takes a number of devices of at least 1, got {num_devices!r}.")
    if jax_compat.backend_started():
        have = len(jax.local_devices(backend="cpu"))
        if have == num_devices:
            return
        raise BackendStartedError(
            f"set_local_devices({num_devices}): JAX's backend has already started with {have} CPU device(s), "
            f"and its devices can no longer be chosen. Call replicax.config.set_local_devices({num_devices}) "
            f"before anything uses JAX (before the first array, before the first strategy), or start Python "
            f"with the environment variable JAX_NUM_CPU_DEVICES={num_devices}."
        )
    jax.config.update("jax_num_cpu_devices", num_devices)
    prepare_backend()


def cpu_pool_is_large() -> bool:
    """Whether XLA's CPU thread pool was made large enough for queued collectives."""
    value = os.environ.get("PJRT_NPROC", "")
    return value.isdigit() and int(value) >= _CPU_POOL_THREADS


def prepare_backend(num_processes_here: int = 1) -> None:
    """Keeps compiled programs and, unless the user has, bounds XLA's CPU threads. Call it before JAX's backend starts.

    Several devices in one process need threads for queued collectives. Processes with one device each share the cores:
    each thread more than a core waits for the time slice of another (two workers on two cores, jax 0.10: a step of a
    small network took 6 to 7 ms instead of 1.5).

    Args:
      num_processes_here: How many processes of the cluster share this host; launchers may know of more.
    """
    if jax_compat.backend_started():
        return
    jax_compat.keep_programs()
    num_told = [int(text) for text in map(os.environ.get, _TASKS_ON_HOST) if text and text.isdigit()]
    num_processes_here = max(num_processes_here, *num_told, 1)
    if jax_compat.has_several_cpu_devices():
        os.environ.setdefault("PJRT_NPROC", str(_CPU_POOL_THREADS))
    elif num_processes_here > 1:
        os.environ.setdefault("PJRT_NPROC", str(max(1, num_usable_cores() // num_processes_here)))


def resolve_devices(devices: Sequence[str | Device] | str | Device | int | None) -> list[Device]:
    """The JAX devices that names or devices stand for; a number is that of this process's first ones, None is all of
    them.

    Raises:
      DeviceError: One does not exist, or repeats, or the list is empty.
    """
    if devices is None:
        return local_devices()
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _first_devices(devices)
    if not isinstance(devices, (str, jax.Device, Iterable)):
        raise DeviceError(
            f"`devices` must be a list of names such as 'cpu:0' or of jax.Device, or a number of devices, got {devices!r}."
        )
    given: Any = [devices] if isinstance(devices, (str, jax.Device)) else devices
    resolved = [resolve_device(device) for device in given]
    if not resolved:
        raise DeviceError("`devices` is empty; name at least one, or leave it out for all of this machine.")
    repeated = sorted({device_name(d) for d in resolved if resolved.count(d) > 1})
    if repeated:
        raise DeviceError(
            f"No duplicates allowed in `devices` argument: {', '.join(repeated)} stands more than once in "
            f"{[str(d) for d in given]}. Each replica needs a device of its own; for several replicas on "
            f"one CPU call replicax.config.set_local_devices(n) first."
        )
    return resolved


def _first_devices(num_devices: int) -> list[Device]:
    found = local_devices()
    if not 1 <= num_devices <= len(found):
        raise DeviceError(
            f"{num_devices!r} devices were asked for, and this process has {len(found)}: {', '.join(map(device_name, found))}. "
            f"Give a number from 1 to {len(found)}, or names of devices; for n virtual CPU devices call "
            "replicax.config.set_local_devices(n) at the start of the program."
        )
    return found[:num_devices]


def resolve_device(device: Any) -> Device:
    """The JAX device that ``"cpu:0"``, ``"/gpu:1"``, ``"/device:GPU:0"``, TensorFlow's full name or a device is."""
    if isinstance(device, jax.Device):
        return device
    match = _DEVICE_NAME.match(device) if isinstance(device, str) else None
    if match is None:
        raise DeviceError(
            f"{device!r} is not a device. Give a name such as 'cpu:0', '/gpu:1' or '/device:GPU:0', or a "
            f"jax.Device."
        )
    kind, index = match["kind"].lower(), int(match["index"] or 0)
    prepare_backend()
    try:
        candidates = jax.local_devices(backend=kind)
    except RuntimeError:
        candidates = []
    if index >= len(candidates):
        raise DeviceError(_missing_device_text(device, kind, len(candidates)))
    return candidates[index]


def _missing_device_text(device: str, kind: str, num_found: int) -> str:
    have = ", ".join(device_name(d) for d in jax.local_devices()) or "none"
    text = f"Device {device!r} does not exist: this process has {num_found} {kind} device(s). It has: {have}."
    if kind == "cpu":
        text += " Call replicax.config.set_local_devices(n) at the start of the program for n virtual ones."
    elif not num_found and kind in _PACKAGES:
        text += (
            f" If the machine has one, install JAX for it: pip install {_PACKAGES[kind]}. Without one, try the program on n "
            "virtual CPU devices: replicax.config.set_local_devices(n)."
        )
    return text


def device_name(device: Device) -> str:
    """The short name of a device, e.g. ``cpu:0``."""
    return f"{device.platform}:{device.id}"
