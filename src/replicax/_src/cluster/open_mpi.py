"""``OpenMPIClusterResolver``: the processes that Open MPI's mpirun started, version 4 (ORTE) or 5 (PRRTE, PMIx)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import final

from replicax._src.cluster.environ import leader_port
from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.ranked import RankedResolver

RANK = "OMPI_COMM_WORLD_RANK"
SIZE = "OMPI_COMM_WORLD_SIZE"
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"

# 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or 1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620::2]:43370
_ORTE_URI = "OMPI_MCA_orte_hnp_uri"
# prterun-node07-12345@1: mpirun's host and process id, and the number of the job
_NAMESPACE = "PMIX_NAMESPACE"


@final
class OpenMPIClusterResolver(RankedResolver):
    """The workers that mpirun started, from OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and the host of mpirun.

    Only the leader's host is known; the other workers are at ``UNKNOWN_ADDRESS``. The resolver assumes that rank 0 is
    on the host of mpirun, as by default. If it is elsewhere, set MASTER_ADDR. If all ranks are on one host, the
    leader's host is ``localhost``. The leader's port is REPLICAX_PORT, or else derived from the number of the job.

    Args:
      rpc_layer: See ``ClusterResolver``.
      environ: Replaces ``os.environ``; it is read once.

    Attributes:
      local_rank: The number of this worker among those on this host, from 0; None if it is not known.

    Raises:
      ClusterEnvironmentError: A variable is missing or malformed, or the leader's host is not known.

    >>> resolver = OpenMPIClusterResolver(environ={
    ...     "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-node07-12345@1"})
    >>> resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['node07:24633', 'unknown:0']}), 1)
    """

    launcher = "mpirun"
    variables = (RANK, SIZE)
    local_rank_variable = "OMPI_COMM_WORLD_LOCAL_RANK"

    def _leader(self, environ: Mapping[str, str], num_workers: int) -> tuple[str, int]:
        """Returns the host of rank 0, and a port derived from the number of the job."""
        host, number = _launcher(environ)
        port = leader_port(environ, number)
        if environ.get("MASTER_ADDR"):
            return environ["MASTER_ADDR"], port
        if num_workers == 1 or environ.get(LOCAL_SIZE) == str(num_workers):
            return "localhost", port
        if not host:
            raise ClusterEnvironmentError(
                f"{SIZE}={num_workers}, and the host of rank 0 is not known: {_ORTE_URI}={environ.get(_ORTE_URI, '')!r} and "
                f"{_NAMESPACE}={environ.get(_NAMESPACE, '')!r} do not name it. Pass it on, with mpirun -x "
                f"MASTER_ADDR=<host of rank 0>, or set TF_CONFIG."
            )
        return host, port


def _launcher(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the host of mpirun, empty if it is not known, and a number of the job."""
    uri = environ.get(_ORTE_URI, "")
    # 4: job numbers are multiples of 4096.
    match = re.match(r"(\d+)\..*?(?:tcp://([^,:;\[\]]+)|tcp6://\[([^,\]]+))", uri)
    if match:
        return match[2] or match[3], int(match[1]) // 4096
    match = re.fullmatch(r"(?:prterun|prte|mpirun|mpiexec)-(.+)-(\d+)@\d+", environ.get(_NAMESPACE, ""))
    return (match[1], int(match[2])) if match else ("", 0)
