"""``JaxClusterResolver``: the processes of a Kubeflow TrainJob, or of any launcher that sets JAX's three variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from replicax._src.cluster.ranked import RankedResolver
from replicax._src.cluster.spec import split_address


@final
class JaxClusterResolver(RankedResolver):
    """The workers of JAX_PROCESS_ID, JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS, as Kubeflow Trainer v2 sets them.

    Only the leader's address is known, which is JAX_COORDINATOR_ADDRESS; the other workers are at ``UNKNOWN_ADDRESS``.

    Args:
      rpc_layer: See ``ClusterResolver``.
      environ: Replaces ``os.environ``; it is read once.

    Attributes:
      local_rank: None; the variables do not say it.

    Raises:
      ClusterEnvironmentError: A variable is missing or malformed.
      AddressError: JAX_COORDINATOR_ADDRESS is not ``host:port``.

    >>> resolver = JaxClusterResolver(environ={"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2",
    ...     "JAX_COORDINATOR_ADDRESS": "digits-node-0-0.digits:29500"})
    >>> resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['digits-node-0-0.digits:29500', 'unknown:0']}), 1)
    """

    launcher = "a TrainJob"
    variables = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")

    def _leader(self, environ: Mapping[str, str], num_workers: int) -> tuple[str, int]:
        """Returns the host and the port of JAX_COORDINATOR_ADDRESS."""
        return split_address(environ[self.variables[2]], source=self.variables[2])
