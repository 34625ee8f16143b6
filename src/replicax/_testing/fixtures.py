"""The pytest fixture ``local_cluster``; ``replicax.pytest_plugin`` is its public name.

Only this file needs pytest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replicax._testing.cluster import LocalCluster

_CLUSTERS: pytest.StashKey[list[LocalCluster]] = pytest.StashKey()


@pytest.fixture
def local_cluster(request: pytest.FixtureRequest) -> Iterator[Callable[..., LocalCluster]]:
    """Creates ``LocalCluster``s that end with the test: ``local_cluster(num_workers=2)`` takes the same arguments.

    All are closed after the test, which fails if a process is left. If the test fails, its report has the output of all
    tasks.
    """
    clusters: list[LocalCluster] = []
    request.node.stash[_CLUSTERS] = clusters

    def make(*args: Any, **options: Any) -> LocalCluster:
        clusters.append(LocalCluster(*args, **options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()
    left = [pid for cluster in clusters for pid in cluster.pids if is_there(pid)]
    assert not left, f"processes of the cluster are left: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Adds the output of each task of the test's clusters to the report of a test that failed."""
    report = yield
    if report.when == "call" and report.failed:
        for cluster in item.stash.get(_CLUSTERS, []):
            for task in cluster.tasks.values():
                how = task.ending or "still runs"
                report.sections.append((f"Output of {task.task}, which {how}", "\n".join(task.output)))
    return report


def is_there(pid: int) -> bool:
    """Returns True if a process, or another one of its group, exists."""
    for look in (os.kill, os.killpg):
        try:
            look(pid, 0)
        except ProcessLookupError:
            continue
        return True
    return False
