"""Devices, replicas and the mesh between them; all index arithmetic; placement of arrays and programs on devices."""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._src.cluster.peers import Peers, joined_peers
from replicax._src.cluster.shared_program import SharedProgram
from replicax._src.devices.autoshard import WorkerShare
from replicax._src.devices.live_workers import LiveWorkers, not_for_survivors
from replicax._src.devices.sums_of_processes import SumsOfProcesses
from replicax._src.jax_internals import jax_compat
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError
from replicax._src.vocabulary.options import whole_number

REPLICA_AXIS = "replica"
LOGICAL_AXIS = "logical"
GROUP_AXIS, SHARD_AXIS = "group", "shard"
log = logging.getLogger("replicax")

_PER_REPLICA = "A per-replica value, such as an element of a distributed dataset,"


def replica_mesh(grid: Sequence[Sequence[Device]]) -> Mesh:
    """Returns the mesh of R replicas of L devices each. Only this function names its axes.

    The logical devices of a replica form one axis for each prime factor of L, so that an array can be split along
    several dims. With one logical device there is no such axis.

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
    """True if a mesh has the axes of one from ``replica_mesh``."""
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
    """The devices of R replicas as a mesh with the axis ``replica``. A replica has one device or L logical devices.

    All processes have the same topology. Each process has the devices of some adjacent replicas. A topology of
    survivors is different: each process has one device of its own, which runs one replica after the other, and no array
    or program is of several processes.

    Attributes:
      devices: R devices, the first device of each replica, in replica order. Empty for another process, a worker with
        variables on servers.
      peers: The processes of the devices; None if all devices belong to this process.
      mesh: The mesh of the devices.
      replicated: The sharding of an array that is replicated on every device.
      per_replica: The sharding of an array [R, ...] of which device r holds row r.
      stacked: The sharding of an array [steps, R, ...] of several of these.
      bytes_per_pack: The size of the buffers in which arrays are summed together; 0 chooses it for the devices.
      is_ahead: True if nothing runs on the devices, which may be absent. Their arrays are only described.
      survivors: The live workers, which compute the replicas of the dead ones too; None if a death ends the job.
      host_sums: The sums of processes on their hosts, which are faster there than programs of all devices; None if
        there are none.
    """

    devices: tuple[Device, ...]
    peers: Peers | None
    mesh: Mesh | AbstractMesh
    replicated: NamedSharding
    per_replica: NamedSharding
    stacked: NamedSharding
    bytes_per_pack: int = 0
    is_ahead: bool = False
    survivors: LiveWorkers | None = None
    host_sums: SumsOfProcesses | None = None

    @classmethod
    def of(
        cls, devices: Sequence[Device], bytes_per_pack: int = 0, *, devices_per_replica: int = 1
    ) -> Topology:
        """Returns the topology of ``devices``, of which each replica has the next ``devices_per_replica``.

        Raises:
          InvalidArgumentError: The number of a process's devices is not divisible by ``devices_per_replica``.
        """
        count = whole_number("devices_per_replica", devices_per_replica, least=1)
        of_processes = collections.Counter(device.process_index for device in devices)
        for number, found in of_processes.items():
            if found % count:
                whose = f"process {number} has {found}" if len(of_processes) > 1 else f"there are {found}"
                allowed = ", ".join(str(n) for n in range(1, found + 1) if found % n == 0)
                raise InvalidArgumentError(
                    f"devices_per_replica={count} does not divide the number of devices: {whose}. All replicas have equally many "
                    f"devices of one process. Give one of {allowed}, or other devices."
                )
        grid = [devices[i : i + count] for i in range(0, len(devices), count)]
        return cls.from_mesh(replica_mesh(grid), bytes_per_pack)

    @classmethod
    def from_mesh(cls, mesh: Mesh, bytes_per_pack: int = 0, *, is_ahead: bool = False) -> Topology:
        """Returns the topology of a mesh from ``replica_mesh``."""
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
    def of_survivors(
        cls, device: Device, peers: Peers, num_replicas: int, survivors: LiveWorkers
    ) -> Topology:
        """Returns the topology of R replicas of which the live workers compute all, each on a device of its own.

        Args:
          device: The device of this process.
          peers: The processes.
          num_replicas: R, the number of all tasks.
          survivors: The live workers.
        """
        own = cls.of([device])
        topology = cls(
            (device,) * num_replicas,
            peers,
            own.mesh,
            own.replicated,
            own.replicated,  # each process has the rows of all replicas
            own.replicated,
            survivors=survivors,
        )
        grid = np.empty((num_replicas, 1), dtype=object)
        grid[:] = device
        vars(topology).update(
            num_replicas=num_replicas,
            share=WorkerShare(num_replicas=num_replicas),  # an adopter needs the rows of the others
            grid=grid,
            local_devices=(device,),
            _placed_parts=((0, device),),
        )
        return topology

    @classmethod
    def elsewhere(cls, num_replicas: int, *, is_cpu: bool = True) -> Topology:
        """Returns the topology of another process, for which this process makes programs. Values stay on the host."""
        # Otherwise jax 0.12 would make explicit axes, unlike those of a Mesh.
        mesh = AbstractMesh((num_replicas,), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
        whole, row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
        topology = cls((), None, mesh, whole, row, NamedSharding(mesh, PartitionSpec(None, REPLICA_AXIS)))
        vars(topology)["is_cpu"] = is_cpu
        return topology

    @functools.cached_property
    def num_replicas(self) -> int:
        return self.mesh.shape[REPLICA_AXIS]

    @property
    def axes(self) -> list[tuple[str, int]]:
        """The name of the axis of the replicas, with their number, for traces of one replica."""
        return [(REPLICA_AXIS, self.num_replicas)]

    @functools.cached_property
    def num_logical_devices(self) -> int:
        """L, the number of devices of each replica."""
        return self.mesh.size // self.mesh.shape[REPLICA_AXIS]

    def logical_spec(self, pieces: Sequence[int], otherwise: Any = None) -> PartitionSpec:
        """Returns the spec of an array that is split into ``pieces`` along its dims, L pieces in all, one for each
        logical device.

        Args:
          otherwise: The entry of dims that are not split: None (replicated), or ``PartitionSpec.UNCONSTRAINED``.
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

    def mesh_of_shards(self, num_shards: int) -> Mesh:
        """Returns a mesh of the same devices in the same order, with the replica axis split in two: groups of
        ``num_shards`` adjacent replicas, and the replicas of a group.

        Programs take arrays of both meshes.
        """
        assert isinstance(self.mesh, Mesh)
        devices, names = self.mesh.devices, self.mesh.axis_names[1:]
        return Mesh(devices.reshape(-1, num_shards, *devices.shape[1:]), (GROUP_AXIS, SHARD_AXIS, *names))

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """[R, L] the devices of each replica; [R, 0] for another process."""
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

    @property
    def spans_processes(self) -> bool:
        """True if arrays and programs are of several processes."""
        return self.peers is not None and self.survivors is None

    @property
    def local_replicas(self) -> Sequence[int]:
        """The numbers of the replicas of this process. Those of a survivor change when another one dies."""
        return self._own_replicas if self.survivors is None else self.survivors.replicas

    @functools.cached_property
    def _own_replicas(self) -> range:
        if self.peers is None:
            return range(self.num_replicas)
        count = self.num_replicas // len(self.peers)
        return range(self.peers.number * count, (self.peers.number + 1) * count)

    @functools.cached_property
    def share(self) -> WorkerShare:
        """The part of the input that this process feeds."""
        if self.peers is None:
            return WorkerShare(num_replicas=self.num_replicas)
        return WorkerShare(len(self.peers), self.peers.number, self.num_replicas)

    @functools.cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """The first device of each of this process's replicas."""
        return tuple(self.devices[r] for r in self.local_replicas) if self.devices else ()

    @property
    def all_local_devices(self) -> tuple[Device, ...]:
        """All devices of this process's replicas."""
        return tuple(device for _, device in self._placed_parts)

    @functools.cached_property
    def _placed_parts(self) -> tuple[tuple[int, Device], ...]:
        """All devices of this process's replicas, in mesh order, with the number of each one's replica in this
        process.
        """
        return tuple((i, device) for i, r in enumerate(self.local_replicas) for device in self.grid[r])

    @functools.cached_property
    def needs_token(self) -> bool:
        """True if programs with collectives must be counted, because too many waiting on CPU would deadlock. See
        ``in_flight``.
        """
        return self.is_cpu and bool(self.devices) and self.mesh.size > 1 and self.peers is None

    # --- arrays onto the devices ------------------------------------------------------------------------

    def put_whole(self, pytree: Any) -> Any:
        """Replicates arrays [...] of this process, or host values, on every device.

        All processes must give the same values, which is not checked.
        """
        return self._put(pytree, self.replicated)

    def put_rows(self, pytree: Any) -> Any:
        """Puts arrays [R, ...], or host values, with row r on the device of replica r. Each process takes its own
        rows.
        """
        return self._put(pytree, self.per_replica)

    def put_by(self, value: Any, sharding: NamedSharding) -> Any:
        """Puts an array that is on all devices, or a host value that all processes have, into ``sharding``."""
        return self._put(value, sharding)

    def _put(self, pytree: Any, sharding: NamedSharding) -> Any:
        if self.is_ahead:
            return jax.tree_util.tree_map(lambda value: jax_compat.described(value, sharding), pytree)
        if not self.devices:
            return pytree
        if not self.spans_processes:
            return jax.device_put(pytree, sharding)
        return jax.tree_util.tree_map(lambda value: self._put_shared(value, sharding), pytree)

    def _put_shared(self, value: Any, sharding: NamedSharding) -> jax.Array:
        is_elsewhere = isinstance(value, jax.Array) and not isinstance(value, jax_compat.Tracer)
        if is_elsewhere and not value.is_fully_addressable and value.sharding != sharding:
            return self.compile(_unchanged, "placing an array", out_shardings=sharding)(value)
        return jax_compat.put(value, sharding)

    def join_rows(self, rows: Sequence[Any], shape: Sequence[int]) -> jax.Array:
        """Returns the array [R, ...] of which this process has ``rows``.

        Args:
          rows: [1, ...] for each replica of this process. In a trace, one for each of all replicas.
          shape: The shape of one row.
        """
        if not self.devices or (len(rows) == self.num_replicas and not jax_compat.is_evaluating()):
            return jax.numpy.concatenate(rows)
        if self.survivors is not None:  # each process has the rows of all replicas
            return self.put_whole(jax.numpy.concatenate(rows))
        parts = [jax.device_put(rows[i], device) for i, device in self._placed_parts]
        return jax.make_array_from_single_device_arrays((self.num_replicas, *shape), self.per_replica, parts)

    def rows_here(self, array: jax.Array) -> list[np.ndarray]:
        """Returns the rows [...] of this process's replicas of an array [R, ...], without a copy. One device for each
        replica.
        """
        return [np.asarray(array.addressable_data(i))[0] for i in range(len(self.local_replicas))]

    def put_same(self, value: np.ndarray) -> jax.Array:
        """Replicates an array that all processes have computed alike on every device. The devices may adopt its memory,
        so it must not change.
        """
        aval, devices = _aval_and_devices(value.shape, value.dtype, self.replicated)
        return jax_compat.put_on_devices(aval, self.replicated, [value] * len(devices), devices)

    def map_rows(self, function: Callable[[Any], Any], array: jax.Array) -> jax.Array:
        """Applies a function to each row of this process of an array [R, ...]. It does not communicate.

        Args:
          function: Takes and returns [1, ...].
        """
        shards = array.addressable_shards
        parts = [jax.device_put(function(shard.data), shard.device) for shard in shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    def put_parts(
        self, shape: tuple[int, ...], parts: Sequence[np.ndarray], sharding: NamedSharding
    ) -> jax.Array:
        """Returns the array of the given shape and sharding of which each replica of this process has one of
        ``parts``.
        """
        if self.num_logical_devices > 1:
            parts = [parts[i] for i, _ in self._placed_parts]
        # ``make_array_from_callback`` does the same with more checks in Python: 34 µs for two arrays on two devices where
        # this takes 18, and ``device_put`` 78 (jax 0.10).
        dtype = jax.dtypes.canonicalize_dtype(parts[0].dtype)
        if dtype != parts[0].dtype:
            parts = [part.astype(dtype) for part in parts]
        aval, devices = _aval_and_devices(shape, dtype, sharding)
        return jax_compat.put_on_devices(aval, sharding, parts, devices)

    def put_stacked(self, pytree: Any) -> Any:
        """Puts arrays [steps, rows of this process's replicas, ...] as arrays [steps, R, ...]."""
        self.refuse_survivors(_PER_REPLICA)
        if self.peers is None:
            return jax.device_put(pytree, self.stacked)
        return jax.tree_util.tree_map(self._put_stacked_shared, pytree)

    def _put_stacked_shared(self, value: Any) -> jax.Array:
        shape = (value.shape[0], self.num_replicas, *value.shape[2:])
        parts = [jax.device_put(value[:, i : i + 1], device) for i, device in self._placed_parts]
        return jax.make_array_from_single_device_arrays(shape, self.stacked, parts)

    def put_leaders(self, value: Any, layout: NamedSharding | None = None) -> jax.Array:
        """Replicates the first process's value on every device, or puts it in shards. The other processes give a value
        of the same shape and dtype.

        Args:
          layout: The sharding of the result. If all values are equal, no device gets the full array.
        """
        if self.peers is None:
            return self.put_by(value, layout or self.replicated)
        if self.survivors is not None:
            of_all = self.peers.gather("initial values", digest(value), "to compare initial values")
            return (
                self._leaders([value])[0]
                if len(set(of_all)) > 1
                else self.put_whole(jax_compat.copied(value))
            )
        if layout is not None and not jax_compat.is_typed_key(value.dtype):
            of_all = self.peers.gather("variables in shards", digest(value), "to make variables in shards")
            if len(set(of_all)) == 1:
                return jax_compat.put_shards(np.asarray(value), layout)
        here = jax_compat.copied(value) if isinstance(value, np.ndarray) else value
        rows = self.join_rows([here[None]] * len(self.local_replicas), here.shape)
        first = self._take_first(rows)
        return first if layout is None else self.put_by(first, layout)

    def put_agreed(self, values: Sequence[jax.Array], names: Sequence[str]) -> list[jax.Array]:
        """Replicates values of variables or state, which each process has set itself, on every device.

        Where they differ, all take the first process's values and log a warning.

        Raises:
          InvalidArgumentError: The processes have set different variables.
          ClusterFailureError: Another process has set no variables.
        """
        if self.peers is None:
            return [self.put_whole(value) for value in values]
        of_all = self.peers.gather(
            "values",
            [[name, digest(value)] for name, value in zip(names, values, strict=True)],
            "to compare values that were set outside of programs",
        )
        if any([name for name, _ in their] != list(names) for their in of_all):
            have = "\n".join(
                f"  {task}: {', '.join(name for name, _ in their)}" for task, their in of_all.named()
            )
            raise InvalidArgumentError(
                f"The workers have set different variables since the last program:\n{have}\n"
                "All workers must set the same values outside of programs, for example loaded weights or the state of "
                "run_steps."
            )
        differ = [i for i in range(len(values)) if len({their[i][1] for their in of_all}) > 1]
        if differ:
            shown = ", ".join(names[i] for i in differ[:5]) + (", …" if len(differ) > 5 else "")
            log.warning(
                "The workers gave %d array(s) different values (%s). All continue with those of %s. Give the same "
                "values everywhere; for random values use the same seed.",
                len(differ),
                shown,
                of_all.names[0],
            )
        leaders = dict(zip(differ, self._leaders([values[i] for i in differ]), strict=True))
        return [leaders[i] if i in leaders else self.put_whole(v) for i, v in enumerate(values)]

    def _leaders(self, values: Sequence[Any]) -> list[jax.Array]:
        """Replicates the first process's values, of which at least one process has others."""
        if self.survivors is None:
            return [self.put_leaders(value) for value in values]
        if not values:
            return []
        chiefs = iter(self.survivors.broadcast([_words(value) for value in values]))
        # (Programs may be given the memory of the results, and not that of the survivors.)
        return [
            self.put_whole(jax_compat.on_words(lambda _: jax_compat.copied(next(chiefs)), value))
            for value in values
        ]

    @functools.cached_property
    def _take_first(self) -> Any:
        return self.compile(
            _first_row, "taking the first worker's initial value", out_shardings=self.replicated
        )

    # --- programs ---------------------------------------------------------------------------------------

    def on_replicas(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Returns ``jax.shard_map`` of a function for one replica. The compiler splits it over the replica's logical
        devices.
        """
        return jax_compat.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )

    def collective_on_shards(
        self, collective: Callable[[Any], Any], value: Any, spec: PartitionSpec, out_spec: Any = None
    ) -> Any:
        """Applies a collective over the replicas to the shards of ``value`` that the logical devices of a replica have.

        Every gather, reduce-scatter and all-to-all over replicas in a replica program goes through here. XLA would
        otherwise gather the value over the logical devices first, and then move L times the bytes (jax 0.10 to 0.12).
        Call it inside of ``on_replicas``. Sums, extremes and permutations need no such call.

        Args:
          collective: A function of a shard, such as ``lambda x: jax.lax.all_gather(x, REPLICA_AXIS, tiled=True)``.
          value: The replica's array.
          spec: The axes of the logical devices that shard each dim of ``value``; an empty one replicates it.
          out_spec: The same for the result; by default ``spec``.
        """
        if self.num_logical_devices == 1:
            return collective(value)
        out_spec = spec if out_spec is None else out_spec
        axes = set(self.mesh.axis_names[1:])
        return jax_compat.shard_map(
            collective, in_specs=(spec,), out_specs=out_spec, axis_names=axes, check_vma=False
        )(value)

    def refuse_survivors(self, what: str) -> None:
        """Raises UnsupportedError if the topology is that of survivors.

        Args:
          what: A use of the strategy that they cannot repeat after a death, as the subject of a sentence.
        """
        if self.survivors is not None:
            raise not_for_survivors(what)

    def compile(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        has_one_form: bool = False,
        is_read: bool = False,
        **options: Any,
    ) -> Any:
        """Returns ``jax.jit`` of a function for the devices. All processes must call the result in the same order.

        Args:
          function: A pure function.
          name: The display name.
          has_one_form: True if the result is always called with arrays of the same shapes and dtypes.
          is_read: True if one process may call the result alone by mistake; see ``SharedProgram``.
          **options: The options of ``jax.jit``.

        Raises:
          UnsupportedError: Replicas have several devices, and JAX's partitioner Shardy is off.
        """
        if self.num_logical_devices > 1 and not jax_compat.uses_shardy():
            raise UnsupportedError(
                f"{name}: replicas of several devices need XLA's partitioner Shardy, and jax_use_shardy_partitioner is False. With the "
                "older partitioner such programs can abort the process. Leave this option of JAX at its default, True."
            )
        if not self.devices:
            options.pop("out_shardings", None)
        compiled = jax.jit(function, **options)
        if self.peers is None or self.survivors is not None:
            return compiled
        return SharedProgram(compiled, name, self.peers, has_one_form=has_one_form, is_read=is_read)


@functools.lru_cache(maxsize=1024)
def _aval_and_devices(shape: tuple[int, ...], dtype: Any, sharding: Any) -> tuple[Any, list[Device]]:
    """Returns the aval of an array, and the devices of this process that have parts of it, in the mesh's order."""
    devices = [d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index()]
    return jax.typeof(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)), devices


def digest(value: jax.Array | np.ndarray) -> str:
    """Returns a text that is equal for arrays with equal bytes."""
    data = np.ascontiguousarray(_words(value)).reshape(-1).view(np.uint8)
    return hashlib.sha256(data.data).hexdigest()


def _words(value: jax.Array | np.ndarray) -> np.ndarray:
    """Returns an array on the host; of typed random keys their words."""
    return np.asarray(jax.random.key_data(value) if jax_compat.is_typed_key(value.dtype) else value)


def _unchanged(value: Any) -> Any:
    return value


def _first_row(rows: Any) -> Any:
    return rows[0]
