"""``CoordinatorForm``: this process gives functions to workers, which wait for them."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, final

from replicax._ps.client.groups import Groups
from replicax._ps.client.session import Session
from replicax._ps.client.tasks import Tasks
from replicax._ps.strategy.form_steps import (
    addresses,
    clients_of,
    no_input_here,
    number_of_copies,
    platforms_of,
    snapshot_intervals_s,
    topology_here,
)
from replicax._ps.worker.resources import ValueResource
from replicax._ps.worker.unbuilt import UnbuiltDataset
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
_GROUP_S: Final = 10.0


@final
class CoordinatorForm:
    """A coordinator, with workers and parameter servers in other processes; see ``StrategyForm``."""

    own_worker: Membership | None = None
    is_chief: bool = True
    this_process: str = "the coordinator"

    def __init__(self, session: Session, num_devices: int = 1, resolver: ClusterResolver | None = None):
        self.session, self.num_devices, self.resolver = session, num_devices, resolver
        session.devices_per_worker = num_devices

    @classmethod
    def begin(cls, job: ServerJob, num_devices: int, replication: int | None) -> Self:
        """Starts the session with the tasks. Waits for the parameter servers.

        Raises:
          TaskError: This process is not the chief of a cluster with workers and parameter servers.
          InvalidArgumentError: ``replication`` is not allowed.
          UnavailableError: A parameter server does not answer.
        """
        num_copies = number_of_copies(replication)
        spec = job.cluster_of_coordinator()
        num_ps = spec.num_tasks("ps")
        if num_ps < num_copies:
            raise InvalidArgumentError(
                f"replication={num_copies} needs {num_copies} parameter servers, but the "
                f"cluster{spec.origin} has {num_ps}. Add the address of another one (replicax "
                "launch --ps 2), or remove replication."
            )
        tasks = Tasks(
            addresses(spec, "worker"), addresses(spec, "ps"), Credentials.from_environment(os.environ)
        )
        told = tasks.greet_ps(ServerSettings().start_limit_s)
        intervals_s = snapshot_intervals_s(told)
        groups = begin_groups(tasks, intervals_s) if num_copies > 1 else None
        tasks.start_heartbeats()
        instances = [str(each["instance"]) for each in told]
        session = Session(
            clients_of(tasks), platforms_of(told), tasks, intervals_s, groups=groups, instances=instances
        )
        return cls(session, num_devices, job.resolver)

    def announce(self, strategy: Strategy) -> None:
        del strategy
        log.info(
            "Using ParameterServerStrategy with %d workers and %d parameter servers%s.",
            self.session.num_workers,
            self.session.num_ps,
            "" if self.session.groups is None else ", each variable on two of them",
        )

    def topology(self) -> Topology:
        if self.num_devices == 1:
            return topology_here(1)
        return Topology.elsewhere(self.num_devices, is_cpu=self.session.platforms == ("cpu",))

    def distribute_dataset(
        self, strategy: Strategy, dataset: Any, options: InputOptions | None, distribute_options: Any
    ) -> UnbuiltDataset:
        del distribute_options  # each worker reads all
        return UnbuiltDataset.from_dataset(dataset, options, strategy.num_replicas_in_sync)

    def distribute_from_function(
        self, strategy: Strategy, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
    ) -> UnbuiltDataset:
        return UnbuiltDataset.from_function(dataset_fn, options, strategy.num_replicas_in_sync)

    def axis_left_out(self, refuse: Callable[[], None]) -> None:
        refuse()

    def note_run_here(self, name: str) -> None:
        _warn_of_run_here(name)

    def own_value(self, name: str, resource: str) -> ValueResource:
        raise no_input_here(name, resource)

    def check_coordinates(self, refuse: Callable[[], Exception]) -> None:
        del refuse

    def described(self) -> str:
        devices = f" with {self.num_devices} devices each" if self.num_devices > 1 else ""
        return f"of {self.session.num_workers} workers{devices} and {self.session.num_ps} parameter servers"


def begin_groups(tasks: Tasks, intervals_s: Sequence[float | None]) -> Groups:
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


@functools.cache
def _warn_of_run_here(name: str) -> None:
    log.warning(
        "strategy.run of %s was called outside of a scheduled function, so it runs in this process, the "
        "coordinator. To run it on the workers, give a function that calls it to ClusterCoordinator.schedule.",
        name,
    )
