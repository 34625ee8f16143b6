"""Clusters of real processes, each run once for all tests that read its reports."""

import functools
import inspect
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parent)
sys.path.insert(0, FOLDER)

from checks import path_of_programs
from replicax._testing.fixtures import is_there
from replicax.testing import LocalCluster, report  # noqa: F401


@pytest.fixture(scope="session")
def reports_of():
    """``reports_of(program, *args, workers=2, devices=1)``: the reports of each worker, as one dict.

    ``chief=True`` is one more task, the first. A program on an array that spans processes fails the test if the processes
    did not agree on its order. For several programs in the same processes: ``reports_of([(program, *args), ...])``.
    """

    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()}

    @functools.cache
    def run(calls, workers, devices, chief):
        with LocalCluster(
            workers, chief=chief, devices_per_worker=devices, environment=environment, timeout_s=170
        ) as cluster:
            cluster.start(watched(calls))
            results = cluster.wait()
            results.raise_if_failed()
        left = [pid for pid in cluster.pids if is_there(pid)]
        assert not left, f"processes of the cluster are left: {left}"
        reports = [result.report for result in results.values()]
        without_an_order = [line for one in reports for line in one.pop("programs_without_an_order", [])]
        if without_an_order:
            pytest.fail("\n".join(without_an_order))
        return reports

    def reports(program, *args, workers=2, devices=1, chief=False):
        """Calls with equal arguments, after defaults, are one run."""
        calls = program if isinstance(program, list) else [(program, *args)]
        return run(tuple(calls), workers, devices, chief)

    return reports


def watched(calls):
    """The source of a program that reports programs without an order; see ``ordered_programs.py``."""
    return (
        f"import sys\n\nsys.path.append({FOLDER!r})\nimport ordered_programs\n"
        + "".join(f"\n\n{inspect.getsource(program)}" for program, *_ in calls)
        + "".join(f"\n\n{program.__name__}(*{args!r})\n" for program, *args in calls)
    )
