"""``ParameterServerStrategy``: variables on parameter servers, functions on workers, each at its own pace.

Of its two forms this file has what they share, and the one with a coordinator; ``shared_servers.py`` begins the other.
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
from replicax._src.tracing.slots import SlotTable
from replicax._src.variables.partitioners import Partitioner
from replicax._src.variables.server_placement import ServerPlacement

log = logging.getLogger("replicax")
_GROUP_S: Final = 10.0


class ClosesItself(Protocol):
    """A ClusterCoordinator, as far as its strategy is concerned."""

    def close(self) -> None: ...


@final
class ParameterServerStrategy(Strategy):
    """Asynchronous training: parameter servers hold the variables, workers compute, and do not wait for each other.

    Make variables, models, optimizers and metrics in ``scope()``. A function that runs reads them, computes, and pushes
    gradients and other assignments to the servers, each of which applies them once and as one. There are two forms:

    - This process is the coordinator, the chief: it gives functions to
      ``rx.coordinator.ClusterCoordinator(strategy).schedule``, and some worker runs each. Workers run ``rx.Server``, or
      ``replicax server``.
    - Every worker runs the program by itself, as in TensorFlow 1: ``run`` computes here, on variables that all share.
      The chief (worker 0 if there is none) makes them, the others wait for that; one that starts again goes on with
      what is there. Each has its own data.

    Parameter servers run ``rx.Server``, or ``replicax server``.

    Args:
      cluster_resolver: Describes the cluster: a chief if there is a coordinator, workers, at least one ps; default:
        from the environment.
      variable_partitioner: Into how many shards a variable is cut: ``rx.experimental.partitioners``. Without it each
        variable is whole, on the server that has the fewest bytes.
      devices_per_worker: On how many devices each worker runs a replica of what ``run`` is given, in sync. They are
        ``num_replicas_in_sync``. None: what ``replicax launch --devices-per-worker`` says, or 1.
      replication: On how many parameter servers each piece of a variable is: 1, or 2. With 2 a server may die, and
        nothing that was acknowledged is lost: the next one has it, and the ``ClusterCoordinator`` has all go on there,
        within seconds. For a coordinator with at least two parameter servers, which do each update twice. None: what
        ``replicax launch --replication`` says, or 1.
      is_coordinator: Which form it is. None: in a worker the second; in a chief the first, unless ``replicax launch``
        has been told that workers run the script (``--script-in workers``).

    Attributes:
      own_coordinator: The ClusterCoordinator that Keras's ``fit`` has made, where there was none.

    Raises:
      TaskError: The cluster has no worker or no ps, or this process is not what it has to be.
      UnavailableError: A task does not answer; or the chief has not made what others wait for.

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
            "Using ParameterServerStrategy in %s: one of %d workers that run the program, %d parameter servers.",
            membership.task,
            membership.num_workers,
            session.num_ps,
        )
        self.topology  # begins JAX's backend, and checks that there are enough devices  # noqa: B018
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
                f"ParameterServerStrategy(replication={replication}): each variable is on {replication} parameter servers, and "
                f"the cluster{from_source(spec.source)} has {num_ps}. Add the address of another one (replicax launch --ps 2), "
                "or leave replication out."
            )
        tasks = Tasks(
            addresses(spec, "worker"), addresses(spec, "ps"), Credentials.of_environment(os.environ)
        )
        told = tasks.greet_ps(limit_s(os.environ, START_LIMIT))
        intervals_s = [snapshot_interval_s(answer) for answer in told]
        groups = _begin_groups(tasks, intervals_s) if replication > 1 else None
        tasks.start_beating()
        servers = ServerClients([tasks.connect("ps", index) for index in range(num_ps)], tasks.incarnation)
        platforms = sorted({str(answer["platform"]) for answer in told})
        session = Session(servers, platforms, tasks, intervals_s, groups=groups)
        self._set_up(session, variable_partitioner, resolver)
        log.info(
            "Using ParameterServerStrategy: %d workers, %d parameter servers%s.",
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
        """Whether this process gives functions to workers; otherwise it is one of several that run them by
        themselves.
        """
        return self.worker_of_own is None

    def topology_of_worker(self) -> Topology:
        """The replicas of a worker; of another process, if this is the coordinator.

        Raises:
          DeviceError: This worker has fewer devices.
        """
        if self._num_devices > 1 and self.is_coordinator:
            return Topology.elsewhere(self._num_devices, is_cpu=self.session.platforms == ("cpu",))
        devices = jax.local_devices()
        if len(devices) < self._num_devices:
            raise DeviceError(
                f"Workers have {self._num_devices} devices (devices_per_worker), and this one has {len(devices)}. Start all with "
                f"as many, or say the number that they have; for virtual ones: rx.config.set_local_devices({self._num_devices})."
            )
        return Topology.of(devices[: self._num_devices])

    def close(self) -> None:
        """Ends the time with the workers and the parameter servers; variables are gone. They wait for another chief.

        Where each worker runs by itself, once all of them have closed theirs, or ended.
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
            + ("whole" if self.variable_partitioner is None else "cut by a partitioner"),
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
        # A dataset function that names the strategy travels to workers, and needs little of it.
        return StrategyOnWorker, (self.num_replicas_in_sync,)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None, *, distribute_options: Any = None
    ) -> Any:
        """A dataset of which each worker has all; of a coordinator for
        ``ClusterCoordinator.create_per_worker_dataset``.

        Workers do not share it, whatever ``distribute_options`` say: each goes through it at its own pace.
        """
        if not self.is_coordinator:
            return datasets.distribute(self.topology, dataset, options, distribute_options)
        return UnbuiltDataset.of_dataset(dataset, options, self.num_replicas_in_sync)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """What ``dataset_fn`` makes on each worker; of a coordinator for
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
        """In a function for workers: what ``fn`` gives for a whole batch, computed on all devices of a worker."""
        return run_as_one(self, fn, batch)

    def _check_devices_here(self, name: str, num_replicas: int) -> None:
        have = jax.local_device_count()
        if have < num_replicas:
            raise DeviceError(
                f"{name} was called outside of a scheduled function, where it runs in this process: on {num_replicas} devices, as "
                f"on a worker (devices_per_worker), and there are {have} here. Give it to ClusterCoordinator.schedule; to try "
                f"it here call rx.config.set_local_devices({num_replicas}) at the start of the program."
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
        except UnknownProgramError:  # it was not run here before, or long ago
            for digest in programs.values():
                self._runner_here.add_program(traced.program(digest))
            for name, array in traced.constants.items():
                self._runner_here.add_constant(name, array)
            result = self._runner_here.run(call)
        if traced.first.updates:
            self.session.renew()
        return prepared.assemble([jax.numpy.asarray(array) for array in result.results])

    def _own(self, name: str, resource: str) -> ValueResource:
        """What this process has of that which each worker has its own of."""
        if self.worker_of_own is None or resource != WORKER_INDEX:
            raise ContextError(
                f"{name} takes what each worker has of its own ({resource}), and was called outside of a scheduled function, in a "
                "process that is no worker. Give a function that calls it to ClusterCoordinator.schedule."
            )
        return ValueResource(np.int32(self.worker_of_own.id_in_cluster), WorkerPlace())


def devices_of_worker(given: int | None) -> int:
    """How many devices of each worker are used: what the program says, or the launcher, or 1."""
    if given is None:
        return optional_number(os.environ, DEVICES_VARIABLE) or 1
    return whole_number("ParameterServerStrategy(devices_per_worker=…)", given, least=1)


def _replication_of(given: int | None, is_coordinator: bool) -> int:
    """On how many parameter servers each piece is: what the program says, or the launcher, or 1.

    Raises:
      InvalidArgumentError: It cannot be that.
    """
    replication = (optional_number(os.environ, REPLICATION_VARIABLE) or 1) if given is None else given
    if type(replication) is not int or replication not in (1, 2):
        raise InvalidArgumentError(
            f"ParameterServerStrategy(replication={replication!r}): it is 1, each variable on one parameter server, or 2."
        )
    if replication > 1 and not is_coordinator:
        raise InvalidArgumentError(
            "ParameterServerStrategy(replication=2): a coordinator decides which of two parameter servers is used, and here every "
            "worker runs the program by itself. Let a chief schedule functions, or leave replication out."
        )
    return replication


def _begin_groups(tasks: Tasks, intervals_s: Sequence[float | None]) -> Groups:
    """Has each piece on two parameter servers, from the first one on.

    Raises:
      InvalidArgumentError: Some take snapshots, and others do not.
      UnavailableError: A parameter server does not answer.
    """
    without = [f"ps {n}" for n, interval_s in enumerate(intervals_s) if interval_s is None]
    if without and len(without) < len(intervals_s):
        raise InvalidArgumentError(
            f"ParameterServerStrategy(replication=2): {', '.join(without)} take(s) no snapshots, and other parameter servers do. "
            "Two servers that have the same variables write them together: start all with snapshot_dir (--snapshot-dir), or "
            "none."
        )
    groups = Groups(len(intervals_s))
    for view in groups.views:
        for task in view.members:
            tasks.tell_view(task, view, _GROUP_S)
    return groups


def _checked_spec(resolver: ClusterResolver) -> ClusterSpec:
    """The cluster of which this process is the coordinator.

    Raises:
      TaskError: It is not such a cluster, or this process is not its chief. The texts begin with TensorFlow's.
    """
    spec = resolver.cluster_spec()
    source = from_source(spec.source)
    wrong = [job for job in spec.jobs if job not in ("chief", "worker", "ps", "evaluator")]
    if wrong:
        raise TaskError(
            f"Disallowed task type found in cluster spec{source}: {listed(wrong)}. Allowed are chief, worker, ps and evaluator."
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
            f"This process is {resolver.task_type} {resolver.task_id}{source}, and the coordinator's ParameterServerStrategy is "
            "made by the chief alone. In this task run `replicax server`, or rx.Server(...).join()."
        )
    return spec


def _make_parts(strategy: ParameterServerStrategy) -> Parts:
    topology = strategy.topology_of_worker()
    placement = ServerPlacement(topology, strategy.session, strategy.run_here, strategy.variable_partitioner)
    runner = RemoteRunner(strategy, strategy.run_replica_here, is_coordinator=strategy.is_coordinator)
    return Parts(topology, placement, SlotTable(topology.num_replicas), runner)
