"""The status of a job with a synchronous strategy, which its chief serves if ``REPLICAX_STATUS_ADDRESS`` is set.

The heartbeats of the other processes bring their figures to the chief.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replicax._src.cluster.chief import is_chief
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.detect import choose_resolver
from replicax._src.cluster.peers import joined_peers
from replicax._src.cluster.progress import say
from replicax._src.cluster.spec import split_address
from replicax._src.status.figures import FIGURES, figures, of_job
from replicax._src.status.status import STATUS_ADDRESS_VARIABLE

if TYPE_CHECKING:
    from replicax._src.status.server import StatusServer

_servers: list[StatusServer] = []


def serve_status() -> None:
    """Serves the status from now on, if this process is the chief and the environment has an address for it. A second
    call does nothing. With parameter servers the coordinator serves instead.

    An address where it cannot serve is only a warning: the job goes on without a status.
    """
    address = os.environ.get(STATUS_ADDRESS_VARIABLE)
    if not address or _servers or not is_chief() or "ps" in choose_resolver().membership.spec.jobs:
        return
    from replicax._src.status.server import server_of_environment  # which few programs need

    server = server_of_environment(address, Credentials.of_environment(os.environ).token, status_of_job)
    if server is None:
        return
    server.start()
    _servers.append(server)
    atexit.register(server.close)
    if split_address(address)[1] != split_address(server.address)[1] or not server.access.is_local:
        say(f"Status: http://{server.address}/ and replicax top {server.address}")


def status_of_job() -> dict[str, Any]:
    """Returns the current status, without rates."""
    own, peers = figures(), joined_peers()
    if peers is None:
        state = "running" if own["steps"] else "starting"
        return {**status_of([{"task": "worker 0", "state": state, **own}], time.time()), **of_job()}
    tasks = peers.figures_of_tasks()
    # Its own figures come from the controller too: those of now would be ahead of the others'.
    tasks[peers.number] = {**own, **tasks[peers.number]}
    return {**status_of(tasks, time.time()), **of_job()}


def status_of(tasks: Sequence[Mapping[str, Any]], now: float) -> dict[str, Any]:
    """Returns a status of tasks with some of the ``FIGURES``. Fields that no task knows are left out."""
    optional = {
        name for name in ("device_bytes", "function") if all(task.get(name) is None for task in tasks)
    }
    names = [name for name in ("task", "state", "function", *FIGURES) if name not in optional]
    return {"time": now, "tasks": [{name: task.get(name) for name in names} for task in tasks]}
