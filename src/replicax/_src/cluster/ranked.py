"""``RankedResolver``: the workers of launchers that number the processes and give only the address of the first."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import ClassVar

from replicax._src.cluster.environ import optional_number, rank_and_size, require
from replicax._src.cluster.resolver import AddressedResolver
from replicax._src.cluster.spec import UNKNOWN_ADDRESS, ClusterSpec, join_address


class RankedResolver(AddressedResolver):
    """The workers that a launcher started. All except the leader are at ``UNKNOWN_ADDRESS``.

    A subclass names the launcher and its variables, and finds the leader.

    Args:
      rpc_layer: See ``ClusterResolver``.
      environ: Replaces ``os.environ``; it is read once.

    Attributes:
      local_rank: The number of this worker among those on this host, from 0; None if it is not known.

    Raises:
      ClusterEnvironmentError: A variable is missing or malformed, or the leader's host is not known.
    """

    launcher: ClassVar[str]
    """The command that sets the variables."""
    variables: ClassVar[tuple[str, ...]]
    """The required variables: the rank of this process, the number of processes, and others."""
    local_rank_variable: ClassVar[str] = ""
    """The variable that may give ``local_rank``; empty if there is none."""

    def __init__(self, rpc_layer: str | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        require(environ, self.variables, self.launcher)
        rank, num_workers = rank_and_size(environ, *self.variables[:2])
        self.task_type, self.task_id = "worker", rank
        self.rpc_layer = rpc_layer
        self.local_rank = optional_number(environ, self.local_rank_variable)
        addresses = [join_address(*self._leader(environ, num_workers))] + [UNKNOWN_ADDRESS] * (
            num_workers - 1
        )
        self._cluster_spec = ClusterSpec({"worker": addresses}, source=f"{self.launcher}'s variables")

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers."""
        return self._cluster_spec

    @abc.abstractmethod
    def _leader(self, environ: Mapping[str, str], num_workers: int) -> tuple[str, int]:
        """Returns the host and the port of the first worker."""
