"""The cluster of parameter servers as its tasks know it: who they are, what they share, what the launcher told them."""

from __future__ import annotations

from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver
from replicax._src.cluster.server_job import ServerJob
from replicax._src.cluster.server_settings import ServerSettings
from replicax._src.cluster.spec import ClusterDef, ClusterSpec, Task

__all__ = [
    "ClusterDef",
    "ClusterResolver",
    "ClusterSpec",
    "Credentials",
    "Membership",
    "ServerJob",
    "ServerSettings",
    "Task",
]
