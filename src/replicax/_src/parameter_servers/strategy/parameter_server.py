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

from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.detect import checked_resolver
from replicax._src.cluster.environ import START_LIMIT, limit_s, optional_number
from replicax._src.cluster.errors import TaskError
from replicax._src.cluster.layout import DEVICES_VARIABLE, REPLICATION_VARIABLE, SCRIPT_IN_VARIABLE
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver
from replicax._src.cluster.spec import ClusterSpec, from_source, listed
from replicax._src.devices.split import InputContext, InputOptions
from replicax._src.devices.topology import Topology
from replicax._src.drawing import html
from replicax._src.errors import ContextError, DeviceError, InvalidArgumentError
from replicax._src.jax_compat import default_platform
from replicax._src.options import whole_number
from replicax._src.parameter_servers.client.groups import Groups
from replicax._src.parameter_servers.client.server_clients import ServerClients
from replicax._src.parameter_servers.client.session import Session, warn_of_unused_devices
from replicax._src.parameter_servers.client.tasks import Tasks
from replicax._src.parameter_servers.errors import UnknownProgramError
from replicax._src.parameter_servers.strategy.remote_closures import Closures, PreparedClosure
from replicax._src.parameter_servers.strategy.remote_running import RemoteRunner, run_as_one
from replicax._src.parameter_servers.strategy.shared_servers import (
    addresses,
    shared_session,
    snapshot_interval_s,
    worker_of_own,
)
from replicax._src.parameter_servers.worker.resources import WORKER_INDEX, ValueResource, WorkerPlace
from replicax._src.parameter_servers.worker.runner import ClosureCall, Runner
from replicax._src.parameter_servers.worker.unbuilt import StrategyOnWorker, UnbuiltDataset
from replicax._src.strategies import datasets
from replicax._src.strategies.parts import Parts
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.bindings import BindingTable
from replicax._src.variables.partitioners import Partitioner
from replicax._src.variables.server_placement import ServerPlacement

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

    has_servers = True

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        devices_per_worker: int | None = None,
        replication: int | None = None,
        is_coordinator: bool | None = None,
    ):
        self._num_devices = devices_of_worker(devices_per_worker)
        resolver = checked_resolver(cluster_resolver)
        if is_coordinator is None:
            is_coordinator = (
                resolver.task_type != "worker" and os.environ.get(SCRIPT_IN_VARIABLE) != "workers"
            )
        replication = _replication_of(replication, is_coordinator)
        if is_coordinator:
            self._begin_coordinator(resolver, variable_partitioner, replication)
        else:
            says_devices = devices_per_worker is not None or DEVICES_VARIABLE in os.environ
            self._begin_worker(resolver, variable_partitioner, says_devices)

    def _begin_worker(
        self, resolver: ClusterResolver, variable_partitioner: Partitioner | None, says_devices: bool
    ) -> None:
        membership = worker_of_own(resolver)
        session = shared_session(membership, os.environ)
        self._set_up(session, variable_partitioner, resolver, membership)
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
        self, resolver: ClusterResolver, variable_partitioner: Partitioner | None, replication: int
    ) -> None:
        spec = _checked_spec(resolver)
        num_ps = spec.num_tasks("ps")
        if num_ps < replication:
            raise InvalidArgumentError(
                f"replication={replication} needs {replication} parameter servers, but the "
                f"cluster{from_source(spec.source)} has {num_ps}. Add the address of another one (replicax "
                "launch --ps 2), or remove replication."
            )
        tasks = Tasks(
            addresses(spec, "worker"), addresses(spec, "ps"), Credentials.of_environment(os.environ)
        )
        told = tasks.greet_ps(limit_s(os.environ, START_LIMIT))
        intervals_s = [snapshot_interval_s(answer) for answer in told]
        groups = _begin_groups(tasks, intervals_s) if replication > 1 else None
        tasks.start_heartbeats()
        servers = ServerClients([tasks.connect("ps", index) for index in range(num_ps)], tasks.incarnation)
        platforms = sorted({str(answer["platform"]) for answer in told})
        session = Session(servers, platforms, tasks, intervals_s, groups=groups)
        self._set_up(session, variable_partitioner, resolver)
        log.info(
            "Using ParameterServerStrategy with %d workers and %d parameter servers%s.",
            len(tasks.addresses("worker")),
            num_ps,
            ", each variable on two of them" if groups is not None else "",
        )

    @classmethod
    def _of_session(
        cls, session: Session, variable_partitioner: Partitioner | None = None, devices_per_worker: int = 1
    ) -> Self:
        strategy = cls.__new__(cls)
        strategy._num_devices = devices_per_worker
        strategy._set_up(session, variable_partitioner, None)
        return strategy

    def _set_up(
        self,
        session: Session,
        variable_partitioner: Partitioner | None,
        resolver: ClusterResolver | None,
        worker: Membership | None = None,
    ) -> None:
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                f"variable_partitioner must be a function of a shape and a dtype, such as "
                f"rx.experimental.partitioners.MinSizePartitioner(), got {variable_partitioner!r}."
            )
        self.session = session
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
        )
        self.worker_of_own = worker

    @property
    def is_coordinator(self) -> bool:
        """True if this process gives functions to workers; False if it is one of several workers that run the
        program.
        """
        return self.worker_of_own is None

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
        if self.worker_of_own is not None:
            return f"<{name} in {self.worker_of_own.task}, of {self.session.num_ps} parameter servers>"
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
            "this process": "the coordinator" if self.worker_of_own is None else self.worker_of_own.task,
        }
        rows = [(f"ps {number}", address) for number, address in enumerate(self.session.ps_addresses)]
        table = html.table(("parameter server", "address"), rows) if rows else ""
        return html.page(type(self).__name__, html.facts(about), table)

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
            return datasets.distribute(self.topology, dataset, options, distribute_options)
        return UnbuiltDataset.of_dataset(dataset, options, self.num_replicas_in_sync)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns the dataset that ``dataset_fn`` makes on each worker. On a coordinator use it with
        ``ClusterCoordinator.create_per_worker_dataset``.
        """
        if not self.is_coordinator:
            return datasets.distribute_from_function(self.topology, dataset_fn, options, self.worker_of_own)
        return UnbuiltDataset.of_function(dataset_fn, options, self.num_replicas_in_sync)

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
        programs = traced.programs_for([default_platform()])
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
        if self.worker_of_own is None or resource != WORKER_INDEX:
            raise ContextError(
                f"{name} uses a worker's own input ({resource}), but was called outside of a scheduled function, in "
                "a process that is not a worker. Give a function that calls it to ClusterCoordinator.schedule."
            )
        return ValueResource(np.int32(self.worker_of_own.id_in_cluster), WorkerPlace())


def devices_of_worker(given: int | None) -> int:
    """Returns the number of devices of each worker: the program's, or the launcher's, or 1."""
    if given is None:
        return optional_number(os.environ, DEVICES_VARIABLE) or 1
    return whole_number("ParameterServerStrategy(devices_per_worker=…)", given, least=1)


def _replication_of(given: int | None, is_coordinator: bool) -> int:
    """Returns the number of copies of each shard: the program's, or the launcher's, or 1.

    Raises:
      InvalidArgumentError: The number is not allowed.
    """
    replication = (optional_number(os.environ, REPLICATION_VARIABLE) or 1) if given is None else given
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
            tasks.tell_view(task, view, _GROUP_S)
    return groups


def _checked_spec(resolver: ClusterResolver) -> ClusterSpec:
    """Returns the cluster of which this process is the coordinator.

    Raises:
      TaskError: It is not such a cluster, or this process is not its chief. The messages begin like TensorFlow's.
    """
    spec = resolver.cluster_spec()
    source = from_source(spec.source)
    wrong = [job for job in spec.jobs if job not in ("chief", "worker", "ps", "evaluator")]
    if wrong:
        raise TaskError(
            f"Disallowed task type found in cluster spec{source}: {listed(wrong)}. Allowed are chief, worker, "
            "ps and evaluator."
        )
    for job in ("worker", "ps"):
        if job not in spec.jobs or not spec.num_tasks(job):
            raise TaskError(
                f"There must be at least one {job}. The cluster{source} has {listed(spec.jobs) or 'no tasks'}. Add the "
                f"addresses of its {job} tasks; on one machine: replicax launch --workers 2 --ps 1 train.py"
            )
    if "chief" in spec.jobs and spec.num_tasks("chief") > 1:
        raise TaskError(
            f"There must be at most one 'chief' job. Got {spec.num_tasks('chief')}{source}. Keep one."
        )
    if resolver.task_type in ("worker", "ps"):
        raise TaskError(
            f"This process is {resolver.task_type} {resolver.task_id}{source}, but only the chief makes the "
            "coordinator's ParameterServerStrategy. In this task run `replicax server`, or rx.Server(...).join()."
        )
    return spec


def _make_parts(strategy: ParameterServerStrategy) -> Parts:
    topology = strategy.topology_of_worker()
    placement = ServerPlacement(topology, strategy.session, strategy.run_here, strategy.variable_partitioner)
    runner = RemoteRunner(strategy, strategy.run_replica_here, is_coordinator=strategy.is_coordinator)
    return Parts(topology, placement, BindingTable(topology.num_replicas), runner)
