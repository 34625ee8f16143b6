"""The status of a job with a synchronous strategy, which its chief serves if ``REPLICAX_STATUS_ADDRESS`` is set.

The heartbeats of the other processes bring their figures to the chief.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from replicax._src.cluster.chief import is_chief
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.detect import choose_resolver
from replicax._src.cluster.figures import FIGURES, figures, job_figures
from replicax._src.cluster.machine_layout import STATUS_ADDRESS_VARIABLE
from replicax._src.cluster.peers import joined_peers
from replicax._src.cluster.progress import say
from replicax._src.cluster.spec import split_address

if TYPE_CHECKING:
    from replicax._src.status.http_server import StatusServer

_TAKE_OVER_S: Final = 10.0
_WAITING: Final = "replicax-status-address"  # the name of a thread

_servers: list[StatusServer] = []


def serve_status() -> None:
    """Serves the status from now on, if this process is the chief and the environment has an address for it. A second
    call does nothing. With parameter servers the coordinator serves instead.

    An address where it cannot serve is only a warning: the job goes on without a status.
    """
    address = os.environ.get(STATUS_ADDRESS_VARIABLE)
    if not address or _servers or not is_chief() or "ps" in choose_resolver().membership.spec.jobs:
        return
    _serve(address)


def take_status_over() -> None:
    """Serves the status from now on in a process that becomes the chief during the job. Does not block: a thread waits
    for the address. Something that the chief before has started may hold it for a moment. If another process of the job
    serves there, because this one has come later, the thread waits for its end.
    """
    address = os.environ.get(STATUS_ADDRESS_VARIABLE)
    is_waiting = any(thread.name == _WAITING for thread in threading.enumerate())
    if address and not _servers and not is_waiting:
        arguments = (address, _TAKE_OVER_S)
        threading.Thread(target=_serve, args=arguments, name=_WAITING, daemon=True).start()


def hand_status_over() -> None:
    """Ends the status here, if this process serves it, because another one has become the chief. Does not block."""
    if _servers:
        server = _servers.pop()
        atexit.unregister(server.close)
        threading.Thread(target=_end, args=(server,), name="replicax-status-end", daemon=True).start()


def _end(server: StatusServer) -> None:
    server.close()
    peers = joined_peers()
    if peers is not None:
        peers.forget_figures()  # after the server, which would ask for them again


def _serve(address: str, wait_s: float = 0.0) -> None:
    from replicax._src.status.http_server import server_of_environment  # which few programs need

    server = server_of_environment(
        address, Credentials.from_environment(os.environ).token, status_of_job, wait_s
    )
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
        return {**status_of([{"task": "worker 0", "state": state, **own}], time.time()), **job_figures()}
    tasks = peers.figures_of_tasks()
    # Its own figures come from the controller too: those of now would be ahead of the others'.
    tasks[peers.number] = {**own, **tasks[peers.number]}
    return {**status_of(tasks, time.time()), **job_figures()}


def status_of(tasks: Sequence[Mapping[str, Any]], now: float) -> dict[str, Any]:
    """Returns a status of tasks with some of the ``FIGURES``. Fields that no task knows are left out."""
    optional = {
        name for name in ("device_bytes", "function") if all(task.get(name) is None for task in tasks)
    }
    names = [name for name in ("task", "state", "function", *FIGURES) if name not in optional]
    return {"time": now, "tasks": [{name: task.get(name) for name in names} for task in tasks]}
