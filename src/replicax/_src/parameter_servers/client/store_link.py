"""Links to a store of this process, in place of those to a parameter server."""

from __future__ import annotations

from collections import deque
from typing import Protocol, final

import numpy as np

from replicax._src.parameter_servers.errors import described, of_answer
from replicax._src.parameter_servers.transport.messages import Message


class Answering(Protocol):
    """What answers messages in this process: a ``Store``."""

    def answer(self, message: Message) -> Message: ...


@final
class StoreClient:
    """Opens links to a store of this process."""

    def __init__(self, store: Answering, task: str):
        self._store, self._task = store, task

    def open(self) -> StoreLink:
        return StoreLink(self._store, self._task)

    def close(self) -> None:
        pass


@final
class StoreLink:
    """A link to a store of this process. Arrays and errors come as they come from another one."""

    def __init__(self, store: Answering, task: str):
        self._store, self._task = store, task
        self._answers: deque[Message | Exception] = deque()

    def send(self, message: Message, timeout_s: float = 60.0) -> None:
        del timeout_s
        try:
            answer = self._store.answer(message)
            self._answers.append(Message(answer.header, [np.array(array) for array in answer.arrays]))
        except Exception as error:
            self._answers.append(of_answer(described(error), self._task))

    def receive(self, timeout_s: float) -> Message:
        del timeout_s
        answer = self._answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._answers.clear()
