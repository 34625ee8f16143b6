"""Workers and parameter servers of this process, for tests: real stores and runners, without sockets and processes."""

import contextlib
import queue
import threading

from replicax._ps.client.session import Session
from replicax._ps.coordinator.readable import Bell
from replicax._ps.store.store import Store
from replicax._ps.strategy.coordinator_form import CoordinatorForm
from replicax._ps.strategy.parameter_server import ParameterServerStrategy
from replicax._ps.worker.resources import WorkerPlace
from replicax._ps.worker.worker import Worker
from store_connections import server_clients

ME = "a coordinator"


@contextlib.contextmanager
def in_memory_strategy(workers=1, ps=1, partitioner=None, devices_per_worker=1, told=None):
    """A strategy whose tasks are threads.

    Args:
      told: The reports of workers, by number, that replace the true ones.
    """
    tasks = _Tasks(workers, ps, {"num_devices": devices_per_worker, "platform": "cpu"}, told or {})
    session = Session(server_clients(tasks.stores, ME), tasks=tasks, instances=tasks.addresses("ps"))
    strategy = ParameterServerStrategy._of_form(CoordinatorForm(session, devices_per_worker), partitioner)
    try:
        yield strategy
    finally:
        strategy.close()


class _Tasks:
    """Replaces ``_ps/client/tasks.py``."""

    def __init__(self, workers, ps, is_so, told):
        self.stores = [Store() for _ in range(ps)]
        for store in self.stores:
            store.hello(ME)
        self.workers = [
            Worker(server_clients(self.stores, ME), WorkerPlace(index, workers)) for index in range(workers)
        ]

        self._told = [is_so | told.get(index, {}) for index in range(workers)]

    def addresses(self, job):
        return tuple(f"{job} {n}" for n in range(len(self.stores if job == "ps" else self.workers)))

    def connect(self, job, index):
        told = self._told[index] if job == "worker" else {}
        return _Client((self.stores if job == "ps" else self.workers)[index], f"{job} {index}", told)

    def close(self):
        for worker in self.workers:
            worker.close()


class _Client:
    """Replaces ``TaskClient``."""

    def __init__(self, task, name, told):
        self._task, self._name, self._told = task, name, told

    def ask(self, what, header, timeout_s):
        return {"instance": self._name, "statistics": {}, **self._told}

    def open(self, timeout_s):
        return _Link(self._task, self._name)

    def close(self):
        pass


class _Link:
    """Replaces the transport's stream: a thread answers the messages in order."""

    def __init__(self, task, name):
        self._task, self._name = task, name
        self._messages, self._answers = queue.Queue(), queue.Queue()
        self._bell = Bell()
        threading.Thread(target=self._answer, name=f"in memory {name}", daemon=True).start()

    def send_all(self, messages, timeout_s):
        for message in messages:
            self._messages.put(message)

    def fileno(self):
        return self._bell.fileno()

    def has_bytes(self):
        return False

    def receive_arrived(self):
        self._bell.silence()
        answers = []
        with contextlib.suppress(queue.Empty):
            while True:
                answers.append(self._answers.get_nowait())
        return answers

    def close(self):
        self._messages.put(None)

    def _answer(self):
        while (message := self._messages.get()) is not None:
            try:
                self._answers.put(self._task.answer(message))
            except Exception as error:
                self._answers.put(error)
            self._bell.ring()
