"""``ServerClients``: a client of each parameter server, asked concurrently. Workers and coordinators have one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, final

import numpy as np

from replicax._ps.client.row_requests import RowsWanted
from replicax._ps.client.server_client import ServerClient
from replicax._ps.client.server_requests import (
    Answered,
    Ask,
    Closure,
    answered_of,
    request_of,
    row_asks,
    rows_of,
)
from replicax._ps.programs.programs import Shard
from replicax._ps.store.group_rules import View
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import InvalidArgumentError
from replicax._src.program_kit.task_connections import aligned_empty


@final
class ServerClients:
    """The clients of all parameter servers. They connect at the first use, and reconnect after a failure.

    Threads may share it. Arrays that a step returns from stores of this process are valid until the next request:
    copy them
    inside ``held``, or use separate clients.

    Args:
      connectors: One for each parameter server, in order.
      incarnation: The session id of the coordinator.
      timeout_s: The longest time for one call, including everything that is sent again.
    """

    def __init__(self, connectors: Sequence[TaskClient], incarnation: Any, timeout_s: float = 60.0):
        self._connectors = connectors
        self.incarnation, self.timeout_s = incarnation, timeout_s
        self._servers = [
            ServerClient(f"ps {ps}", connector, incarnation) for ps, connector in enumerate(connectors)
        ]

    def __len__(self) -> int:
        return len(self._servers)

    def __getitem__(self, ps: int) -> ServerClient:
        return self._servers[ps]

    def use_primaries(self, views: Iterable[View]) -> None:
        """Sets the primaries of the groups: each shard is on two parameter servers, its own and the next one.

        A thread that waits for a server that is no longer the primary wakes, and asks the primary. A view that is
        older than
        the last one is ignored.
        """
        for view in views:
            server, ps = self._servers[view.group], view.group
            server.replicate(ps, self._connectors[(ps + 1) % len(self)])
            server.use_primary(0 if view.primary == ps else 1, view.epoch)

    def step(
        self, closure: Closure | None, low: int, asks: Mapping[int, Ask], round_number: int | None = None
    ) -> dict[int, Answered]:
        """Applies and reads on several parameter servers at once. Each server does its part atomically.

        Args:
          closure: The closure, for which the servers apply their parts once. Without it, a step with a program is not
            resent.
          low: All closures of that session with lower numbers have ended.
          asks: The parts, by the number of the parameter server.
          round_number: The round that the gradients belong to.

        Raises:
          UnavailableError: A parameter server cannot be reached; others may have applied their part.
          UnknownProgramError: A server does not have a program, and this client did not give it that program.
        """
        requests = {ps: request_of(ask, closure, low, round_number) for ps, ask in asks.items()}
        may_repeat = closure is not None or all(ask.program is None for ask in asks.values())
        answers = self.ask(requests, may_repeat)
        return {ps: answered_of(asks[ps], answer) for ps, answer in answers.items()}

    def read(self, variables: Sequence[Sequence[Shard]]) -> list[np.ndarray]:
        """Returns the full values of variables, each given as its shards in the order of their rows.

        All shards on one server are read atomically; several servers are read at about the same time. The memory is
        aligned
        and not shared, so that JAX adopts it without a copy. It may be read-only.
        """
        shards = [shard for shards in variables for shard in shards]
        keys: dict[int, dict[str, None]] = {}
        for shard in shards:
            keys.setdefault(shard.ps, {})[shard.key] = None
        asks = {ps: Ask(pull=[(key, None) for key in ours]) for ps, ours in keys.items()}
        with self.held(keys):  # until the values are copied
            answers = self.step(None, 0, asks)
            # An array that is alone in a message's memory needs no copy: the memory is reused only when the array is
            # deleted.
            if len(shards) == 1:
                return [_value(answers[shards[0].ps], shards[0].key)]
            return [joined([_value(answers[p.ps], p.key) for p in shards]) for shards in variables]

    def read_rows(self, shards: Sequence[Shard], ids: np.ndarray, num_rows: int) -> np.ndarray:
        """Returns a copy of the rows of a variable at ``ids`` [n], all of which it must have."""
        wanted = RowsWanted.of(ids, shards, num_rows)
        if not wanted.has_all:
            raise InvalidArgumentError(
                f"Got row numbers from {np.min(ids)} to {np.max(ids)}, but the table has rows 0 to {num_rows - 1}."
            )
        with self.held({ps for ps, _, _ in wanted.parts}):
            answers = self.step(None, 0, row_asks([wanted]))
            (rows,) = rows_of([wanted], answers)
            return rows[wanted.positions]

    def ask(self, requests: Mapping[int, Message], may_repeat: bool = True) -> dict[int, Message]:
        """Sends all requests, then receives all answers, so that no connection is left with an unread answer.

        Raises:
          UnavailableError: A parameter server cannot be reached; the others have executed their requests.
          ReplicaxError: The error that a server answered with.
        """
        deadline = time.monotonic() + self.timeout_s
        with self.held(requests):
            try:
                sent = {
                    ps: self._servers[ps].begin(request, deadline, may_repeat)
                    for ps, request in requests.items()
                }
                answers = {ps: self._servers[ps].end(message, deadline) for ps, message in sent.items()}
            except BaseException:  # Ctrl-C: the next requests would get the answers to these
                for ps in requests:
                    self._servers[ps].disconnect()
                raise
        checked: dict[int, Message] = {}
        for ps, answer in answers.items():
            if isinstance(answer, Exception):
                raise answer
            checked[ps] = answer
        return checked

    def ask_all(self, request: Message) -> list[Message]:
        """Sends the same request to all parameter servers, and returns their answers, in order; see ``ask``."""
        return list(self.ask(dict.fromkeys(range(len(self)), request)).values())

    @contextlib.contextmanager
    def held(self, servers: Iterable[int] | None = None) -> Iterator[None]:
        """Reserves these clients, or all, for the calling thread."""
        taken: list[threading.RLock] = []  # an ExitStack costs more than the locks
        try:
            for ps in sorted(
                range(len(self)) if servers is None else servers
            ):  # the same order in all threads
                lock = self._servers[ps].lock
                lock.acquire()
                taken.append(lock)
            yield
        finally:
            for lock in taken:
                lock.release()

    def close(self) -> None:
        """Closes all connections. A thread that waits for an answer gets UnavailableError."""
        for server in self._servers:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> dict[str, Any]:
        """Counts, for each parameter server, the messages sent and the connections opened."""
        return {
            server.name: {"num_messages": server.num_messages, "num_opened": server.num_opened}
            for server in self._servers
        }


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns an aligned copy of a variable, given the values of all its shards."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:]) if len(parts) > 1 else parts[0].shape
    whole = aligned_empty(sum(part.nbytes for part in parts)).view(parts[0].dtype).reshape(shape)
    if len(parts) == 1:
        whole[...] = parts[0]
        return whole
    return np.concatenate(parts, out=whole)


def _value(answer: Answered, key: str) -> np.ndarray:
    array = answer.values[key][1]
    assert array is not None  # no version was known
    return array
