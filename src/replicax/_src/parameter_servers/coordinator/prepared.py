"""The interface that the coordinator needs of a strategy: scheduled functions as data, and connections to the tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from replicax._src.parameter_servers.client.groups import Groups
from replicax._src.parameter_servers.programs.programs import WorkerProgram
from replicax._src.parameter_servers.store.group_rules import View
from replicax._src.parameter_servers.transport.messages import Message


class Link(Protocol):
    """A connection to a task, a ``transport.Link``. Answers come in the order of the messages.

    ``send_all`` sends all messages, or none if one cannot travel; small ones travel together. ``receive_all`` waits
    for
    one answer, and returns all that have arrived, or the errors that they carry. A lost task raises UnavailableError
    with
    its name. So does ``receive_all`` when another thread closes the connection.
    """

    def send_all(self, messages: Sequence[Message], timeout_s: float) -> None: ...
    def receive_all(self, timeout_s: float) -> Sequence[Message | Exception]: ...
    def close(self) -> None: ...


class Client(Protocol):
    """Sends requests to a task, and opens connections to it."""

    def ask(self, what: str, header: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]: ...
    def open(self) -> Link: ...
    def close(self) -> None: ...


class Session(Protocol):
    """A strategy's session with the tasks of its cluster.

    Attributes:
      incarnation: The id of the session, which its messages carry.
      devices_per_worker: The number of replicas on each worker.
      epoch: The number of the epoch. Workers read variables again in a new epoch.
      num_workers: The number of workers.
      ps_addresses: The addresses of the parameter servers.
      snapshot_intervals_s: The seconds between snapshots of each parameter server; None for one that takes none.
      num_made: A number that changes when variables are created.
      before_close: A function that is called before the session ends.
      groups: The views that say which server serves which shards, with ``replication=2``; None without.
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
        """Records a worker's description of itself.

        Raises:
          DeviceError: It cannot run the programs of the other workers.
        """
        ...

    def use_primaries(self) -> None:
        """Connects to the new primaries of the groups. Workers read all values again."""
        ...

    def on_one_server(self) -> list[int]:
        """Compares both copies of all shards. Returns the parameter servers whose shards do not have two equal
        copies.
        """
        ...

    def tell_view(self, task: int, view: View, timeout_s: float) -> None:
        """Tells a parameter server which servers hold a group.

        Raises:
          UnavailableError: It does not answer.
        """
        ...

    def has_update(self, digest: str) -> bool:
        """True if a program of a parameter server has this digest."""
        ...

    def names_on(self, ps: int) -> Sequence[str]:
        """Returns the names of the variables of which a parameter server holds shards."""
        ...

    def restored(self, ps: int, keys: Collection[str] | None) -> list[str]:
        """Uses a parameter server that restarted from a snapshot with these shards. Returns the names of missing
        variables.

        Raises:
          UnavailableError: It is lost again.
        """
        ...

    def renew(self) -> None:
        """Starts another epoch, so that the next closures see changes to variables."""
        ...

    def apply_round(self, number: int, low: int, closures: Sequence[int]) -> None:
        """Has all parameter servers apply the mean of these closures' gradients, once. All rounds below ``low`` are
        over.

        Raises:
          UnavailableError: A server is unreachable; others may have applied it.
        """
        ...

    def connect(self, job: str, index: int) -> Client:
        """Returns a new client of ``"worker"`` or ``"ps"`` number ``index``. Does not block."""
        ...


class PreparedClosure(Protocol):
    """A scheduled function with its arguments, as a worker runs it. The servers have the update programs that it
    needs.

    Attributes:
      name: The name of the function.
      programs: Digests of programs, by the signature of the elements that they take.
      constants: Arrays that are sent once, by name.
      arguments: Arrays that it takes.
      named: The arguments that are among ``constants``: names by position.
      iterators: The names of the resources that it takes.
      round_key: A key that is equal for closures whose gradients are averaged; None if it has no gradients.
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
        """Makes the program for elements of other shapes, or for fewer elements, and adds it to ``programs``.

        Returns its digest.

        Raises:
          OutOfRangeError: The function needs an element that is missing.
        """
        ...

    def assemble(self, arrays: Sequence[Any], signature: str | None = None) -> Any:
        """Returns the function's result, made of the arrays that a worker has answered, NumPy's or JAX's.

        Args:
          arrays: The arrays.
          signature: The signature of the elements, if it differs from that of the first program.
        """
        ...


class Closures(Protocol):
    """Makes closures of function calls."""

    def prepare(
        self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, num_averaged: int | None
    ) -> PreparedClosure:
        """Traces a call for workers, unless an earlier call was alike.

        Args:
          fn: The function.
          args: Its arguments.
          kwargs: Its keyword arguments.
          num_averaged: The number of closures whose gradients are averaged for one update; None for no averaging.
        """
        ...


@runtime_checkable
class ClosureStrategy(Protocol):
    """A strategy whose workers wait for functions."""

    @property
    def session(self) -> Session: ...
    @property
    def closures(self) -> Closures: ...
