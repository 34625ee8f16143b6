"""``RankedResolver``: the workers of launchers that number processes and tell only where the first one is."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import ClassVar

from replicax._src.cluster.environ import optional_number, rank_and_size, require
from replicax._src.cluster.resolver import AddressedResolver
from replicax._src.cluster.spec import UNKNOWN_ADDRESS, ClusterSpec, join_address


class RankedResolver(AddressedResolver):
    """Workers that a launcher started. All but the leader are at ``UNKNOWN_ADDRESS``.

    A subclass names the launcher and its variables, and finds the leader.

    Args:
      rpc_layer: See ``ClusterResolver``.
      environ: In place of ``os.environ``; it is read once.

    Attributes:
      local_rank: Which of the workers on this host it is, from 0; None if that is not said.

    Raises:
      ClusterEnvironmentError: A variable is missing or malformed, or the leader's host is not known.
    """

    launcher: ClassVar[str]
    """The command that sets the variables."""
    variables: ClassVar[tuple[str, ...]]
    """Those that must be set: the rank of this process, how many there are, and what else is needed."""
    local_rank_variable: ClassVar[str]
    """The one that may say ``local_rank``."""

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
