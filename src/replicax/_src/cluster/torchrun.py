"""``TorchrunClusterResolver``: the processes of torchrun, or of any launcher that sets the same variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from replicax._src.cluster.environ import leader_port, whole_number
from replicax._src.cluster.ranked import RankedResolver


@final
class TorchrunClusterResolver(RankedResolver):
    """The workers that torchrun started, from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if it is set, LOCAL_RANK.

    Only the leader's host is known; the other workers are at ``UNKNOWN_ADDRESS``. torchrun's store uses MASTER_PORT.
    The leader's port is REPLICAX_PORT, or else 20480 + (MASTER_PORT modulo 8192), or the next port if that is
    MASTER_PORT.

    Args:
      rpc_layer: See ``ClusterResolver``.
      environ: Replaces ``os.environ``; it is read once.

    Attributes:
      local_rank: The number of this worker among those on this host, from 0; None if LOCAL_RANK is not set.

    Raises:
      ClusterEnvironmentError: A variable is missing or malformed.

    >>> resolver = TorchrunClusterResolver(environ={
    ...     "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    >>> resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['node0:25404', 'unknown:0']}), 1)
    """

    launcher = "torchrun"
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    local_rank_variable = "LOCAL_RANK"

    def _leader(self, environ: Mapping[str, str], num_workers: int) -> tuple[str, int]:
        """Returns MASTER_ADDR, and a port that is not MASTER_PORT."""
        store = whole_number(environ, "MASTER_PORT", least=1, most=65535)
        port = leader_port(environ, store)
        return environ["MASTER_ADDR"], leader_port(environ, store + 1) if port == store else port
