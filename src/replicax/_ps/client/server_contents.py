"""``ServerContents``: the coordinator's requests that change the shards and programs of parameter servers."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np

from replicax._ps.client.server_client import message_of
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.programs.programs import Shard, UpdateProgram
from replicax._ps.transport.messages import Message

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class NewShard:
    """A shard to be created.

    Attributes:
      initial: Its value, or a program without state and operands that computes it, so that no value is sent.
    """

    shard: Shard
    shape: tuple[int, ...]
    dtype: Any
    initial: np.ndarray | UpdateProgram

    def described(self) -> dict[str, Any]:
        """Returns the shard as a request describes it."""
        return {
            "key": self.shard.key,
            "shape": list(self.shape),
            "dtype": str(np.dtype(self.dtype)),
            "initial": self.initial.digest if isinstance(self.initial, UpdateProgram) else "array",
        }


@final
class ServerContents:
    """Creates, assigns, finds and drops shards, and gives servers their programs. Thread-safe.

    Creations, assignments and drops have numbers, so that a request that is sent again has no second effect, which
    would undo later changes of others. A request that was given up has no effect after a later one.
    """

    def __init__(self, servers: ServerClients):
        self._servers = servers
        self._client = uuid.uuid4().hex
        self._numbers_lock = threading.Lock()
        self._num_numbered = 0
        self._unended: set[int] = set()

    def send_program(self, ps: int, program: UpdateProgram) -> str:
        """Gives parameter server ``ps`` a program, for all its clients. Returns its digest."""
        self._servers[ps].programs[program.digest] = program
        self._servers.ask({ps: message_of(program)})
        return program.digest

    def send_all_programs(self, ps: int) -> None:
        """Gives all its programs to parameter server ``ps``, which is a new process and has none yet."""
        server = self._servers[ps]
        with server.lock:  # a thread that waits for its return sends its own request again
            server.disconnect()
            for program in list(server.programs.values()):
                self._servers.ask({ps: message_of(program)})

    def has_program(self, digest: str) -> bool:
        """True if a parameter server was given that program."""
        return any(digest in self._servers[ps].programs for ps in range(len(self._servers)))

    def create(self, shards: Sequence[NewShard], if_absent: bool = False) -> None:
        """Creates shards, each on its parameter server.

        Args:
          shards: The shards.
          if_absent: True to leave existing shards of the same shape and dtype as they are.

        Raises:
          InvalidArgumentError: A shard exists already.
          UnavailableError: A parameter server cannot be reached.
        """
        programs = [(new.shard.ps, new.initial) for new in shards if isinstance(new.initial, UpdateProgram)]
        for ps, program in programs:
            self.send_program(ps, program)
        with self._numbered() as once:
            requests = {}
            for ps, ours in _by_ps((new.shard.ps, new) for new in shards).items():
                header = {
                    "op": "create",
                    "shards": [new.described() for new in ours],
                    "if_absent": if_absent,
                    **once,
                }
                arrays = [
                    part_of(new.initial, None) for new in ours if not isinstance(new.initial, UpdateProgram)
                ]
                requests[ps] = Message(header, arrays)
            self._servers.ask(requests)
        if programs:
            self.drop((), [(ps, program.digest) for ps, program in programs])

    def assign(self, values: Sequence[tuple[Sequence[Shard], np.ndarray]]) -> None:
        """Replaces the values of variables, each given as its shards."""
        parts = [(p.ps, (p.key, part_of(value, p.rows))) for shards, value in values for p in shards]
        with self._numbered() as once:
            requests = {}
            for ps, ours in _by_ps(parts).items():
                keys, values = zip(*ours, strict=True)
                requests[ps] = Message({"op": "assign", "keys": list(keys), **once}, values)
            self._servers.ask(requests)

    def drop(self, shards: Sequence[Shard], programs: Sequence[tuple[int, str]] = ()) -> None:
        """Drops shards, and programs, which are given as parameter server and digest."""
        keys = _by_ps((shard.ps, shard.key) for shard in shards)
        digests = _by_ps(programs)
        for ps, digest in programs:
            self._servers[ps].programs.pop(digest, None)
        with self._numbered() as once:
            requests = {}
            for ps in sorted(keys | digests):
                header = {"keys": keys.get(ps, []), "programs": digests.get(ps, [])}
                requests[ps] = Message({"op": "drop", **header, **once})
            self._servers.ask(requests)

    def find(self, keys: Sequence[str]) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """Returns, for each parameter server, the shapes and dtypes of those of these shards that it has."""
        answers = self._servers.ask_all(Message({"op": "find", "keys": list(keys)}))
        return [
            {key: (tuple(shape), dtype) for key, shape, dtype in answer.header["found"]} for answer in answers
        ]

    def lacking(self, ps: int, keys: Sequence[str]) -> set[str]:
        """Returns those of these shards that parameter server ``ps`` lacks. Asks nothing if there are none."""
        if not keys:
            return set()
        answer = self._servers.ask({ps: Message({"op": "find", "keys": list(keys)})})[ps]
        return set(keys) - {key for key, _, _ in answer.header["found"]}

    def apply_round(self, number: int, low: int, closures: Sequence[int]) -> None:
        """Has all parameter servers apply the mean of gradients that they hold, once.

        Args:
          number: The number of the round.
          low: All rounds with lower numbers are over.
          closures: The numbers of the closures whose gradients count.

        Raises:
          UnavailableError: A parameter server cannot be reached; others may have applied them.
        """
        this = [self._servers.incarnation, number]
        self._servers.ask_all(Message({"op": "apply", "round": this, "low": low, "closures": list(closures)}))

    def compare_copies(self) -> list[int]:
        """Compares the two copies of all shards, bit for bit. Returns the parameter servers where they differ."""
        answers = self._servers.ask_all(Message({"op": "checksum"}))
        return [ps for ps, answer in enumerate(answers) if not answer.header.get("is_on_two")]

    @contextlib.contextmanager
    def _numbered(self) -> Iterator[dict[str, Any]]:
        """Yields the fields of a request that is executed once."""
        with self._numbers_lock:
            number = self._num_numbered
            self._num_numbered += 1
            self._unended.add(number)
            low = min(self._unended)
        try:
            yield {"number": [self._client, number], "low": low}
        finally:
            with self._numbers_lock:
                self._unended.discard(number)


def part_of(value: np.ndarray, rows: tuple[int, int] | None) -> np.ndarray:
    """Returns the rows of a shard, C-contiguous."""
    value = np.asarray(value, order="C")
    return value if rows is None else value[rows[0] : rows[1]]


def _by_ps(items: Iterable[tuple[int, _Item]]) -> dict[int, list[_Item]]:
    groups: dict[int, list[_Item]] = {}
    for ps, item in items:
        groups.setdefault(ps, []).append(item)
    return groups
