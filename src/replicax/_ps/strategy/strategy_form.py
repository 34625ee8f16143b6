"""``StrategyForm``: what differs between the two ways to use parameter servers.

``coordinator_form.py`` and ``worker_form.py`` have the two. ``form_steps.py`` has the steps that both take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from replicax._ps.client.session import Session
from replicax._ps.worker.resources import ValueResource
from replicax._src.program_kit.cluster_tasks import ClusterResolver, Membership
from replicax._src.program_kit.data import InputContext, InputOptions
from replicax._src.program_kit.strategy_parts import Strategy
from replicax._src.program_kit.traced_programs import Topology


class StrategyForm(Protocol):
    """One way to use parameter servers: ``CoordinatorForm`` or ``WorkerForm``. A strategy chooses one when it is made.

    Attributes:
      session: The session with the parameter servers.
      num_devices: The number of devices of each worker.
      resolver: Describes the cluster; None in a process that has all tasks.
      own_worker: The place of this process among the workers that run the program; None if it is none of them.
      is_chief: True if this process writes checkpoints.
      this_process: The name of this process's role: ``"worker 0"``.
    """

    @property
    def session(self) -> Session: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def resolver(self) -> ClusterResolver | None: ...
    @property
    def own_worker(self) -> Membership | None: ...
    @property
    def is_chief(self) -> bool: ...
    @property
    def this_process(self) -> str: ...

    def announce(self, strategy: Strategy) -> None:
        """Logs the cluster, once the strategy is made."""

    def topology(self) -> Topology:
        """Returns the topology of a worker's replicas.

        Raises:
          DeviceError: The workers' devices are those of this process, which has fewer.
        """
        ...

    def distribute_dataset(
        self, strategy: Strategy, dataset: Any, options: InputOptions | None, distribute_options: Any
    ) -> Any:
        """Implements ``experimental_distribute_dataset``."""

    def distribute_from_function(
        self, strategy: Strategy, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None
    ) -> Any:
        """Implements ``distribute_datasets_from_function``."""

    def axis_left_out(self, refuse: Callable[[], None]) -> None:
        """Reacts to a ``reduce`` without an axis: calls ``refuse``, or lets the axis be None."""

    def note_run_here(self, name: str) -> None:
        """Is called when ``run`` of a function runs in this process."""

    def own_value(self, name: str, resource: str) -> ValueResource:
        """Returns the value of this process that a function uses: a per-worker value.

        Raises:
          ContextError: This process has no such value.
        """
        ...

    def check_coordinates(self, refuse: Callable[[], Exception]) -> None:
        """Raises ``refuse()`` if this process gives no functions to workers."""

    def described(self) -> str:
        """Returns the cluster in a few words, for the repr of the strategy."""
        ...
