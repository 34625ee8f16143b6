"""``ParameterServerStrategy``: variables on parameter servers, functions on workers, each at its own pace.

It has two forms. This file has what they share, and the form with a coordinator; ``shared_servers.py`` has the other.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, Self, final

import jax
import numpy as np

from replicax._ps.client.groups import Groups
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.session import Session, warn_of_unused_devices
from replicax._ps.client.tasks import Tasks
from replicax._ps.placement.server_placement import ServerPlacement
from replicax._ps.strategy.remote_closures import Closures, PreparedClosure
from replicax._ps.strategy.remote_running import RemoteRunner, run_as_one
from replicax._ps.strategy.shared_servers import (
    addresses,
    shared_session,
    snapshot_interval_s,
)
from replicax._ps.worker.resources import WORKER_INDEX, ValueResource, WorkerPlace
from replicax._ps.worker.runner import ClosureCall, Runner
from replicax._ps.worker.unbuilt import StrategyOnWorker, UnbuiltDataset
from replicax._src.program_kit.captures import BindingTable
from replicax._src.program_kit.cluster_tasks import (
    ClusterResolver,
    Credentials,
    Membership,
    ServerJob,
    ServerSettings,
)
from replicax._src.program_kit.data import InputContext, InputOptions
from replicax._src.program_kit.errors import (
    ContextError,
    DeviceError,
    InvalidArgumentError,
    UnknownProgramError,
)
from replicax._src.program_kit.own_process import export_platform
from replicax._src.program_kit.strategy_parts import (
    Strategy,
    StrategyParts,
    page_of_table,
)
from replicax._src.program_kit.traced_programs import Topology

log = logging.getLogger("replicax")
_GROUP_S: Final = 10.0


class ClosesItself(Protocol):
    """The interface of a ClusterCoordinator that its strategy needs."""

    def close(self) -> None: ...


@final
class ParameterServerStrategy(Strategy):
    """Asynchronous training: parameter servers hold the variables, workers compute, and do not wait for each other.

    Make variables, models, optimizers and metrics in ``scope()``. A function reads them, computes, and pushes
    gradients and other assignments to the servers. Each server applies these once, atomically. There are two forms:

    - This process is the coordinator, the chief. It gives functions to
      ``rx.coordinator.ClusterCoordinator(strategy).schedule``, and any worker runs each. Workers run ``rx.Server``,
      or ``replicax server``.
    - Every worker runs the program, as in TensorFlow 1: ``run`` computes in this process, on variables that all
      workers share. The chief (worker 0 if there is none) creates them, and the others wait for it. A worker that
      restarts resumes with the current variables. Each worker has its own data.

    Parameter servers run ``rx.Server``, or ``replicax server``.

    Args:
      cluster_resolver: Describes the cluster: a chief if there is a coordinator, workers, at least one ps; default:
        from the environment.
      variable_partitioner: Chooses the number of shards of a variable: ``rx.experimental.partitioners``. Without it
        no variable is sharded, and each is on the server that has the fewest bytes.
      devices_per_worker: The number of devices of each worker, each of which runs a replica of ``run``'s function,
        in sync. It is ``num_replicas_in_sync``. None for the number of ``replicax launch --devices-per-worker``, or
        1.
      replication: The number of copies of each shard, on different parameter servers: 1, or 2. With 2, if a server
        dies, no acknowledged update is lost: the ``ClusterCoordinator`` switches to the other copy within seconds.
        It needs a coordinator and at least two parameter servers, which apply each update twice. None for the
        number of ``replicax launch --replication``, or 1.
      is_coordinator: True for the first form, False for the second. None chooses the second in a worker, and the
        first in a chief, unless ``replicax launch --script-in workers`` has started it.

    Attributes:
      own_coordinator: The ClusterCoordinator that Keras's ``fit`` has made if there was none.

    Raises:
      TaskError: The cluster has no worker or no ps, or this process has the wrong task.
      UnavailableError: A task does not answer, or the chief has not created variables that others wait for.

    Source: tf.distribute.ParameterServerStrategy; tf.compat.v1.distribute.experimental.ParameterServerStrategy.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        devices_per_worker: int | None = None,
        replication: int | None = None,
        is_coordinator: bool | None = None,
    ):
        self._num_devices = ServerSettings().num_devices(devices_per_worker)
        job = ServerJob(cluster_resolver)
        if is_coordinator is None:
            is_coordinator = job.resolver.task_type != "worker" and not ServerSettings().is_script_in_workers
        replication = _replication_of(replication, is_coordinator)
        if is_coordinator:
            self._begin_coordinator(job, variable_partitioner, replication)
        else:
            says_devices = devices_per_worker is not None or ServerSettings().devices_per_worker is not None
            self._begin_worker(job, variable_partitioner, says_devices)

    def _begin_worker(
        self,
        job: ServerJob,
        variable_partitioner: Callable[..., Sequence[int]] | None,
        says_devices: bool,
    ) -> None:
        membership = job.own_worker()
        session = shared_session(membership, os.environ)
        self._set_up(session, variable_partitioner, job.resolver, membership)
        log.info(
            "Using ParameterServerStrategy in %s: one of %d workers that run the program, with %d parameter servers.",
            membership.task,
            membership.num_workers,
            session.num_ps,
        )
        self.topology  # starts JAX's backend, and checks that there are enough devices  # noqa: B018
        num_here = jax.local_device_count()
        if not says_devices and num_here > self._num_devices:
            warn_of_unused_devices(str(membership.task), num_here, self._num_devices)

    def _begin_coordinator(
        self,
        job: ServerJob,
        variable_partitioner: Callable[..., Sequence[int]] | None,
        replication: int,
    ) -> None:
        spec = job.cluster_of_coordinator()
        num_ps = spec.num_tasks("ps")
        if num_ps < replication:
            raise InvalidArgumentError(
                f"replication={replication} needs {replication} parameter servers, but the "
                f"cluster{spec.origin} has {num_ps}. Add the address of another one (replicax "
                "launch --ps 2), or remove replication."
            )
        tasks = Tasks(
            addresses(spec, "worker"), addresses(spec, "ps"), Credentials.from_environment(os.environ)
        )
        told = tasks.greet_ps(ServerSettings().start_limit_s)
        intervals_s = [snapshot_interval_s(answer) for answer in told]
        groups = _begin_groups(tasks, intervals_s) if replication > 1 else None
        tasks.start_heartbeats()
        servers = ServerClients([tasks.connect("ps", index) for index in range(num_ps)], tasks.incarnation)
        platforms = sorted({str(answer["platform"]) for answer in told})
        session = Session(servers, platforms, tasks, intervals_s, groups=groups)
        self._set_up(session, variable_partitioner, job.resolver)
        log.info(
            "Using ParameterServerStrategy with %d workers and %d parameter servers%s.",
            len(tasks.addresses("worker")),
            num_ps,
            ", each variable on two of them" if groups is not None else "",
        )

    @classmethod
    def _of_session(
        cls,
        session: Session,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        devices_per_worker: int = 1,
    ) -> Self:
        strategy = cls.__new__(cls)
        strategy._num_devices = devices_per_worker
        strategy._set_up(session, variable_partitioner, None)
        return strategy

    def _set_up(
        self,
        session: Session,
        variable_partitioner: Callable[..., Sequence[int]] | None,
        resolver: ClusterResolver | None,
        worker: Membership | None = None,
    ) -> None:
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                f"variable_partitioner must be a function of a shape and a dtype, such as "
                f"rx.experimental.partitioners.MinSizePartitioner(), got {variable_partitioner!r}."
            )
        self.session, self._worker = session, worker
        session.devices_per_worker = self._num_devices
        self.variable_partitioner = variable_partitioner
        self.closures = Closures(self, session)
        self._runner_here = Runner(session.servers, pulls_ahead=False)
        self._num_here = 0
        self._running_here = threading.RLock()
        self.own_coordinator: ClosesItself | None = None
        Strategy.__init__(
            self,
            self.topology_of_worker,
            cluster_resolver=resolver,
            is_chief=worker is None or worker.is_chief,
            make_parts=_make_parts,
            own_worker=worker,
            serves_status=False,  # a ClusterCoordinator does
        )

    @property
    def is_coordinator(self) -> bool:
        """True if this process gives functions to workers; False if it is one of several workers that run the
        program.
        """
        return self._worker is None

    def topology_of_worker(self) -> Topology:
        """Returns the topology of a worker's replicas. If this is the coordinator, the worker is another process.

        Raises:
          DeviceError: This worker has fewer devices.
        """
        if self._num_devices > 1 and self.is_coordinator:
            return Topology.elsewhere(self._num_devices, is_cpu=self.session.platforms == ("cpu",))
        devices = jax.local_devices()
        if len(devices) < self._num_devices:
            raise DeviceError(
                f"Workers have {self._num_devices} devices (devices_per_worker), but this one has "
                f"{len(devices)}. Start all with as many, or use the number that they have; for virtual ones: "
                f"rx.config.set_local_devices({self._num_devices})."
            )
        return Topology.of(devices[: self._num_devices])

    def close(self) -> None:
        """Ends the session with the workers and the parameter servers, which drop the variables and wait for another
        chief.

        If every worker runs the program, the session ends once all of them have closed their strategies, or ended.
        """
        if self.own_coordinator is not None:
            self.own_coordinator.close()
        self.session.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._worker is not None:
            return f"<{name} in {self._worker.task}, of {self.session.num_ps} parameter servers>"
        devices = f" with {self._num_devices} devices each" if self._num_devices > 1 else ""
        return f"<{name} of {self.session.num_workers} workers{devices} and {self.session.num_ps} parameter servers>"

    def _repr_html_(self) -> str:
        num_workers, num_ps = self.session.num_workers, self.session.num_ps
        about: dict[str, object] = {
            "workers": num_workers or None,
            "parameter servers": num_ps,
            "devices of each worker": self._num_devices,
            "variables": "on the parameter servers, "
            + ("not sharded" if self.variable_partitioner is None else "sharded by a partitioner"),
            "this process": "the coordinator" if self._worker is None else self._worker.task,
        }
        rows = [(f"ps {number}", address) for number, address in enumerate(self.session.ps_addresses)]
        return page_of_table(type(self).__name__, about, ("parameter server", "address"), rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        # A dataset function that uses the strategy is sent to workers, which need only this part of it.
        return StrategyOnWorker, (self.num_replicas_in_sync,)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None, *, distribute_options: Any = None
    ) -> Any:
        """Returns a dataset of which each worker reads all. On a coordinator use it with
        ``ClusterCoordinator.create_per_worker_dataset``.

        Workers do not split it, whatever ``distribute_options`` say: each iterates over it at its own pace.
        """
        if not self.is_coordinator:
            return super().experimental_distribute_dataset(
                dataset, options, distribute_options=distribute_options
            )
        return UnbuiltDataset.from_dataset(dataset, options, self.num_replicas_in_sync)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns the dataset that ``dataset_fn`` makes on each worker. On a coordinator use it with
        ``ClusterCoordinator.create_per_worker_dataset``.
        """
        if not self.is_coordinator:
            return super().distribute_datasets_from_function(dataset_fn, options)
        return UnbuiltDataset.from_function(dataset_fn, options, self.num_replicas_in_sync)

    def _axis_left_out(self) -> None:
        """Raises only on a coordinator: where every worker runs the program, the axis is None, as in TensorFlow 1."""
        if self.is_coordinator:
            super()._axis_left_out()

    def run_here(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function of cross-replica code in this process, with its variables on the servers."""
        with self._running_here:
            return self._run_here(self.closures.prepare(fn, args, kwargs))

    def run_replica_here(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a replica function in this process, with its variables on the servers."""
        with self._running_here:
            return self._run_here(self.closures.prepare(fn, args, kwargs, is_replica_function=True))

    def run_as_one(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Returns ``fn`` of a full batch, computed on all devices of a worker. Call it in a function for workers."""
        return run_as_one(self, fn, batch)

    def _check_devices_here(self, name: str, num_replicas: int) -> None:
        have = jax.local_device_count()
        if have < num_replicas:
            raise DeviceError(
                f"{name} was called outside of a scheduled function, so it runs in this process, like on a "
                f"worker on {num_replicas} devices (devices_per_worker), but there are {have} here. Give it "
                "to ClusterCoordinator.schedule; to try it here call "
                f"rx.config.set_local_devices({num_replicas}) at the start of the program."
            )

    def _run_here(self, prepared: PreparedClosure) -> Any:
        traced = prepared.traced
        self._check_devices_here(traced.name, traced.first.num_replicas)
        number, self._num_here = self._num_here, self._num_here + 1
        programs = traced.programs_for([export_platform()])
        call = ClosureCall(
            (self.session.client, number),
            number,
            (self.session.epoch, number),
            programs,
            prepared.arguments,
            [self._own(prepared.name, source.resource) for source in prepared.sources],
        )
        try:
            result = self._runner_here.run(call)
        except UnknownProgramError:  # it never ran here, or was dropped since
            for digest in programs.values():
                self._runner_here.add_program(traced.program(digest))
            for name, array in traced.constants.items():
                self._runner_here.add_constant(name, array)
            result = self._runner_here.run(call)
        if traced.first.updates:
            self.session.renew()
        return prepared.assemble([jax.numpy.asarray(array) for array in result.results])

    def _own(self, name: str, resource: str) -> ValueResource:
        """Returns this process's per-worker value."""
        if self._worker is None or resource != WORKER_INDEX:
            raise ContextError(
                f"{name} uses a worker's own input ({resource}), but was called outside of a scheduled function, in "
                "a process that is not a worker. Give a function that calls it to ClusterCoordinator.schedule."
            )
        return ValueResource(np.int32(self._worker.id_in_cluster), WorkerPlace())


def _replication_of(given: int | None, is_coordinator: bool) -> int:
    """Returns the number of copies of each shard: the program's, or the launcher's, or 1.

    Raises:
      InvalidArgumentError: The number is not allowed.
    """
    replication = (ServerSettings().replication or 1) if given is None else given
    if type(replication) is not int or replication not in (1, 2):
        raise InvalidArgumentError(
            f"replication must be 1, each variable on one parameter server, or 2; got {replication!r}."
        )
    if replication > 1 and not is_coordinator:
        raise InvalidArgumentError(
            "replication=2 needs a coordinator that chooses between two parameter servers, but here every "
            "worker runs the program. Let a chief schedule functions, or remove replication."
        )
    return replication


def _begin_groups(tasks: Tasks, intervals_s: Sequence[float | None]) -> Groups:
    """Assigns each shard to two parameter servers, from the start.

    Raises:
      InvalidArgumentError: Some servers take snapshots, and others do not.
      UnavailableError: A parameter server does not answer.
    """
    without = [f"ps {n}" for n, interval_s in enumerate(intervals_s) if interval_s is None]
    if without and len(without) < len(intervals_s):
        raise InvalidArgumentError(
            f"replication=2: {', '.join(without)} take(s) no snapshots, but other parameter servers do. Two servers "
            "that have the same variables write them together: start all with snapshot_dir (--snapshot-dir), or none."
        )
    groups = Groups(len(intervals_s))
    for view in groups.views:
        for task in view.members:
            tasks.send_view(task, view, _GROUP_S)
    return groups


def _make_parts(strategy: ParameterServerStrategy) -> StrategyParts:
    topology = strategy.topology_of_worker()
    bindings = BindingTable(topology.num_replicas)
    placement = ServerPlacement(
        topology, strategy.session, strategy.run_here, bindings, strategy.variable_partitioner
    )
    runner = RemoteRunner(strategy, strategy.run_replica_here, is_coordinator=strategy.is_coordinator)
    return StrategyParts(topology, placement, bindings, runner)
