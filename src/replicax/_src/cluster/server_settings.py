"""What the environment tells a process of a job with parameter servers, besides its cluster and its task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, final

from replicax._src.cluster.environ import START_LIMIT, limit_s, optional_number
from replicax._src.cluster.group_place import GroupPlace
from replicax._src.cluster.machine_layout import (
    CHECKPOINT_DIR_VARIABLE,
    DEVICES_VARIABLE,
    REPLICATION_VARIABLE,
    SCRIPT_IN_VARIABLE,
    STATUS_ADDRESS_VARIABLE,
)
from replicax._src.vocabulary.options import whole_number

REPLAY_FILE: Final = "replay.log"


@final
class ServerSettings:
    """The settings, which ``replicax launch`` writes, or the user. Each is read when it is asked for.

    Args:
      environ: The environment; None for that of this process.
    """

    def __init__(self, environ: Mapping[str, str] | None = None):
        self._environ = os.environ if environ is None else environ

    @property
    def devices_per_worker(self) -> int | None:
        """The number of devices of each worker (``REPLICAX_DEVICES_PER_WORKER``); None if it is not said.

        Raises:
          ClusterEnvironmentError: It is not a whole number.
        """
        return optional_number(self._environ, DEVICES_VARIABLE)

    @property
    def replication(self) -> int | None:
        """The number of parameter servers that hold each variable (``REPLICAX_REPLICATION``); None if it is not said.

        Raises:
          ClusterEnvironmentError: It is not a whole number.
        """
        return optional_number(self._environ, REPLICATION_VARIABLE)

    @property
    def is_script_in_workers(self) -> bool:
        """True if every worker runs the user's program (``REPLICAX_SCRIPT_IN``)."""
        return self._environ.get(SCRIPT_IN_VARIABLE) == "workers"

    @property
    def status_address(self) -> str | None:
        """The address of the status of the job (``REPLICAX_STATUS_ADDRESS``); None if it is not said."""
        return self._environ.get(STATUS_ADDRESS_VARIABLE) or None

    def num_devices(self, given: int | None) -> int:
        """Returns the number of devices of each worker: the program's, or the launcher's, or 1.

        Raises:
          InvalidArgumentError: The program's is not a whole number of at least 1.
        """
        if given is None:
            return self.devices_per_worker or 1
        return whole_number("ParameterServerStrategy(devices_per_worker=…)", given, least=1)

    @property
    def start_limit_s(self) -> float:
        """The longest wait for the other tasks at the start (``REPLICAX_START_TIMEOUT_S``).

        Raises:
          ClusterEnvironmentError: It is not a number of seconds.
        """
        return limit_s(self._environ, START_LIMIT)

    @property
    def group(self) -> GroupPlace | None:
        """The place of this job among groups that exchange (``REPLICAX_GROUP``, ``REPLICAX_SYNCERS``); None if it is
        alone.

        Raises:
          ClusterEnvironmentError: They are not of their form, or only one is set.
        """
        return GroupPlace.of_environment(self._environ)

    @property
    def replay_file(self) -> str | None:
        """The replay log of this group, in the folder of its checkpoints (``REPLICAX_CHECKPOINT_DIR``); None if it is
        not said.
        """
        folder = self._environ.get(CHECKPOINT_DIR_VARIABLE)
        return os.path.join(folder, REPLAY_FILE) if folder else None
