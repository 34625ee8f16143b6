"""``Worker``: serves one coordinator: keeps programs, constants and resources, and runs closures."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from replicax._ps.client.server_clients import ServerClients
from replicax._ps.programs.programs import WorkerProgram
from replicax._ps.transport.messages import Message
from replicax._ps.worker.resources import (
    WORKER_INDEX,
    Resource,
    ValueResource,
    WorkerPlace,
    make,
)
from replicax._ps.worker.runner import ClosureCall, Runner
from replicax._src.program_kit.errors import ClosureAbortedError, MessageError


@final
class Worker:
    """Answers the messages of one coordinator, one at a time.

    Args:
      servers: The worker's own clients of the parameter servers, which are closed with it.
      place: The index of this worker.
      traffic: Returns the bytes sent to and received from the servers, by direction.
    """

    def __init__(
        self, servers: ServerClients, place: WorkerPlace, traffic: Callable[[], Mapping[str, int]] = dict
    ):
        self._servers, self._place, self._traffic = servers, place, traffic
        self._runner = Runner(servers)
        self._resources: dict[str, Resource] = {}
        self._index = ValueResource(np.int32(place.index), place)
        self._lock = threading.Lock()
        self._operations: dict[str, Callable[[Mapping[str, Any], Sequence[np.ndarray]], Message]] = {
            "program": self._program,
            "constant": self._constant,
            "resource": self._resource,
            "closure": self._closure,
            "release": self._release,
        }

    def answer(self, message: Message) -> Message:
        """Executes a request. Other errors than the one below are those of the operation.

        Raises:
          MessageError: There is no such operation.
        """
        operation = self._operations.get(message.header.get("op", ""))
        if operation is None:
            raise MessageError(
                f"A worker has no operation {message.header.get('op')!r}; it has {', '.join(self._operations)}."
            )
        with self._lock:
            return operation(message.header, message.arrays)

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of the runner, the number of resources, and the traffic with the parameter servers."""
        own = {"num_resources": len(self._resources), "traffic": dict(self._traffic())}
        return {**self._runner.statistics(), **own}

    def close(self) -> None:
        """Ends the threads that read ahead, and closes the connections to the parameter servers, even if a closure
        runs.
        """
        self._servers.close()
        for resource in list(self._resources.values()):
            resource.close()

    def _program(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        self._runner.add_program(WorkerProgram.of(header["described"], [array.tobytes() for array in arrays]))
        return Message({})

    def _constant(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        self._runner.add_constant(header["name"], arrays[0])
        return Message({})

    def _resource(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        name = header["name"]
        before = self._resources.pop(name, None)
        if before is not None:
            before.close()
        place = dataclasses.replace(self._place, num_replicas_in_sync=header.get("num_replicas", 1))
        made = make(header["kind"], arrays[0], place)
        self._resources[name] = made
        return Message({"spec": made.spec})

    def _closure(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        incarnation, number = header["closure"]
        result = self._runner.run(
            ClosureCall(
                (incarnation, number),
                header["low"],
                header["epoch"],
                header["program"],
                self._arguments(header.get("named", ()), arrays),
                [self._named(name) for name in header.get("iterators", ())],
                header.get("round"),
            )
        )
        if result.need is not None:
            return Message({"need": result.need, "end": result.end and result.end.reason})
        return Message({} if result.signature is None else {"signature": result.signature}, result.results)

    def _arguments(self, named: Sequence[tuple[int, str]], arrays: Sequence[np.ndarray]) -> Sequence[Any]:
        """Returns the arguments of a closure: the arrays sent with it, and in their places those that were sent
        before.
        """
        arguments: list[Any] = list(arrays)
        for position, name in named:  # in order
            arguments.insert(position, self._runner.constant(name))
        return arguments

    def _release(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        for name in header["names"]:
            resource = self._resources.pop(name, None)
            if resource is not None:
                resource.close()
        return Message({})

    def _named(self, name: str) -> Resource:
        resource = self._index if name == WORKER_INDEX else self._resources.get(name)
        if resource is None:
            raise ClosureAbortedError(
                f"This worker does not have the resource {name}: the worker has restarted, or the resource "
                "was released. The coordinator must make it again."
            )
        return resource
