"""Connections to stores of this process, which replace those to parameter servers."""

from collections import deque

import numpy as np

from replicax._ps.client.server_clients import ServerClients
from replicax._ps.errors import described, error_from_answer
from replicax._ps.transport.messages import Message


def server_clients(stores, incarnation):
    """Clients of stores of this process."""
    connectors = [StoreConnector(store, f"ps {index}") for index, store in enumerate(stores)]
    return ServerClients(connectors, incarnation)


class StoreConnector:
    """Opens connections to a store of this process."""

    def __init__(self, store, task):
        self._store, self._task = store, task

    def open(self):
        return StoreConnection(self._store, self._task)

    def close(self):
        pass


class StoreConnection:
    """A connection to a store of this process. Arrays and errors arrive as from another process."""

    def __init__(self, store, task):
        self._store, self._task = store, task
        self._answers = deque()

    def send(self, message, timeout_s=60.0):
        del timeout_s
        try:
            answer = self._store.answer(message)
            self._answers.append(Message(answer.header, [np.array(array) for array in answer.arrays]))
        except Exception as error:
            self._answers.append(error_from_answer(described(error), self._task))

    def receive(self, timeout_s):
        del timeout_s
        answer = self._answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self._answers.clear()
