"""``SageMakerClusterResolver``: the cluster of an Amazon SageMaker training job, in which every host is a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.resolver import EnvironmentResolver, is_one_task, master_of
from replicax._src.cluster.spec import ClusterSpec, join_address
from replicax._src.untrusted.strict_json import TextError, read_json

HOSTS = "SM_HOSTS"
CURRENT_HOST = "SM_CURRENT_HOST"
PORT = 2223


def read_hosts(environ: Mapping[str, str]) -> tuple[list[str], int | None]:
    """Returns the sorted hosts of the job and the index of this one, or no hosts and None for a single unnamed host.

    Raises:
      ClusterEnvironmentError: A variable is missing or malformed, or this host is not among the others.
    """
    missing = [name for name in (HOSTS, CURRENT_HOST) if name not in environ]
    if missing:
        raise ClusterEnvironmentError(
            f"Not a SageMaker Environment: {' and '.join(missing)} not set. SageMaker sets {HOSTS}, such as "
            f'["algo-1", "algo-2"], and {CURRENT_HOST}, such as algo-1.'
        )
    hosts, current = sorted(_host_list(environ[HOSTS])), environ[CURRENT_HOST]
    if current in hosts:
        return hosts, hosts.index(current)
    if not current and len(hosts) <= 1:
        return [], None
    raise ClusterEnvironmentError(
        f"{CURRENT_HOST}={current!r} is not one of {HOSTS}={environ[HOSTS]}. SageMaker sets both; set them as it does, "
        f"or use TF_CONFIG."
    )


@final
class SageMakerClusterResolver(EnvironmentResolver):
    """The cluster of SM_HOSTS and SM_CURRENT_HOST, with one worker on each host. Every access reads the variables.

    Args:
      port: The port of all workers.
      task_type: Replaces ``worker``; None outside of a cluster.
      task_id: Replaces the index of this host among the sorted hosts; None outside of a cluster.
      rpc_layer: See ``ClusterResolver``.
      environment: The value of ``environment``.
      environ: Replaces ``os.environ``.

    The methods and properties raise a ClusterEnvironmentError if a variable is missing or malformed.

    >>> variables = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    >>> resolver = SageMakerClusterResolver(environ=variables)
    >>> resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['algo-1:2223', 'algo-2:2223']}), 1)
    """

    def __init__(
        self,
        port: int = PORT,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(task_type, task_id, environment, environ)
        self.rpc_layer = rpc_layer
        self._port = int(port)

    def cluster_spec(self) -> ClusterSpec:
        """Returns a worker for each host."""
        hosts, _ = read_hosts(self._environ)
        jobs = {"worker": [join_address(host, self._port) for host in hosts]} if hosts else {}
        return ClusterSpec(jobs, source="SageMaker's variables")

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task, by default this one; empty if there is only one."""
        return "" if is_one_task(self.cluster_spec()) else master_of(self, task_type, task_id, rpc_layer)

    def _read_task_type(self) -> str | None:
        return None if read_hosts(self._environ)[1] is None else "worker"

    def _read_task_id(self) -> int | None:
        return read_hosts(self._environ)[1]


def _host_list(text: str) -> list[str]:
    try:
        hosts = read_json(text or "[]")
    except TextError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise ClusterEnvironmentError(
            f'{HOSTS}={text!r} must be a JSON list of host names, such as ["algo-1", "algo-2"]. SageMaker sets it; set it '
            f"as it does, or use TF_CONFIG."
        )
    return hosts
