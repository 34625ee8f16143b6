"""``TPUClusterResolver``: the hosts of a TPU, or virtual devices in place of a TPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from replicax._src.cluster.environ import leader_port, rank_and_size
from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.resolver import AddressedResolver
from replicax._src.cluster.spec import ClusterSpec, join_address
from replicax._src.hooks import hook
from replicax._src.packaging.home import install_command
from replicax._src.vocabulary.errors import DeviceError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from replicax._src.devices.tpu.positions import TPUSystemMetadata

HOSTS = "TPU_WORKER_HOSTNAMES"
NUMBER = "TPU_WORKER_ID"
_LOCAL = "local"


@final
class TPUClusterResolver(AddressedResolver):
    """The hosts of the TPU that this program runs on, from TPU_WORKER_HOSTNAMES and TPU_WORKER_ID.

    JAX computes on the devices of its own machine, so start the program on every host of the TPU. A single host needs
    no variables. Without a TPU this is an error, as in TensorFlow. To try a program out, let the CPU devices of this
    process stand for the cores: ``rx.config.set_local_devices(8)`` and ``tpu="local"``.

    Args:
      tpu: ``None`` or ``""`` means the TPU of this machine, and of the hosts in TPU_WORKER_HOSTNAMES. ``"local"`` means
        the devices of this process only: TPU cores, or else virtual devices; the environment is ignored.
        ``"local:2x2x1x2"`` means virtual devices in a mesh of this shape: sizes in x, y and z, and the cores of a chip
        (z and cores are optional). The name of a TPU means that TPU, and no virtual devices.
      zone: Not needed. This and the other unneeded arguments tell TensorFlow how to find a remote TPU.
      project: Not needed.
      job_name: The job of the tasks.
      coordinator_name: Not needed.
      coordinator_address: Not needed.
      credentials: Not needed.
      service: Not needed.
      discovery_url: Not needed.
      environ: Replaces ``os.environ``; it is read once.

    Attributes:
      mesh_shape: The mesh shape of virtual devices in ``tpu``; None if it has none.
      needs_tpu: True if virtual devices are not allowed.

    Raises:
      DeviceError: ``tpu`` is None or ``""``, this machine has no TPU, and the environment names no hosts. It is a
        ``ValueError``, as in TensorFlow.
      UnsupportedError: ``tpu`` is the address of a TPU on another machine.
      InvalidArgumentError: ``tpu`` is not a string, or has no shape after ``local:``.
      ClusterEnvironmentError: The two variables contradict each other.

    Source: tf.distribute.cluster_resolver.TPUClusterResolver.

    >>> resolver = TPUClusterResolver("", environ={"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"})
    >>> resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['t0:20480', 't1:20480']}), 1)
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        del zone, project, coordinator_name, coordinator_address, credentials, service, discovery_url
        if tpu is not None and not isinstance(tpu, str):
            raise InvalidArgumentError(f"tpu must be a name, 'local' or '', got {tpu!r}.")
        if tpu and "://" in tpu:
            raise UnsupportedError(
                f"TPUClusterResolver({tpu!r}): TensorFlow drives a TPU at an address from another machine, but JAX computes on "
                "its own machine. Start the program on each host of the TPU, with tpu='' or its name."
            )
        self.tpu = tpu or ""
        is_local = self.tpu.partition(":")[0] == _LOCAL
        self.mesh_shape = _mesh_shape(self.tpu) if is_local and ":" in self.tpu else None
        self.needs_tpu = bool(self.tpu) and not is_local
        self.task_type = self.task_id = None  # alone
        self._job_name = job_name
        self.rpc_layer = None
        environ = os.environ if environ is None else environ
        hosts = (
            [] if is_local else [host.strip() for host in environ.get(HOSTS, "").split(",") if host.strip()]
        )
        self._cluster_spec = ClusterSpec({})
        if not self.tpu and not hosts and not has_tpu():
            raise DeviceError(
                f"TPUClusterResolver(tpu={tpu!r}): there is no TPU. JAX finds none on this machine, and {HOSTS} in the environment "
                f"names no hosts. Run the program on a TPU VM with JAX for TPUs: {install_command('jax[tpu]')}. To try it out on "
                "virtual CPU devices, call rx.config.set_local_devices(8) first and use tpu='local'."
            )
        if len(hosts) > 1:
            self.task_type = job_name
            self.task_id, self._cluster_spec = _cluster(environ, hosts, job_name)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts; empty for a single host."""
        return self._cluster_spec

    def get_job_name(self) -> str:
        """Returns the job of the tasks."""
        return self._job_name

    def get_master(self) -> str:
        """Returns ``master()``."""
        return self.master()

    def get_coordination_service_leader(self) -> str:
        """Returns the name of the first task. The processes of a TPU meet at its address."""
        return f"/job:{self._job_name}/task:0"

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Returns a resolver whose TPU is ready. With several hosts it blocks until all have joined.

        Raises:
          DeviceError: See ``rx.tpu.experimental.initialize_tpu_system``, which it calls.
          ClusterStartError: A host is missing after ``REPLICAX_START_TIMEOUT_S``.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        hook("tpu_system").initialize_tpu_system(resolver)
        return resolver

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns the numbers of cores and hosts of the TPU. With several hosts it blocks until all have joined.

        Raises:
          DeviceError: See ``rx.tpu.experimental.initialize_tpu_system``.
          ClusterStartError: A host is missing after ``REPLICAX_START_TIMEOUT_S``.
        """
        return hook("tpu_system").metadata_of(self)

    @property
    def tpu_hardware_feature(self) -> None:
        """Always None, because JAX does not describe a TPU's embedding hardware. TensorFlow gives None without a
        topology.
        """
        return None

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Always raises, because the topology comes from the devices.

        Raises:
          UnsupportedError: Always.
        """
        del serialized_tpu_topology
        raise UnsupportedError(
            "TPUClusterResolver.set_tpu_topology is not supported, because JAX asks the TPU for its topology. Leave the call out: "
            "rx.tpu.experimental.initialize_tpu_system(resolver) returns the topology. For virtual devices in another mesh, make "
            "the resolver with its shape, TPUClusterResolver('local:2x2x1x2')."
        )

    def __repr__(self) -> str:
        return f"TPUClusterResolver({self.tpu!r})"


def has_tpu() -> bool:
    """True if this machine has a TPU that JAX may use. JAX's backend starts only if there are devices of Google."""
    return bool(hook("device_listing").list_physical_devices("TPU"))


