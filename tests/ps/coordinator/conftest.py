import pytest

from memory_cluster import MemoryCluster
from replicax._ps.coordinator import cluster_coordinator
from replicax._ps.job.limits import Limits


@pytest.fixture
def fast(monkeypatch):
    """Silent tasks are detected soon."""

    def limits(reconnect_s=3600.0):
        return Limits(heartbeat_s=0.05, heartbeat_timeout_s=0.2, reconnect_s=reconnect_s)

    monkeypatch.setattr(cluster_coordinator, "Limits", limits)


@pytest.fixture
def cluster(fast):
    cluster = MemoryCluster()
    yield cluster
    cluster.end()
