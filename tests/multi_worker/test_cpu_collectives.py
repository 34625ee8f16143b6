"""Processes say which library carries their collectives, and refuse MPI."""

import pytest


def join():
    import logging

    logging.basicConfig(level=logging.INFO)
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    try:
        strategy = rx.MultiWorkerMirroredStrategy()
    except rx.errors.ReplicaxError as error:
        report(kind=type(error).__name__, text=str(error))
        raise SystemExit(3) from None
    numbers = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))
    report(total=float(strategy.reduce("SUM", numbers, axis=None)))


@pytest.mark.rest
@pytest.mark.timeout(250)
def test_the_log_says_gloo_in_processes(local_cluster):
    cluster = local_cluster(2, timeout_s=200)
    cluster.start(join)
    for result in cluster.wait().values():
        assert result.report == {"total": 2.0}, result.output
        assert any(
            line.endswith("here; collectives by gloo; sums by shared memory.") for line in result.output
        ), result.output


@pytest.mark.timeout(250)
def test_collectives_by_mpi_are_an_error_in_processes(local_cluster):
    """It ends at once, before JAX ends the process in MPI_Init."""
    cluster = local_cluster(2, environment={"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi"}, timeout_s=200)
    cluster.start(join)
    for result in cluster.wait().values():
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "ClusterEnvironmentError"
        assert "replicax no longer has collectives by MPI" in result.report["text"]
