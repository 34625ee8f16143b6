"""Clusters of real processes, each run once for the tests that look at what it reported."""

import functools
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from replicax._src.testing.fixtures import is_there
from replicax.testing import LocalCluster, report  # noqa: F401

# Keras wraps these if they are there. The programs here use no such wrapper, and start in half the time without.
LEFT_OUT = ("sklearn", "matplotlib")


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Of all tasks: Keras on JAX, and nothing else that takes long to import."""
    folder = tmp_path_factory.mktemp("left_out")
    for name in LEFT_OUT:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('left out')\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"KERAS_BACKEND": "jax", "PYTHONPATH": path}


@pytest.fixture(scope="session")
def reports_of(environment):
    """``reports_of(program, *args, workers=2, devices=1)``: for each worker all that it reported, as one dict.

    ``chief=True`` is one more task, the first.
    """

    @functools.cache
    def run(program, args, workers, devices, chief):
        with LocalCluster(
            workers, chief=chief, devices_per_worker=devices, environment=environment, timeout_s=120
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
