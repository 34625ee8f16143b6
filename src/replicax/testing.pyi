# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.

from replicax._ps.local_updates.group_replay import ReplayReport as ReplayReport
from replicax._ps.local_updates.group_replay import replay_groups as replay_groups
from replicax._testing.check import check_against_one_device as check_against_one_device
from replicax._testing.cluster import LocalCluster as LocalCluster
from replicax._testing.cluster import server_cluster as server_cluster
from replicax._testing.comparison_report import Difference as Difference
from replicax._testing.comparison_report import OneDeviceReport as OneDeviceReport
from replicax._testing.local_tasks import ClusterResults as ClusterResults
from replicax._testing.local_tasks import LocalTask as LocalTask
from replicax._testing.local_tasks import TaskResult as TaskResult
from replicax._testing.task_reports import report as report

__all__ = [
    'ClusterResults',
    'Difference',
    'LocalCluster',
    'LocalTask',
    'OneDeviceReport',
    'ReplayReport',
    'TaskResult',
    'check_against_one_device',
    'replay_groups',
    'report',
    'server_cluster',
]
