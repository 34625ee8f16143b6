"""Types of what the coordinator needs of a strategy: scheduled functions as data, and the way to the tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from replicax._src.parameter_servers.client.groups import Groups
from replicax._src.parameter_servers.programs.programs import WorkerProgram
from replicax._src.parameter_servers.store.group_rules import View
from replicax._src.parameter_servers.transport.messages import Message


class Link(Protocol):
    """A stream of messages to a task, a ``transport.Link``. Answers come in the order of the messages.

    ``send_all`` sends all or, if one cannot travel, none; small ones travel together. ``receive_all`` waits for one
    answer, and gives those that are there, or the errors that they are. A task that is gone raises UnavailableError
    with its name, and so does ``receive_all`` when another thread closes the link.
    """

    def send_all(self, messages: Sequence[Message], timeout_s: float) -> None: ...
    def receive_all(self, timeout_s: float) -> Sequence[Message | Exception]: ...
    def close(self) -> None: ...


class Client(Protocol):
    """Asks a task, and opens links to it."""

    def ask(self, what: str, header: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]: ...
    def open(self) -> Link: ...
    def close(self) -> None: ...


class Session(Protocol):
    """A strategy's hold on the tasks of its cluster.

    Attributes:
      incarnation: The coordinator's; its messages carry it.
      devices_per_worker: The number of replicas on each worker.
      epoch: What a worker has read of variables in one epoch is read again in the next.
      ps_addresses: Addresses of the parameter servers.
      snapshot_intervals_s: Seconds, for each parameter server; None for one that takes no snapshots.
      num_made: Is another one after variables were made.
      before_close: Called before the session ends.
      groups: The views of which server serves which pieces, with two copies of each; None with one copy.
    """

    before_close: Callable[[], None]
    groups: Groups | None

    @property
    def incarnation(self) -> Any: ...
    @property
    def devices_per_worker(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def ps_addresses(self) -> Sequence[str]: ...
    @property
    def snapshot_intervals_s(self) -> Sequence[float | None]: ...
    @property
    def num_made(self) -> int: ...

    def meet_worker(self, name: str, told: Mapping[str, Any]) -> None:
        """A worker has told what it has.

        Raises:
          DeviceError: It cannot run what the others run.
        """
        ...

    def use_primaries(self) -> None:
        """The groups have other primaries than before: links go there, and workers read all values again."""
        ...

    def on_one_server(self) -> list[int]:
        """Parameter servers of whose pieces there are no two copies that are the same; compares them."""
        ...

    def tell_view(self, task: int, view: View, timeout_s: float) -> None:
        """Tells a parameter server who has a group.

        Raises:
          UnavailableError: It does not answer.
        """
        ...

    def has_update(self, digest: str) -> bool:
        """True if a program of a parameter server has this digest."""
        ...

    def names_on(self, ps: int) -> Sequence[str]:
        """Names of the variables of which a parameter server has something."""
        ...

    def restored(self, ps: int, keys: Collection[str] | None) -> list[str]:
        """A parameter server has gone back to a snapshot, with these pieces. Returns names of variables that it lacks.

        Raises:
          UnavailableError: It is gone again.
        """
        ...

    def renew(self) -> None:
        """Begins another epoch: the caller knows of changes to variables, which the next closures shall see."""
        ...

    def apply_round(self, number: int, low: int, closures: Sequence[int]) -> None:
        """Has all parameter servers apply the mean of these closures' gradients, once; all rounds below ``low`` are
        over.

        Raises:
          UnavailableError: One is not there; others may have applied it.
        """
        ...

    def connect(self, job: str, index: int) -> Client:
        """Returns a new client of ``"worker"`` or ``"ps"`` number ``index``. Does not block."""
        ...


class PreparedClosure(Protocol):
    """A scheduled function with its arguments, as a worker runs it. What it pushes to is on the servers already.

    Attributes:
      name: The function's.
      programs: Digests, by the signature of the elements that it takes.
      constants: Arrays that travel once, by name.
      arguments: Arrays that it takes.
      named: Which of ``arguments`` are among ``constants``: names by position.
      iterators: Names of the resources that it takes.
      round_key: Equal for closures whose gradients are averaged; None: it has none.
    """

    @property
    def name(self) -> str: ...
    @property
    def programs(self) -> Mapping[str, str]: ...
    @property
    def constants(self) -> Mapping[str, np.ndarray]: ...
    @property
    def arguments(self) -> Sequence[np.ndarray]: ...
    @property
    def named(self) -> Mapping[int, str]: ...
    @property
    def iterators(self) -> Sequence[str]: ...
    @property
    def round_key(self) -> Hashable: ...

    def program(self, digest: str) -> WorkerProgram:
        """Returns a program that is in ``programs``."""
        ...

    def make(self, signature: str) -> str:
        """Makes the program for elements of other shapes, or for fewer, which is in ``programs`` from then on.

        Returns its digest.

        Raises:
          OutOfRangeError: The function needs an element that is missing.
        """
        ...

    def assemble(self, arrays: Sequence[Any], signature: str | None = None) -> Any:
        """Returns what the function returns, made of the arrays that a worker has answered, NumPy's or JAX's.

        Args:
          signature: The elements', if they are others than those of the first program.
        """
        ...


class Closures(Protocol):
    """Makes closures of calls of functions."""

    def prepare(
        self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, num_averaged: int | None
    ) -> PreparedClosure:
        """Traces a call for workers, if no earlier call was alike.

        Args:
          num_averaged: The number of closures whose gradients are averaged for an update; None: each pushes its own.
        """
        ...


@runtime_checkable
class ClosureStrategy(Protocol):
    """A strategy with workers that wait for functions."""

    @property
    def session(self) -> Session: ...
    @property
    def closures(self) -> Closures: ...
