"""``WorkerForm``: every worker runs the program itself, on parameter servers that all share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final, Self, final

import jax
import numpy as np

from replicax._ps.client.server_contents import ServerContents
from replicax._ps.client.session import Session, warn_of_unused_devices
from replicax._ps.client.shared_arrays import SharedArrays
from replicax._ps.client.shared_job import join_shared
from replicax._ps.client.tasks import Share, Tasks
from replicax._ps.strategy.form_steps import (
    addresses,
    clients_of,
    no_input_here,
    number_of_copies,
    platforms_of,
    snapshot_intervals_s,
    topology_here,
)
from replicax._ps.worker.resources import WORKER_INDEX, ValueResource, WorkerPlace
from replicax._src.program_kit.cluster_tasks import (
    ClusterResolver,
    Credentials,
    Membership,
    ServerJob,
    ServerSettings,
)
from replicax._src.program_kit.data import InputContext, InputOptions
from replicax._src.program_kit.errors import InvalidArgumentError
from replicax._src.program_kit.strategy_parts import Strategy
from replicax._src.program_kit.traced_programs import Topology

log = logging.getLogger("replicax")


@final
class WorkerForm:
    """A worker among those that run the program; see ``StrategyForm``.

    Args:
      session: The session, which it shares with the other workers.
      own_worker: Its place among them.
      resolver: Describes the cluster.
      num_devices: The number of its devices that are used.
      warns_of_devices: True if nobody has said how many devices are used.
    """

    def __init__(
        self,
        session: Session,
        own_worker: Membership,
        resolver: ClusterResolver,
        num_devices: int = 1,
        *,
        warns_of_devices: bool = False,
    ):
        self.session, self.num_devices, self.resolver = session, num_devices, resolver
        self.own_worker: Final = own_worker
        self.is_chief, self.this_process = own_worker.is_chief, str(own_worker.task)
        self._warns_of_devices = warns_of_devices
        session.devices_per_worker = num_devices

    @classmethod
    def begin(
        cls, job: ServerJob, num_devices: int, replication: int | None, *, warns_of_devices: bool
    ) -> Self:
        """Joins the session of the other workers. Waits for the parameter servers and the chief.

        Raises:
          TaskError: This process is not a worker of a cluster with parameter servers.
          InvalidArgumentError: ``replication`` is not 1.
          UnavailableError: A parameter server does not answer, or the chief has not started the session.
        """
        if number_of_copies(replication) > 1:
            raise InvalidArgumentError(
                "replication=2 needs a coordinator that chooses between two parameter servers, but here every "
                "worker runs the program. Let a chief schedule functions, or remove replication."
            )
        membership = job.own_worker()
        limit_s = ServerSettings().start_limit_s
        share = Share([str(task) for task in membership.workers], str(membership.task))
        credentials = Credentials.from_environment(os.environ)
        tasks = Tasks((), addresses(membership.spec, "ps"), credentials, share.described())
        told = join_shared(tasks, share, limit_s)
        tasks.start_heartbeats(leaves_at_exit=True)
        servers = clients_of(tasks)
        shared = SharedArrays(ServerContents(servers), share, limit_s)
        session = Session(servers, platforms_of(told), tasks, snapshot_intervals_s(told), shared)
        return cls(session, membership, job.resolver, num_devices, warns_of_devices=warns_of_devices)

    def announce(self, strategy: Strategy) -> None:
        log.info(
            "Using ParameterServerStrategy in %s: one of %d workers that run the program, with %d parameter servers.",
            self.this_process,
            self.own_worker.num_workers,
            self.session.num_ps,
        )
        strategy.topology  # starts JAX's backend, and checks that there are enough devices  # noqa: B018
        num_here = jax.local_device_count()
        if self._warns_of_devices and num_here > self.num_devices:
            warn_of_unused_devices(self.this_process, num_here, self.num_devices)

    def topology(self) -> Topology:
        return topology_here(self.num_devices)

    def distribute_dataset(
        self, strategy: Strategy, dataset: Any, options: InputOptions | None, distribute_options: Any
    ) -> Any:
        return Strategy.experimental_distribute_dataset(
            strategy, dataset, options, distribute_options=distribute_options
        )

    def distribute_from_function(
        self, strategy: Strategy, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
    ) -> Any:
        return Strategy.distribute_datasets_from_function(strategy, dataset_fn, options)

    def axis_left_out(self, refuse: Callable[[], None]) -> None:
        del refuse  # the axis is None, as in TensorFlow 1

    def note_run_here(self, name: str) -> None:
        del name  # it computes here

    def own_value(self, name: str, resource: str) -> ValueResource:
        if resource != WORKER_INDEX:
            raise no_input_here(name, resource)
        return ValueResource(np.int32(self.own_worker.id_in_cluster), WorkerPlace())

    def check_coordinates(self, refuse: Callable[[], Exception]) -> None:
        raise refuse()

    def described(self) -> str:
        return f"in {self.this_process}, of {self.session.num_ps} parameter servers"
