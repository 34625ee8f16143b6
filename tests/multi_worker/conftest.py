"""Clusters of real processes, each run once for all tests that read its reports."""

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checks import path_of_programs
from replicax._src.testing.fixtures import is_there
from replicax.testing import LocalCluster, report  # noqa: F401


@pytest.fixture(scope="session")
def reports_of():
    """``reports_of(program, *args, workers=2, devices=1)``: the reports of each worker, as one dict.

    ``chief=True`` is one more task, the first.
    """

    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()}

    @functools.cache
    def run(program, args, workers, devices, chief):
        with LocalCluster(
            workers, chief=chief, devices_per_worker=devices, environment=environment, timeout_s=170
        ) as cluster:
            cluster.start(program, args)
            results = cluster.wait()
            results.raise_if_failed()
        left = [pid for pid in cluster.pids if is_there(pid)]
        assert not left, f"processes of the cluster are left: {left}"
        return [result.report for result in results.values()]

    # Calls with equal arguments, after defaults, are one run.
    return lambda program, *args, workers=2, devices=1, chief=False: run(
        program, args, workers, devices, chief
    )
