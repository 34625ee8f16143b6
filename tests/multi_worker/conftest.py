"""Clusters of real processes, each run once for the tests that look at what it reported."""

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
    """``reports_of(program, *args, workers=2, devices=1)``: for each worker all that it reported, as one dict.

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

    # What is left to the defaults and what is said alike is one run.
    return lambda program, *args, workers=2, devices=1, chief=False: run(
        program, args, workers, devices, chief
    )
