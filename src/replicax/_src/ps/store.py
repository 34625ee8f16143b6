"""``Store``: the pieces of variables that one parameter server holds, and what closures do to them. No transport."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import jax
import numpy as np

from replicax._src.errors import InvalidArgumentError
from replicax._src.ps.errors import MessageError, SnapshotError, UnknownProgramError
from replicax._src.ps.held_gradients import HeldGradients
from replicax._src.ps.held_pieces import (
    HeldPiece,
    check_assigned,
    check_makes,
    check_state,
    check_tables,
    few,
    rows_of,
    shown,
    staleness_of,
    text,
)
from replicax._src.ps.held_values import copied, is_overwritten, overwritten
from replicax._src.ps.incarnations import Incarnations
from replicax._src.ps.messages import Message
from replicax._src.ps.programs import UpdateProgram
from replicax._src.ps.requests import (
    ApplyRound,
    NewPiece,
    Step,
    field_of,
    keys_of,
    new_pieces,
    program_of,
)
from replicax._src.ps.snapshot_entries import Plan
from replicax._src.ps.snapshot_manifest import Manifest
from replicax._src.ps.snapshots import SnapshotFolder
from replicax._src.ps.store_statistics import StoreStatistics
from replicax._src.ps.unwritten import Unwritten
from replicax._src.ps.updates import CompiledUpdate
from replicax._src.ps.window import Windows

_LONGEST_WAIT_S: Final = 40.0
"""For a snapshot: a client gives a call up after 60 s. Who waits no longer needs memory for all that is not written yet."""

_BRIEFLY_S: Final = 0.2


@dataclass(frozen=True)
class StoreState:
    """All that a store has, at one moment: for another one.

    Attributes:
      content: What is not arrays, as JSON.
      pieces: Key, number of the version, and a view of the value; to be let go soon.
      programs: That update pieces.
      gradients: That wait for their round: its number, that of the closure, the program's digest, arrays.
    """

    content: dict[str, Any]
    pieces: deque[tuple[str, int, np.ndarray]]
    programs: Sequence[UpdateProgram]
    gradients: Sequence[tuple[int, int, str, Sequence[np.ndarray]]]


class _NoRoomForBaseError(Exception):
    """A base could not be written, and what has changed would be much less. It goes no further than this file."""


@final
class Store:
    """Pieces, programs that update them, and which closures have done so. All methods may be called from any thread.

    One lock is held while an update runs and while views are taken, so that nobody sees half of an update; arrays of
    an answer that are large are views, to be sent outside of the lock and let go then.

    Args:
      device: Where values are held and updates run; a CPU if not given.

    Attributes:
      instance: Random; versions of another store, one that ran before at the same address say, are no versions here.
        A restored store is another one, and so is one whose coordinator has left.
    """

    def __init__(self, device: Any = None):
        self.instance = uuid.uuid4().hex
        self.device = jax.local_devices(backend="cpu")[0] if device is None else device
        self._lock = threading.Lock()
        self._compile_lock = threading.Lock()
        self._snapshot_lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._unwritten: Unwritten | None = None
        self._folder: SnapshotFolder | None = None
        self._incarnations = Incarnations()
        self._highest_number = self._num_created = self._num_changes = 0
        self._told: dict[str, Any] = {}
        self._clear()
        self._operations: dict[str, Callable[[Mapping[str, Any], Sequence[np.ndarray]], Message]] = {
            "create": self._create,
            "program": self._program,
            "step": self._step,
            "apply": self._apply_round,
            "assign": self._assign,
            "drop": self._drop,
            "find": self._find,
            "checksum": self._checksum,
        }

    def answer(self, message: Message) -> Message:
        """Does what is asked. Its arrays are not needed afterwards; the answer's may be views, to be kept briefly.

        Raises:
          StaleCoordinatorError: The incarnation has been followed by another one, or has left.
          UnavailableError: There is no incarnation, and never was this one: the server has started anew.
          UnknownProgramError: The program is to be sent again; nothing has happened.
          InvalidArgumentError: Something does not fit; nothing has happened.
          MessageError: The header is not one of these operations.
        """
        op = field_of(message.header, "op", str)
        if op not in self._operations:
            raise MessageError(
                f'A parameter server has no operation "{op}"; it has {", ".join(self._operations)}.'
            )
        return self._operations[op](message.header, message.arrays)

    def hello(self, incarnation: str) -> None:
        """A coordinator says that it is there. What another one made is dropped.

        Raises:
          StaleCoordinatorError: Another one has taken over from it since.
        """
        with self._lock:
            if self._incarnations.hello(incarnation):
                self._clear()

    def leave(self, incarnation: str) -> None:
        """A coordinator ends its session: all that it made is dropped. It may say hello again."""
        with self._lock:
            self._incarnations.leave(incarnation)
            self.instance = uuid.uuid4().hex
            self._clear()

    def statistics(self) -> dict[str, Any]:
        """Counts, as JSON: see ``StoreStatistics``; and ``pieces``, ``bytes``, ``programs``, ``gradient_bytes`` held now.

        Those of a moment ago while an update lasts: who asks wants to know whether the server is alive.
        """
        if not self._lock.acquire(timeout=_BRIEFLY_S if self._told else -1):
            return self._told
        try:
            held = {
                "pieces": len(self._pieces),
                "bytes": sum(piece.num_bytes for piece in self._pieces.values()),
                "programs": len(self._programs),
                "gradient_bytes": self._gradients.num_bytes,
            }
            self._told = {**held, **self._statistics.described()}
            return self._told
        finally:
            self._lock.release()

    @property
    def num_created(self) -> int:
        """How many pieces have been made here, those that are gone too."""
        return self._num_created

    @property
    def num_changes(self) -> int:
        """Is another one after every change of a value."""
        return self._num_changes

    def snapshot(self, directory: str | Path, epoch: int = 0) -> dict[str, Any]:
        """Writes what has changed since the one before, and which closures have been applied, to a new file.

        Updates go on meanwhile. The values are those of one moment. Until a piece is written, the first update of it needs
        memory for another value; where that would be much, the update waits, for 40 s at most (``Unwritten``). Where few
        rows have changed they are copied before. Programs are not in it: only which there were. Nor are gradients that wait
        for others of their round.

        Args:
          directory: Of this server alone.
          epoch: A number by which ``restore`` finds it.

        Returns:
          ``file``, ``bytes``, ``epoch``, ``updates``: how many are in the values, and ``is_base``: whether all was written.

        Raises:
          SnapshotError: It could not be written; the snapshots before are as they were.
        """
        with self._snapshot_lock:
            folder = self._folder_of(Path(directory))
            previous = folder.previous()
            try:
                return self._write(folder, previous, epoch)
            except _NoRoomForBaseError:  # there may be for what has changed
                return self._write(folder, previous, epoch, may_be_base=False)

    def restore(self, directory: str | Path, epoch: int | None = None) -> dict[str, Any] | None:
        """Takes what is in the newest whole snapshot, in place of all that is here; with a new ``instance``.

        Call it before the server serves, or while nothing else is asked of it. The incarnation is the snapshot's.

        Args:
          directory: That was given to ``snapshot``.
          epoch: Of the snapshot; None: any.

        Returns:
          None if there is no snapshot. Else ``file``, ``epoch``, ``incarnation``, ``updates``, ``pieces``, ``keys`` of the
          pieces, ``programs`` (digests: they are to be sent again), ``refused``: newer ones, and what is wrong with each;
          ``age_s``: how long ago it was taken, and ``applied``: of the incarnation's closures, see ``Window.extent``.

        Raises:
          SnapshotError: There are snapshots, and none is whole and of the epoch; nothing has changed.
        """
        with self._snapshot_lock:
            folder = self._folder_of(Path(directory))
            found = folder.newest_whole(epoch)
            if found is None:
                return None
            snapshot, refused = found
            folder.last = None
            with contextlib.closing(snapshot):
                with self._lock:
                    self._incarnations.now = None
                    self._clear()  # first: there may be no room for both
                pieces = {
                    key: HeldPiece(key, piece.spec, snapshot.value(piece, self.device), piece.number)
                    for key, piece in snapshot.manifest.pieces.items()
                }
            for piece in pieces.values():
                piece.changed.begin()
            folder.last = snapshot.manifest
            with self._lock:
                self._take(snapshot.content, pieces)
        told = {name: snapshot.content[name] for name in ("epoch", "incarnation", "updates")}
        programs = [program["digest"] for program in snapshot.content["programs"]]
        taken = snapshot.content.get("time")  # earlier versions did not say
        return {
            **told,
            "file": str(snapshot.path),
            "pieces": len(pieces),
            "keys": list(pieces),
            "programs": programs,
            "refused": refused,
            "age_s": None if taken is None else max(0.0, time.time() - taken),
            "applied": list(self._windows.of_client(str(told["incarnation"])).extent),
        }

    def _folder_of(self, directory: Path) -> SnapshotFolder:
        """That of the snapshot before, from which the next one goes on; a new one if it is another folder."""
        if self._folder is None or self._folder.path != directory:
            self._folder = SnapshotFolder(directory)
        return self._folder

    def state(self) -> StoreState:
        """All that is here, at one moment. Until a view is let go, the first update of its piece needs other memory."""
        with self._lock:
            pieces = deque((piece.key, piece.number, piece.view()) for piece in self._pieces.values())
            programs = [compiled.program for compiled in self._programs.values()]
            return StoreState(self._content(0), pieces, programs, list(self._gradients.held()))

    def begin_with(self, content: Mapping[str, Any]) -> None:
        """Takes the ``content`` of another store's state, in place of all that is here; with a new ``instance``."""
        with self._lock:
            self._take(content, {})

    def put(self, key: str, number: int, value: np.ndarray) -> None:
        """Takes a piece of another store's state: a copy of it."""
        piece = HeldPiece(key, (value.shape, value.dtype), copied(value, self.device), number)
        with self._lock:
            self._pieces[key] = piece

    def hold(self, number: int, closure: int, digest: str, arrays: Sequence[np.ndarray]) -> None:
        """Takes gradients of another store's state. Their program has to be here."""
        with self._lock:
            self._gradients.hold(number, closure, self._known_program(digest), arrays)

    def _write(
        self, folder: SnapshotFolder, previous: Manifest | None, epoch: int, *, may_be_base: bool = True
    ) -> dict[str, Any]:
        with self._lock:
            plan = Plan.of(list(self._pieces.values()), previous, may_be_base=may_be_base)
            content = self._content(epoch)
            before = [(piece, piece.changed.begin()) for piece in self._pieces.values()]
            shared = {entry.key for entry in plan.entries if entry.value is not None}
            sizes = {piece.key: piece.num_bytes for piece, _ in before}
            self._unwritten = Unwritten(sizes, shared, time.monotonic() + _LONGEST_WAIT_S)
        try:
            path, num_bytes = folder.write(content, plan, self._is_written)
        except BaseException as error:
            with self._lock:
                for piece, counted in before:
                    piece.changed.put_back(counted)
            if isinstance(error, SnapshotError) and plan.could_be_less:
                raise _NoRoomForBaseError from error
            raise
        finally:
            with self._lock:
                self._unwritten = None
                self._has_room.notify_all()
        told = {"epoch": epoch, "updates": content["updates"], "is_base": plan.previous is None}
        return {"file": str(path), "bytes": num_bytes, **told}

    def _is_written(self, key: str) -> None:
        with self._lock:
            if self._unwritten is not None:
                self._unwritten.written(key)
                self._has_room.notify_all()

    def _content(self, epoch: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "instance": self.instance,
            "incarnation": self._incarnations.now,
            "time": time.time(),
            "updates": self._statistics.updates,
            "highest_number": self._highest_number,
            "windows": self._windows.described(),
            "programs": [
                {"digest": digest, **compiled.program.described()}
                for digest, compiled in self._programs.items()
            ],
        }

    def _take(self, content: Mapping[str, Any], pieces: dict[str, HeldPiece]) -> None:
        self.instance = uuid.uuid4().hex  # versions go back: what has this number now may be another value
        self._incarnations.now, self._highest_number = content["incarnation"], content["highest_number"]
        self._clear()
        self._pieces = pieces
        self._windows = Windows.of(content["windows"])
        self._statistics.updates = content["updates"]

    def _clear(self) -> None:
        self._pieces: dict[str, HeldPiece] = {}
        self._programs: dict[str, CompiledUpdate] = {}
        self._windows = Windows()
        self._gradients = HeldGradients()
        self._statistics = StoreStatistics()

    # What is asked of it.

    def _create(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        incarnation, if_absent = header.get("incarnation"), bool(header.get("if_absent"))
        asked = new_pieces(header, arrays)
        with self._lock:
            self._incarnations.check(incarnation)
            new = [piece for piece in asked if not self._is_there(piece, if_absent)]
            programs = [self._initial_program(piece) for piece in new]
        values = [self._initial_value(piece, program) for piece, program in zip(new, programs)]
        with self._lock:
            self._incarnations.check(incarnation)
            absent = [not self._is_there(piece, if_absent) for piece in new]
            for piece, value, is_new in zip(new, values, absent):
                if is_new:
                    self._highest_number += 1
                    self._num_created += 1
                    self._num_changes += 1
                    self._pieces[piece.key] = HeldPiece(piece.key, piece.spec, value, self._highest_number)
            self._statistics.bytes_received += sum(array.nbytes for array in arrays)
        return Message({})

    def _program(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        incarnation, program = header.get("incarnation"), program_of(header, arrays)
        digest = program.digest
        with self._compile_lock:  # several workers send one program: one of them waits for the compiler
            with self._lock:
                self._incarnations.check(incarnation)
                is_known = digest in self._programs
            compiled = None if is_known else CompiledUpdate(program, self.device)
            with self._lock:
                self._incarnations.check(incarnation)
                if compiled is not None:
                    self._programs[digest] = compiled
        return Message({})

    def _step(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        step = Step.of(header, arrays)
        with self._lock:
            self._incarnations.check(header.get("incarnation"))
            update = None if step.program is None else self._known_program(step.program)
            averaged = None if step.gradients is None else self._known_program(step.gradients.program)
            if update is not None and self._unwritten is not None:
                self._wait_for_room([update.program.state[at] for at in update.program.written])
                self._incarnations.check(header.get("incarnation"))
            pulled = [self._piece(key) for key, _ in step.pull]
            tables = [self._piece(key) for key in step.rows]
            check_tables(tables)
            if step.closure is not None:
                self._windows.of_client(step.closure.incarnation).raise_low(step.low)
            if averaged is not None:
                self._hold(step, averaged)
            is_duplicate = self._update(step, update)
            if header.get("only_apply"):
                return Message({"duplicate": is_duplicate})
            return self._read(step, pulled, tables, is_duplicate)

    def _apply_round(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        asked = ApplyRound.of(header)
        number = asked.number.number
        with self._lock:
            self._incarnations.check(header.get("incarnation"))
            self._wait_for_room(self._gradients.keys_of(number))
            self._incarnations.check(header.get("incarnation"))
            window = self._windows.of_client(asked.number.incarnation)
            window.raise_low(asked.low)
            self._gradients.end_below(asked.low)
            is_duplicate = number in window
            if not is_duplicate:
                window.check_room(number)
                found = self._gradients.mean(number, asked.closures)
                if found is not None:
                    self._apply_gradients(*found)
                window.add(number)
                self._gradients.end(number)
        return Message({"duplicate": is_duplicate})

    def _assign(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        keys = keys_of(header, "keys")
        if len(keys) != len(arrays) or len(set(keys)) != len(keys):
            raise InvalidArgumentError(
                f"Keys {keys} and {len(arrays)} values were to be assigned. Give one value for each key, and each key once."
            )
        with self._lock:
            self._wait_for_room(keys)
            self._incarnations.check(header.get("incarnation"))
            pieces = [self._piece(key) for key in keys]
            for piece, array in zip(pieces, arrays):
                check_assigned(piece, array)
            # What needs memory comes first: what is written in place needs none, so that all are assigned or none.
            fresh = [
                None if p.value is not None and is_overwritten(a) else copied(a, self.device)
                for p, a in zip(pieces, arrays)
            ]
            for piece, array, value in zip(pieces, arrays, fresh):
                if value is None:
                    old, piece.value = piece.held(), None
                    value = overwritten(old, array)
                self._change(piece, value)
            self._statistics.bytes_received += sum(array.nbytes for array in arrays)
        return Message({})

    def _drop(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        keys, programs = keys_of(header, "keys"), keys_of(header, "programs", [])
        with self._lock:
            self._incarnations.check(header.get("incarnation"))
            for key in keys:
                self._pieces.pop(key, None)  # one that was dropped before is not there either
            self._gradients.forget(keys)
            for digest in programs:
                self._programs.pop(digest, None)
        return Message({})

    def _find(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        keys = keys_of(header, "keys")
        with self._lock:
            self._incarnations.check(header.get("incarnation"))
            specs = [(key, self._pieces[key].spec) for key in keys if key in self._pieces]
        return Message({"found": [[key, list(shape), str(dtype)] for key, (shape, dtype) in specs]})

    def _checksum(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Message:
        with self._lock:
            self._incarnations.check(header.get("incarnation"))
            views = {key: piece.view() for key, piece in self._pieces.items()}
        crc = 0
        for key in sorted(views):
            value = np.asarray(views.pop(key), order="C").reshape(-1).view(np.uint8)
            crc = zlib.crc32(value.data, zlib.crc32(key.encode(), crc))
        return Message({"checksum": f"{crc:08x}"})

    # Under the lock.

    def _piece(self, key: Any) -> HeldPiece:
        piece = self._pieces.get(key)
        if piece is None:
            raise InvalidArgumentError(
                f'There is no piece "{key}" on this parameter server, which has {few(self._pieces)}. Create it first.'
            )
        return piece

    def _known_program(self, digest: str) -> CompiledUpdate:
        program = self._programs.get(digest)
        if program is None:
            raise UnknownProgramError(
                f"The parameter server has no program {digest}: send it (again).", digest
            )
        return program

    def _is_there(self, new: NewPiece, if_absent: bool) -> bool:
        piece = self._pieces.get(new.key)
        if piece is None:
            return False
        if if_absent and piece.spec == new.spec:
            return True
        raise InvalidArgumentError(
            f'A piece "{new.key}" is there already, {text(*piece.spec)}, and {text(*new.spec)} was to be '
            'created. Drop it first; or, for one that may be there with this shape and dtype, say "if_absent": true.'
        )

    def _initial_program(self, new: NewPiece) -> CompiledUpdate | None:
        if new.value is not None:
            return None
        program = self._known_program(new.initial)
        check_makes(program, new.key, new.spec)
        return program

    def _initial_value(self, new: NewPiece, program: CompiledUpdate | None) -> jax.Array:
        if program is not None:
            return program([], [])[0]
        assert new.value is not None
        return copied(new.value, self.device)

    def _update(self, step: Step, update: CompiledUpdate | None) -> bool:
        """Runs the update of a step, if its closure has not been applied. Returns whether it had been."""
        if update is None:
            return False
        closure = step.closure
        if closure is not None:
            window = self._windows.of_client(closure.incarnation)
            if closure.number in window:
                self._statistics.duplicates += 1
                return True
            window.check_room(closure.number)
        state = self._state(update)
        update.check_operands(step.operands)
        written = {update.program.state[position] for position in update.program.written}
        used = [(self._pieces[key], version) for key, version in step.used if key in written]
        staleness = staleness_of(used, self.instance)
        self._apply(update, state, step.operands)
        if closure is not None:
            self._windows.of_client(closure.incarnation).add(closure.number)
        if staleness is not None:
            self._statistics.staleness.count(staleness)
        self._statistics.updates += 1
        self._statistics.bytes_received += sum(operand.nbytes for operand in step.operands)
        return False

    def _hold(self, step: Step, update: CompiledUpdate) -> None:
        """Keeps the gradients of a step until those of its round are applied, unless they have been: then it is late."""
        assert step.closure is not None
        assert step.gradients is not None
        number, gradients = step.gradients.round_number, step.gradients.operands
        if number in self._windows.of_client(step.closure.of_rounds.incarnation):
            return
        self._state(update)
        self._gradients.hold(number, step.closure.number, update, gradients)
        self._statistics.bytes_received += sum(array.nbytes for array in gradients)

    def _apply_gradients(self, update: CompiledUpdate, operands: Sequence[np.ndarray]) -> None:
        self._apply(update, self._state(update), operands)
        self._statistics.updates += 1

    def _state(self, update: CompiledUpdate) -> list[HeldPiece]:
        state = [self._piece(key) for key in update.program.state]
        check_state(update, state)
        return state

    def _apply(
        self, update: CompiledUpdate, state: Sequence[HeldPiece], operands: Sequence[np.ndarray]
    ) -> None:
        written = [state[position] for position in update.program.written]
        try:
            results = update([piece.held() for piece in state], operands)
        except BaseException:
            for piece in written:
                if piece.value is not None and piece.value.is_deleted():
                    piece.value = None  # what was written in place is nowhere else
            raise
        for piece, value, rows in zip(written, results, update.rows(operands)):
            self._change(piece, value, rows)

    def _change(self, piece: HeldPiece, value: jax.Array, rows: Sequence[np.ndarray] | None = None) -> None:
        piece.value = value
        piece.number += 1
        piece.changed.change(rows)
        if self._unwritten is not None:
            self._unwritten.change(piece.key)
        self._highest_number = max(self._highest_number, piece.number)
        self._num_changes += 1

    def _wait_for_room(self, keys: Sequence[str]) -> None:
        """Until these can change beside a snapshot that is being written. Others have the lock meanwhile."""
        until = math.inf  # that of the first one: another may follow at once
        while (unwritten := self._unwritten) is not None and not unwritten.has_room(keys):
            until = min(until, unwritten.until)
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._has_room.wait(left_s):
                return

    def _read(
        self, step: Step, pulled: Sequence[HeldPiece], tables: Sequence[HeldPiece], is_duplicate: bool
    ) -> Message:
        changed = [
            piece
            for piece, (_, version) in zip(pulled, step.pull)
            if version is None or tuple(version) != (self.instance, piece.number)
        ]
        values = shown(changed)
        rows = [rows_of(piece, numbers) for piece, numbers in zip(tables, step.row_numbers)]
        if pulled or tables:
            self._statistics.count_pull(values, rows)
        versions = [[self.instance, piece.number] for piece in pulled]
        return Message({"versions": versions, "duplicate": is_duplicate}, [*values, *rows])
