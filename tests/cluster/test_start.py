"""Joining a cluster of one task, up to where JAX would start."""

import pytest

from replicax._src.cluster import start
from replicax._src.cluster.layout import free_ports

pytestmark = pytest.mark.timeout(60)


class _Enough(Exception):
    pass


def test_a_part_of_a_second_counts_as_one_for_jax(monkeypatch):
    """It takes whole seconds, and none of them would be no time at all."""
    limits = []

    def join_processes(coordinator, num_processes, number, timeout_s):
        limits.append(timeout_s)
        raise _Enough

    monkeypatch.setattr(start.jax_compat, "join_processes", join_processes)
    monkeypatch.setenv("REPLICAX_START_TIMEOUT_S", "50.25")
    (port,) = free_ports(1)
    with pytest.raises(_Enough):
        start._LiveCluster(["worker 0"], [f"127.0.0.1:{port}"], 0, 10.0)
    assert limits == [51]
