"""``FaultyNetwork``: a proxy between each two tasks of a ``LocalCluster``, which can cut them off or delay messages."""

import contextlib
import json
import os
from unittest import mock

from faulty_proxy import Proxy
from replicax._src.cluster.routes import ROUTES_VARIABLE
from replicax.testing import LocalCluster


class FaultyNetwork:
    """Gives each task of a cluster its own proxy to each other task, by ``REPLICAX_ROUTES``.

    It affects the connections of replicax. JAX's connections go to addresses that only JAX knows.

    Args:
      cluster: A cluster whose tasks have not started.
      make_proxy: Makes a proxy to a host and a port.
    """

    def __init__(self, cluster, make_proxy=Proxy):
        addresses = {
            (kind, index): address
            for kind, those in cluster.cluster.items()
            for index, address in enumerate(those)
        }
        self.proxies = {}
        for source in addresses:
            for to, address in addresses.items():
                if source != to:
                    host, port = address.rsplit(":", 1)
                    self.proxies[source, to] = make_proxy(host, int(port))
            routes = {addresses[to]: p.address for (start, to), p in self.proxies.items() if start == source}
            cluster.own_environment[source] = {ROUTES_VARIABLE: json.dumps(routes)}

    def partition(self, kind, index, *, how="blackhole", from_job=None):
        """Cuts a task off from the others until ``heal``.

        Args:
          how: "blackhole": nothing arrives, and no end is told. "cut": connections end, and new ones end at once.
          from_job: Cuts it off only from the tasks of this job.
        """
        for proxy in self._between(kind, index, from_job):
            proxy.set(how)

    def delay(self, kind, index, delay_s):
        """Delays everything between a task and the others, each way, until ``heal``."""
        for proxy in self._between(kind, index, None):
            proxy.set(delay_s=delay_s)

    def heal(self):
        """Ends all partitions and delays."""
        for proxy in self.proxies.values():
            proxy.set()

    def _between(self, kind, index, from_job):
        task = (kind, index)
        found = [
            proxy
            for ends, proxy in self.proxies.items()
            if task in ends and (from_job is None or any(end[0] == from_job for end in ends if end != task))
        ]
        assert found, f"there is no proxy at {task}"
        return found

    def close(self):
        """Closes all proxies."""
        for proxy in self.proxies.values():
            proxy.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@contextlib.contextmanager
def faulty_server_cluster(workers, ps, make_proxy=Proxy):
    """Like ``rx.testing.server_cluster``, on a faulty network. Yields the cluster and its network."""
    with (
        LocalCluster(workers, chief=True, num_ps=ps) as cluster,
        FaultyNetwork(cluster, make_proxy) as network,
    ):
        cluster.start_servers()
        with mock.patch.dict(os.environ, cluster.environment_of("chief", 0)):
            os.environ.pop("REPLICAX_TOKEN_FILE", None)
            yield cluster, network
