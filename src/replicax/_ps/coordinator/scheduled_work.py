"""``Work``: a scheduled function, as the thread that owns the job sends it to workers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, final

import numpy as np

from replicax._ps.client.session import Session
from replicax._ps.job.events_in import FunctionNeeds
from replicax._ps.strategy.remote_closures import PreparedClosure
from replicax._ps.strategy.worker_function import platforms_of_workers
from replicax._ps.transport.messages import Message


@final
@dataclasses.dataclass(eq=False, slots=True)
class SendableFunction:
    """A prepared closure with the programs that it had at one moment, so that the job knows all that is sent.

    Nobody changes it.

    Attributes:
      prepared: The closure.
      programs: The digests of the workers' programs, by signature of the elements.
      platforms: The platforms of the workers that these are for.
      needs: What a worker must have before it runs the closure.
    """

    prepared: PreparedClosure
    programs: Mapping[str, str]
    platforms: Sequence[str]
    needs: FunctionNeeds

    @classmethod
    def of(cls, prepared: PreparedClosure, session: Session) -> SendableFunction:
        """Returns a closure with its present programs. It may make these for the platform of a new worker."""
        platforms = tuple(platforms_of_workers(session))  # first: another platform shows as stale
        programs = dict(prepared.programs)
        num_bytes = sum(array.nbytes for array in _sent_along(prepared))
        needs = FunctionNeeds(
            tuple(programs.values()), tuple(prepared.constants), tuple(prepared.iterators), num_bytes
        )
        return cls(prepared, programs, platforms, needs)

    @property
    def signature(self) -> str:
        """The signature of the elements for which it was traced first."""
        return next(iter(self.programs))

    def is_stale(self, session: Session) -> bool:
        """True if a worker of another platform has connected, or a value on the servers has moved."""
        return self.platforms != tuple(platforms_of_workers(session)) or not self.prepared.is_valid()

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the message with which a worker runs it."""
        prepared = self.prepared
        fields: dict[str, Any] = {"op": "closure", "program": self.programs}
        if iterators := prepared.iterators:
            fields["iterators"] = iterators
        if prepared.named:
            fields["named"] = list(prepared.named.items())
        return fields

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """The arrays that travel with it."""
        return _sent_along(self.prepared)

    def constant(self, name: str) -> np.ndarray:
        return self.prepared.constants[name]

    def program(self, digest: str) -> tuple[dict[str, Any], Sequence[np.ndarray]]:
        """Returns the fields and the arrays of the message that gives a worker a program."""
        program = self.prepared.program(digest)
        blobs = [np.frombuffer(blob, np.uint8) for blob in program.blobs]
        return {"op": "program", "digest": digest, "described": program.described()}, blobs


@final
class Work:
    """A scheduled function. Its ``sendable`` is replaced when it is traced again.

    Args:
      sendable: The function.
      prepare: Prepares it again, after a value on the servers has moved.
      keeps: Objects that must live as long as it, such as iterators.
    """

    __slots__ = ("_first", "_keeps", "_prepare", "sendable")

    def __init__(self, sendable: SendableFunction, prepare: Callable[[], PreparedClosure], keeps: Any = None):
        self.sendable, self._first = sendable, sendable.prepared
        self._prepare, self._keeps = prepare, keeps

    @property
    def kind(self) -> Hashable:
        """A key that is equal for functions of one program."""
        return next(iter(self.sendable.programs.values()), None)

    def made(self, signature: str, session: Session) -> SendableFunction:
        """Makes its program for elements of a signature. It may trace the function, and wait for servers."""
        prepared = self.sendable.prepared
        if not prepared.is_valid():
            # The caller may have changed its arrays since.
            prepared = dataclasses.replace(self._prepare(), arguments=prepared.arguments, named={})
        prepared.make(signature)
        return SendableFunction.of(prepared, session)

    def assemble_for(self, answer: Message) -> Callable[[Sequence[Any]], Any] | None:
        """Returns what makes the function's result of the arrays of an answer; None if that is as expected."""
        signature = answer.header.get("signature")
        if signature is None:
            return None if self.sendable.prepared is self._first else self.sendable.prepared.assemble
        return functools.partial(self.sendable.prepared.assemble, signature=signature)


def _sent_along(prepared: PreparedClosure) -> Sequence[np.ndarray]:
    """Returns the arguments of a closure that are sent with it."""
    if not prepared.named:
        return prepared.arguments
    return [array for position, array in enumerate(prepared.arguments) if position not in prepared.named]
