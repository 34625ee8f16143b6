"""A client's connections to all parameter servers: one stream to each, used in parallel."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, final

import numpy as np

from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.client.lookups import RowsWanted
from replicax._src.parameter_servers.client.server_stream import PsClient, ServerStream
from replicax._src.parameter_servers.client.steps import (
    Answered,
    Ask,
    Closure,
    answered_of,
    row_asks,
    rows_of,
)
from replicax._src.parameter_servers.client.store_link import Answering, StoreClient
from replicax._src.parameter_servers.errors import UnknownProgramError
from replicax._src.parameter_servers.programs.programs import Piece, UpdateProgram
from replicax._src.parameter_servers.store.group_rules import View
from replicax._src.parameter_servers.transport.buffers import aligned_empty
from replicax._src.parameter_servers.transport.messages import Message

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class NewPiece:
    """A piece that is to be made.

    Attributes:
      initial: Its value, or a program without state and operands that gives it, so that nothing of it travels.
    """

    piece: Piece
    shape: tuple[int, ...]
    dtype: Any
    initial: np.ndarray | UpdateProgram


@final
class PsLinks:
    """Connections to all parameter servers. They are opened at first use, and again after they broke.

    May be used from several threads. What a step gives of stores of this process is only valid until the next one: use
    it in ``held``, or have links of your own.

    Args:
      clients: One for each parameter server, in order.
      incarnation: Of the coordinator for which all is done.
      timeout_s: How long a call may take altogether, with all that is tried again.
    """

    def __init__(self, clients: Sequence[PsClient], incarnation: Any, timeout_s: float = 60.0):
        self._clients = clients
        self._servers = [ServerStream(f"ps {i}", client) for i, client in enumerate(clients)]
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._client = uuid.uuid4().hex
        self._numbers_lock = threading.Lock()
        self._num_numbered = 0
        self._unended: set[int] = set()

    @classmethod
    def of_stores(cls, stores: Sequence[Answering], incarnation: Any) -> Self:
        """Links to stores of this process."""
        return cls([StoreClient(store, f"ps {i}") for i, store in enumerate(stores)], incarnation)

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    @property
    def incarnation(self) -> Any:
        return self._incarnation

    def wait_for(self, servers: Iterable[int]) -> None:
        """From now on, these are tried again for as long as a call may take: they come back after they died."""
        for ps in servers:
            self._servers[ps].comes_back = True

    def use_primaries(self, views: Iterable[View]) -> None:
        """Each piece is on two parameter servers, its own and the next one; the views say which of the two serves it
        now.

        Whoever waits for the other one is woken, and asks this one. Older views than those that came before say
        nothing.
        """
        for view in views:
            server, ps = self._servers[view.group], view.group
            server.replicate(ps, self._clients[(ps + 1) % len(self._clients)])
            server.use(0 if view.primary == ps else 1, view.epoch)

    def send_all_programs(self, ps: int) -> None:
        """Parameter server ``ps`` is another process, which has no program yet: gives it all that there are."""
        server = self._servers[ps]
        with server.lock:  # who uses it while it is not there tries again, and needs nothing of this
            server.give_up_link()
            self._send_programs(ps, list(server.programs))

    def has_update(self, digest: str) -> bool:
        """Whether that is a program of a parameter server."""
        return any(digest in server.programs for server in self._servers)

    def create(self, pieces: Sequence[NewPiece], if_absent: bool = False) -> None:
        """Makes pieces, each on its parameter server.

        Args:
          if_absent: One that is there already, of the same shape and dtype, stays as it is.

        Raises:
          InvalidArgumentError: One is there already.
          UnavailableError: A parameter server is not there.
        """
        programs = [(new.piece.ps, new.initial) for new in pieces if isinstance(new.initial, UpdateProgram)]
        for ps, program in programs:
            self.add_program(ps, program)
            self._send_programs(ps, [program.digest])
        with self._numbered() as once:
            messages = {}
            for ps, ours in _by_ps((new.piece.ps, new) for new in pieces).items():
                described = [_described_piece(new) for new in ours]
                arrays = [
                    part_of(new.initial, None) for new in ours if not isinstance(new.initial, UpdateProgram)
                ]
                fields = {"pieces": described, "if_absent": if_absent, **once}
                messages[ps] = self._message("create", fields, arrays)
            self._all(messages, may_repeat=True)
        if programs:
            self.drop((), [(ps, program.digest) for ps, program in programs])

    def add_program(self, ps: int, program: UpdateProgram) -> str:
        """Keeps a program for parameter server ``ps``; it is sent before it is needed. Returns its digest."""
        digest = program.digest
        self._servers[ps].programs[digest] = program
        return digest

    def send_program(self, ps: int, program: UpdateProgram) -> None:
        """Gives parameter server ``ps`` a program now, for others to use."""
        self._send_programs(ps, [self.add_program(ps, program)])

    def step(
        self, closure: Closure | None, low: int, asks: Mapping[int, Ask], round_number: int | None = None
    ) -> dict[int, Answered]:
        """Applies and reads on several parameter servers at once: each does its part as one.

        Args:
          closure: What is applied is applied once for it. Without it a stream that breaks is not tried again.
          low: All closures of that incarnation with lower numbers have ended.
          asks: By the number of the parameter server.
          round_number: Of which the gradients are.

        Raises:
          UnavailableError: A parameter server is not there; others may have applied their part.
          UnknownProgramError: A server does not have a program that was not given to ``add_program`` here.
        """
        messages = {}
        for ps, ask in asks.items():
            server = self._servers[ps]
            for digest in (ask.program, ask.gradients[0] if ask.gradients else None):
                if digest in server.programs and digest not in server.sent:
                    self._send_programs(ps, [digest])
            messages[ps] = self._step_message(closure, low, ask, round_number)
        may_repeat = closure is not None or all(ask.program is None for ask in asks.values())
        answers = self._exchange(messages, may_repeat)
        forgotten = {
            ps: answer.digest
            for ps, answer in answers.items()
            if isinstance(answer, UnknownProgramError) and answer.digest in self._servers[ps].programs
        }
        if forgotten:  # the server was started anew since: nothing of the message has happened there
            for ps, digest in forgotten.items():
                self._send_programs(ps, [digest])
            answers |= self._exchange({ps: messages[ps] for ps in forgotten}, may_repeat)
        return {ps: answered_of(asks[ps], _checked(answer)) for ps, answer in answers.items()}

    def apply_round(self, round_number: Closure, low: int, closures: Sequence[int]) -> None:
        """Has all parameter servers apply the mean of gradients that they hold, once.

        Args:
          round_number: Whose, and its number.
          low: All rounds with lower numbers are over.
          closures: The numbers of those whose gradients count.

        Raises:
          UnavailableError: A parameter server is not there; others may have applied them.
        """
        fields = {"round": list(round_number), "low": low, "closures": list(closures)}
        self._all({ps: self._message("apply", fields) for ps in range(self.num_servers)}, may_repeat=True)

    def read(self, variables: Sequence[Sequence[Piece]]) -> list[np.ndarray]:
        """The whole values of variables, each given as its pieces in the order of their rows; nobody else's.

        All pieces on one server are read as one; several servers are read at about the same time. The memory is
        aligned, so that JAX takes it over without a copy; it may be read-only.
        """
        pieces = [piece for pieces in variables for piece in pieces]
        keys = _by_ps((piece.ps, piece.key) for piece in pieces)
        asks = {ps: Ask(pull=[(key, None) for key in dict.fromkeys(ours)]) for ps, ours in keys.items()}
        with self.held(keys):  # until they are copied
            answers = self.step(None, 0, asks)
            # Alone in the memory of a message: that is used again when nobody has the array any more.
            if len(pieces) == 1:
                return [_value(answers[pieces[0].ps], pieces[0].key)]
            return [joined([_value(answers[p.ps], p.key) for p in pieces]) for pieces in variables]

    def read_rows(self, pieces: Sequence[Piece], ids: np.ndarray, num_rows: int) -> np.ndarray:
        """The rows of a variable at ``ids`` [n], all of which it must have; a copy."""
        wanted = RowsWanted.of(ids, pieces, num_rows)
        if not wanted.has_all:
            raise InvalidArgumentError(
                f"Got row numbers from {np.min(ids)} to {np.max(ids)} of a table of {num_rows} rows. They start at 0."
            )
        with self.held({ps for ps, _, _ in wanted.parts}):
            answers = self.step(None, 0, row_asks([wanted]))
            (rows,) = rows_of([wanted], answers)
            return rows[wanted.positions]

    def assign(self, values: Sequence[tuple[Sequence[Piece], np.ndarray]]) -> None:
        """Replaces the values of variables, each given as its pieces; once, also where it is said again."""
        parts = [(p.ps, (p.key, part_of(value, p.rows))) for pieces, value in values for p in pieces]
        with self._numbered() as once:
            messages = {}
            for ps, ours in _by_ps(parts).items():
                keys, values = zip(*ours, strict=True)
                messages[ps] = self._message("assign", {"keys": list(keys), **once}, values)
            self._all(messages, may_repeat=True)

    def drop(self, pieces: Sequence[Piece], programs: Sequence[tuple[int, str]] = ()) -> None:
        """Frees pieces, and programs: each its parameter server and its digest."""
        keys = _by_ps((piece.ps, piece.key) for piece in pieces)
        digests = _by_ps(programs)
        for ps, digest in programs:
            self._servers[ps].programs.pop(digest, None)
            self._servers[ps].sent.discard(digest)
        messages = {
            ps: self._message("drop", {"keys": keys.get(ps, []), "programs": digests.get(ps, [])})
            for ps in sorted(keys | digests)
        }
        self._all(messages, may_repeat=True)

    def find(self, keys: Sequence[str]) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """For each parameter server the pieces that it has of those with these keys: shape and dtype."""
        asks = {ps: self._message("find", {"keys": list(keys)}) for ps in range(self.num_servers)}
        answers = self._all(asks, may_repeat=True)
        return [
            {key: (tuple(shape), dtype) for key, shape, dtype in answers[ps].header["found"]}
            for ps in range(self.num_servers)
        ]

    def on_one_server(self) -> list[int]:
        """Parameter servers of whose pieces there are no two copies that are the same, bit for bit: compares them."""
        asks = {ps: self._message("checksum", {}) for ps in range(self.num_servers)}
        answers = self._all(asks, may_repeat=True)
        return [ps for ps, answer in answers.items() if not answer.header.get("is_on_two")]

    @contextlib.contextmanager
    def held(self, servers: Iterable[int] | None = None) -> Iterator[None]:
        """Inside, no other thread uses the links to these servers, or to all."""
        with contextlib.ExitStack() as held:
            # In the same order in all threads.
            for ps in sorted(range(self.num_servers) if servers is None else servers):
                held.enter_context(self._servers[ps].lock)
            yield

    def close(self) -> None:
        """Closes all streams; what waits for an answer on one raises UnavailableError."""
        for server in self._servers:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> dict[str, Any]:
        """For each parameter server how many messages were sent, and how often its stream was opened."""
        return {
            server.name: {"num_messages": server.num_messages, "num_opened": server.num_opened}
            for server in self._servers
        }

    # --- messages -------------------------------------------------------------------------------------

    def _message(self, op: str, fields: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> Message:
        return Message({"op": op, "incarnation": self._incarnation, **fields}, arrays)

    @contextlib.contextmanager
    def _numbered(self) -> Iterator[dict[str, Any]]:
        """What a call says that is done once: without it, the second time would undo what others have done since the
        first.
        """
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

    def _step_message(self, closure: Closure | None, low: int, ask: Ask, round_number: int | None) -> Message:
        fields = {
            "closure": None if closure is None else list(closure),
            "low": low,
            "program": ask.program,
            "pull": [[key, version] for key, version in ask.pull],
            "rows": [key for key, _ in ask.rows],
            "used": list(ask.used),
        }
        operands = ask.operands
        if ask.gradients is not None:
            digest, gradients = ask.gradients
            fields["gradients"] = {"round": round_number, "program": digest, "operands": len(gradients)}
            operands = [*operands, *gradients]
        return self._message("step", fields, [*operands, *(numbers for _, numbers in ask.rows)])

    def _send_programs(self, ps: int, digests: Iterable[str]) -> None:
        server = self._servers[ps]
        for digest in digests:
            program = server.programs[digest]
            fields = {"digest": digest, "described": program.described()}
            blob = np.frombuffer(program.blob, np.uint8)
            self._all({ps: self._message("program", fields, [blob])}, may_repeat=True)
            server.sent.add(digest)

    def _all(self, messages: Mapping[int, Message], may_repeat: bool) -> dict[int, Message]:
        return {ps: _checked(answer) for ps, answer in self._exchange(messages, may_repeat).items()}

    def _exchange(self, messages: Mapping[int, Message], may_repeat: bool) -> dict[int, Message | Exception]:
        """Sends all, then takes all answers, so that no stream is left with one that nobody waits for."""
        deadline = time.monotonic() + self._timeout_s
        with self.held(messages):
            try:
                for ps, message in messages.items():
                    self._servers[ps].begin(message)
                return {
                    ps: self._servers[ps].end(message, deadline, may_repeat)
                    for ps, message in messages.items()
                }
            except BaseException:  # Ctrl-C: who uses a stream next would get an answer to these
                for ps in messages:
                    self._servers[ps].give_up_link()
                raise


# --- arrays -------------------------------------------------------------------------------------------


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The variable of which ``parts`` are the values of all pieces; a copy, aligned."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:]) if len(parts) > 1 else parts[0].shape
    whole = aligned_empty(sum(part.nbytes for part in parts)).view(parts[0].dtype).reshape(shape)
    if len(parts) == 1:
        whole[...] = parts[0]
        return whole
    return np.concatenate(parts, out=whole)


def part_of(value: np.ndarray, rows: tuple[int, int] | None) -> np.ndarray:
    """The rows of a piece; C-contiguous."""
    value = np.asarray(value, order="C")
    return value if rows is None else value[rows[0] : rows[1]]


def _described_piece(new: NewPiece) -> dict[str, Any]:
    return {
        "key": new.piece.key,
        "shape": list(new.shape),
        "dtype": str(np.dtype(new.dtype)),
        "initial": new.initial.digest if isinstance(new.initial, UpdateProgram) else "array",
    }


def _value(answer: Answered, key: str) -> np.ndarray:
    array = answer.values[key][1]
    assert array is not None  # no version was known
    return array


def _checked(answer: Message | Exception) -> Message:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _by_ps(items: Iterable[tuple[int, _Item]]) -> dict[int, list[_Item]]:
    groups: dict[int, list[_Item]] = {}
    for ps, item in items:
        groups.setdefault(ps, []).append(item)
    return groups
