"""The status of a job, over HTTP. Few programs serve it, so it is imported when one does."""

from __future__ import annotations

from replicax._src.status.http_server import server_of_tasks

__all__ = [
    "server_of_tasks",
]
