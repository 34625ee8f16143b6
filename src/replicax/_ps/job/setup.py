"""``Setup``: what a job is made of, and its options. Only the views in ``groups`` change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

from replicax._ps.client.groups import Groups
from replicax._ps.job.closures import CAPACITY
from replicax._ps.job.limits import Limits

OnPsRestart = Literal["continue", "rewind"]


@final
@dataclass(frozen=True, eq=False, slots=True)
class Setup:
    """The tasks and the options of a job.

    Attributes:
      num_workers: The number of workers, ``"worker 0"`` and so on.
      num_servers: The number of parameter servers, ``"ps 0"`` and so on.
      limits: The timeouts.
      incarnation: The id of the session with the tasks.
      ps_addresses: The addresses of the parameter servers, in order, which workers are told.
      snapshot_intervals_s: The interval of each parameter server, in order; None for one that takes no snapshots.
      groups: The primaries of all groups, with ``replication=2``; None without.
      max_staleness, replicas_to_aggregate, on_ps_restart: See ``ClusterCoordinator``.
      capacity: The most functions that may be queued.
      first_number, first_round: The numbers of the first function and of the first round.
      num_made: The number of variables that were created in the session before this job.
      last_epoch: The last epoch of snapshots in the session, ``last_epoch`` of its last job; 0 if there is none.
      own_resources: The names of the resources that a worker has and never makes, such as its index.
    """

    num_workers: int
    num_servers: int = 0
    limits: Limits = field(default_factory=Limits)
    incarnation: str = ""
    ps_addresses: tuple[str, ...] = ()
    snapshot_intervals_s: tuple[float | None, ...] = ()
    groups: Groups | None = None
    max_staleness: int | None = None
    replicas_to_aggregate: int | None = None
    on_ps_restart: OnPsRestart = "continue"
    capacity: int = CAPACITY
    first_number: int = 0
    first_round: int = 0
    num_made: int = 0
    last_epoch: int = 0
    own_resources: frozenset[str] = frozenset()