def _cluster(environ: Mapping[str, str], hosts: list[str], job_name: str) -> tuple[int, ClusterSpec]:
    if not environ.get(NUMBER):
        raise ClusterEnvironmentError(
            f"{HOSTS} in the environment names {len(hosts)} hosts, but {NUMBER} is not set. Set it to the number of the host on "
            "each host, from 0, or use tpu='local' for the devices of this host only."
        )
    number, _ = rank_and_size({**environ, HOSTS: str(len(hosts))}, NUMBER, HOSTS)
    port = leader_port(environ, 0)
    addresses = [host if host.rpartition(":")[2].isdigit() else join_address(host, port) for host in hosts]
    return number, ClusterSpec({job_name: addresses}, source=HOSTS)


def _mesh_shape(tpu: str) -> tuple[int, int, int, int]:
    sizes = tpu.partition(":")[2].split("x")
    if not 2 <= len(sizes) <= 4 or not all(size.isdecimal() and int(size) for size in sizes):
        raise InvalidArgumentError(
            f"TPUClusterResolver({tpu!r}): after 'local:' give the shape of a mesh of virtual devices: sizes in x and y, and "
            "optionally in z and the cores of a chip, such as 'local:2x2x1x2' or 'local:4x2'."
        )
    x, y, z, cores = [int(size) for size in sizes] + [1] * (4 - len(sizes))
    return x, y, z, cores
