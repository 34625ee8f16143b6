"""Checks of your own programs, for tests and notebooks, and clusters of real processes to test them in:
``rx.testing``.
"""

from replicax._src.public_names import publish_all
from replicax._src.testing.check import check_against_one_device
from replicax._src.testing.cluster import LocalCluster, server_cluster
from replicax._src.testing.report import Difference, OneDeviceReport
from replicax._src.testing.reports import report
from replicax._src.testing.tasks import ClusterResults, LocalTask, TaskResult

__all__ = [
    "ClusterResults",
    "Difference",
    "LocalCluster",
    "LocalTask",
    "OneDeviceReport",
    "TaskResult",
    "check_against_one_device",
    "report",
    "server_cluster",
]

__dir__ = publish_all(globals())
