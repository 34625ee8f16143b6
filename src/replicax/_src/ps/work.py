"""What a task does for one coordinator, by its job: a parameter server holds pieces, a worker runs closures."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax

from replicax._src.ps.credentials import Credentials
from replicax._src.ps.links import PsLinks
from replicax._src.ps.messages import Message
from replicax._src.ps.resources import WorkerPlace
from replicax._src.ps.server_def import ServerDef
from replicax._src.ps.service import Work
from replicax._src.ps.store import Store
from replicax._src.ps.transport import TaskClient
from replicax._src.ps.worker import Worker


def work_of(
    definition: ServerDef, credentials: Credentials
) -> tuple[str, Callable[[str, Sequence[str]], Work]]:
    """The instance of a task, and what makes its work for a coordinator; both are for ``TaskService``."""
    if definition.job_name == "ps":
        store = Store()
        return store.instance, lambda incarnation, ps: PsWork(store, incarnation)
    place = WorkerPlace(
        definition.task_index, definition.cluster.num_tasks("worker"), jax.local_device_count()
    )

    def begin(incarnation: str, ps: Sequence[str]) -> Worker:
        clients = [TaskClient(address, credentials, f"ps {index}") for index, address in enumerate(ps)]
        return Worker(PsLinks(clients, incarnation), place)

    return uuid.uuid4().hex, begin


@final
class PsWork:
    """A parameter server's: its store, where the coordinator's time begins and ends with it.

    Args:
      store: Of the task.
      incarnation: Of the coordinator.
    """

    def __init__(self, store: Store, incarnation: str):
        self._store, self._incarnation = store, incarnation
        store.hello(incarnation)

    def answer(self, message: Message) -> Message:
        """Does what a message asks."""
        return self._store.answer(message)

    def statistics(self) -> Mapping[str, Any]:
        """The store's."""
        return self._store.statistics()

    def close(self) -> None:
        """Drops all pieces."""
        self._store.leave(self._incarnation)
