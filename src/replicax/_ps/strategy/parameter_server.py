"""``ParameterServerStrategy``: variables on parameter servers, functions on workers, each at its own pace.

It has two forms, and chooses one when it is made: ``coordinator_form.py`` and ``worker_form.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, final

from replicax._ps.placement.server_placement import ServerPlacement
from replicax._ps.strategy.coordinator_form import CoordinatorForm
from replicax._ps.strategy.in_process import InProcessRunner
from replicax._ps.strategy.remote_closures import Closures
from replicax._ps.strategy.remote_running import RemoteRunner, run_as_one
from replicax._ps.strategy.strategy_form import StrategyForm
from replicax._ps.strategy.worker_form import WorkerForm
from replicax._ps.worker.unbuilt import StrategyOnWorker
from replicax._src.program_kit.captures import BindingTable
from replicax._src.program_kit.cluster_tasks import ClusterResolver, ServerJob, ServerSettings
from replicax._src.program_kit.data import InputContext, InputOptions
from replicax._src.program_kit.errors import InvalidArgumentError
from replicax._src.program_kit.strategy_parts import (
    Strategy,
    StrategyParts,
    page_of_table,
)


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
        settings, job = ServerSettings(), ServerJob(cluster_resolver)
        num_devices = settings.num_devices(devices_per_worker)
        if is_coordinator is None:
            is_coordinator = job.resolver.task_type != "worker" and not settings.is_script_in_workers
        form: StrategyForm
        if is_coordinator:
            form = CoordinatorForm.begin(job, num_devices, replication)
        else:
            warns = devices_per_worker is None and settings.devices_per_worker is None
            form = WorkerForm.begin(job, num_devices, replication, warns_of_devices=warns)
        self._set_up(form, variable_partitioner)
        form.announce(self)

    @classmethod
    def _of_form(
        cls, form: StrategyForm, variable_partitioner: Callable[..., Sequence[int]] | None = None
    ) -> Self:
        strategy = cls.__new__(cls)
        strategy._set_up(form, variable_partitioner)
        return strategy

    def _set_up(self, form: StrategyForm, variable_partitioner: Callable[..., Sequence[int]] | None) -> None:
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                f"variable_partitioner must be a function of a shape and a dtype, such as "
                f"rx.experimental.partitioners.MinSizePartitioner(), got {variable_partitioner!r}."
            )
        self.form, self.session = form, form.session
        self.variable_partitioner = variable_partitioner
        self.closures = Closures(self, form.session)
        self._in_process = InProcessRunner(form)
        self.own_coordinator: ClosesItself | None = None
        Strategy.__init__(
            self,
            form.topology,
            cluster_resolver=form.resolver,
            is_chief=form.is_chief,
            make_parts=_make_parts,
            own_worker=form.own_worker,
            serves_status=False,  # a ClusterCoordinator does
        )

    def close(self) -> None:
        """Ends the session with the workers and the parameter servers, which drop the variables and wait for another
        chief.

        If every worker runs the program, the session ends once all of them have closed their strategies, or ended.
        """
        if self.own_coordinator is not None:
            self.own_coordinator.close()
        self.session.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.form.described()}>"

    def _repr_html_(self) -> str:
        num_workers, num_ps = self.session.num_workers, self.session.num_ps
        about: dict[str, object] = {
            "workers": num_workers or None,
            "parameter servers": num_ps,
            "devices of each worker": self.form.num_devices,
            "variables": "on the parameter servers, "
            + ("not sharded" if self.variable_partitioner is None else "sharded by a partitioner"),
            "this process": self.form.this_process,
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
        return self.form.distribute_dataset(self, dataset, options, distribute_options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns the dataset that ``dataset_fn`` makes on each worker. On a coordinator use it with
        ``ClusterCoordinator.create_per_worker_dataset``.
        """
        return self.form.distribute_from_function(self, dataset_fn, options)

    def _axis_left_out(self) -> None:
        """Raises only on a coordinator: where every worker runs the program, the axis is None, as in TensorFlow 1."""
        self.form.axis_left_out(super()._axis_left_out)

    def run_here(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function of cross-replica code in this process, with its variables on the servers."""
        return self._in_process.run(lambda: self.closures.prepare(fn, args, kwargs))

    def run_replica_here(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a replica function in this process, with its variables on the servers."""
        return self._in_process.run(lambda: self.closures.prepare(fn, args, kwargs, is_replica_function=True))

    def run_as_one(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """Returns ``fn`` of a full batch, computed on all devices of a worker. Call it in a function for workers."""
        return run_as_one(self, fn, batch)


def _make_parts(strategy: ParameterServerStrategy) -> StrategyParts:
    topology = strategy.form.topology()
    bindings = BindingTable(topology.num_replicas)
    placement = ServerPlacement(
        topology, strategy.session, strategy.run_here, bindings, strategy.variable_partitioner
    )
    runner = RemoteRunner(strategy, strategy.form, strategy.run_replica_here)
    return StrategyParts(topology, placement, bindings, runner)
