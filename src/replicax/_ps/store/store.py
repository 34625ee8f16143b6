"""``Store``: the shards of variables that one parameter server holds, and the operations on them. No transport."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import jax
import numpy as np

from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.store.held_shards import (
    HeldShard,
    check_assigned,
    check_tables,
    rows_of,
    shown,
)
from replicax._ps.store.held_values import copied, is_overwritten, overwritten
from replicax._ps.store.keeper_rules import Progress
from replicax._ps.store.requests import (
    ApplyRound,
    Assign,
    Create,
    Drop,
    NewShard,
    Step,
    keys_of,
    program_of,
)
from replicax._ps.store.store_contents import StoreContents, StoreState
from replicax._ps.store.store_snapshots import Moment, StoreSnapshots, any_moment
from replicax._ps.store.updates import CompiledUpdate
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.errors import MessageError, ReplicaxError

_BRIEFLY_S: Final = 0.2
_Read = Callable[[Mapping[str, Any], Sequence[np.ndarray]], Any]


@final
class Store:
    """Shards, the programs that update them, and the record of closures that did. All methods are thread-safe.

    One lock is held while an update runs and while views are taken, so that no client sees half of an update. Large
    arrays
    of an answer are views, to be sent outside of the lock and released then.

    Args:
      device: The device of the values and the updates; a CPU if not given.
    """

    def __init__(self, device: Any = None):
        self.device = jax.local_devices(backend="cpu")[0] if device is None else device
        self._lock = threading.Lock()
        self._compile_lock = threading.Lock()
        self._contents = StoreContents()
        self._snapshots = StoreSnapshots(self._contents, self._lock, self.device)
        self._told: dict[str, Any] = {}
        self._operations: dict[str, tuple[_Read, Callable[[Any, str | None], Message]]] = {
            "create": (Create.of, self._create),
            "program": (program_of, self._program),
            "step": (Step.of, self._step),
            "apply": (ApplyRound.of, self._apply_round),
            "assign": (Assign.of, self._assign),
            "drop": (Drop.of, self._drop),
            "find": (keys_of, self._find),
            "checksum": (lambda header, arrays: None, self._checksum),
        }

    def answer(self, message: Message) -> Message:
        """Executes a request. Its arrays are not needed afterwards. The answer's arrays may be views; keep them
        briefly.

        Raises:
          UnavailableError: The store belongs to another coordinator, or to none. ``TaskService`` decides whose
            messages are
            answered and has the reason; this message arrived too late.
          UnknownProgramError: The program must be sent again; nothing has changed.
          InvalidArgumentError: The request does not fit the store; nothing has changed.
          MessageError: The header is not that of a known operation; nothing has changed.
        """
        op = message.header.get("op")
        if op not in self._operations:
            raise MessageError(
                f"A parameter server has no operation {op!r}; it has {', '.join(self._operations)}."
            )
        read, do = self._operations[op]
        try:
            request = read(message.header, message.arrays)
        except ReplicaxError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise MessageError(
                f'A message "{op}" has an invalid header: {error!r}. The header is {message.header!r:.200}.'
            ) from error
        return do(request, message.header.get("incarnation"))

    def hello(self, incarnation: str) -> None:
        """Gives the store to this coordinator. Data of another coordinator is dropped."""
        with self._lock:
            self._contents.hello(incarnation)

    def leave(self) -> None:
        """Drops everything in the store, which then belongs to no coordinator."""
        with self._lock:
            self._contents.leave()

    def statistics(self) -> dict[str, Any]:
        """Returns counts as JSON: see ``StoreStatistics``, and ``shards``, ``bytes``, ``programs``,
        ``gradient_bytes`` held now.

        While an update runs, it returns the last counts, because the caller wants to know if the server is alive.
        """
        if not self._lock.acquire(timeout=_BRIEFLY_S if self._told else -1):
            return self._told
        try:
            self._told = self._contents.counts()
            return self._told
        finally:
            self._lock.release()

    @property
    def instance(self) -> str:
        """A random id. Versions of another store, such as one that ran at the same address before, do not match it.

        A restored store has a new id, and so has a store whose coordinator has left.
        """
        return self._contents.rules.instance

    @property
    def progress(self) -> Progress:
        """Counters that change with the store, for a snapshot keeper."""
        rules = self._contents.rules
        return Progress(rules.instance, rules.num_changes, rules.num_created)

    def snapshot(
        self, directory: str | Path, epoch: int = 0, kept_epoch: int = 0, moment: Moment = any_moment
    ) -> dict[str, Any]:
        """Writes the changes since the last snapshot, and the record of applied closures, to a new file.

        Updates continue meanwhile. The values are those of one moment. Until a shard is written, the first update
        of it needs memory for a second value. If that would be too much memory, the update waits at most 40 s
        (``Unwritten``). If few rows have changed, they are copied first. The snapshot has the digests of programs,
        but not the programs, and no gradients that wait for their round.

        Args:
          directory: A folder for this server alone.
          epoch: A number by which ``restore`` finds the snapshot.
          kept_epoch: The epoch whose snapshot must stay, because this one may not replace it yet; 0 for none.
          moment: A context that is active while the values are taken. ``restore`` returns the data that it gives.

        Returns:
          ``file``, ``bytes``, ``epoch``, ``updates`` (the number of updates in the values), and ``is_base``, which
          is true if all was written.

        Raises:
          SnapshotError: The snapshot could not be written; earlier ones are unchanged.
        """
        return self._snapshots.write(Path(directory), epoch, moment, kept_epoch)

    def end_closures(self, incarnation: str, stop: int, unfinished: Sequence[int]) -> None:
        """Records that all closures of a coordinator below ``stop`` have ended, besides these.

        No push of theirs is applied any more, also not after ``restore``.
        """
        with self._lock:
            self._contents.rules.end(incarnation, stop, unfinished)

    @property
    def session(self) -> int:
        """A number that changes when a coordinator comes or leaves."""
        return self._contents.rules.session

    def restore(
        self, directory: str | Path, epoch: int | None = None, session: int | None = None
    ) -> dict[str, Any] | None:
        """Replaces the contents by the newest intact snapshot. The store has a new ``instance`` then.

        Call it before the server serves, or while no other request is in flight. The store gets the snapshot's
        coordinator.

        Args:
          directory: The folder that was given to ``snapshot``.
          epoch: The epoch of the snapshot; None for any.
          session: The ``session`` in which the snapshot was asked for; None if no coordinator can come meanwhile.

        Returns:
          None if there is no snapshot. Else ``file``, ``epoch``, ``incarnation``, ``updates``, ``shards``, and
          ``keys`` of the
          shards; ``programs``, the digests of programs that must be sent again; ``refused``, the problems of newer
          snapshots;
          ``age_s``; ``applied``, the extent of applied closures of the coordinator (see ``Window.extent``);
          ``position``, if
          updates are numbered; and ``num_held_gradients``, the number of gradients that the snapshot lacks.

        Raises:
          SnapshotError: There are snapshots, but none is intact and of the epoch; or the session is over. Nothing
            has changed, or the store has what the coordinator has put into it that has come meanwhile.
        """
        return self._snapshots.restore(Path(directory), epoch, session)

    def state(self) -> StoreState:
        """Returns everything in the store at one moment. While a view exists, the first update of its shard needs new
        memory.
        """
        with self._lock:
            return self._contents.state()

    def programs(self, digests: Sequence[str]) -> list[UpdateProgram]:
        """Returns those of these programs that the store has."""
        with self._lock:
            found = self._contents.programs
            return [found[digest].program for digest in digests if digest in found]

    def begin_with(self, content: Mapping[str, Any]) -> None:
        """Replaces everything by the ``content`` of another store's state. The store has a new ``instance`` then."""
        with self._lock:
            self._contents.take(content, {})

    def put(self, key: str, number: int, value: np.ndarray) -> None:
        """Adds a copy of a shard of another store's state."""
        shard = HeldShard(key, (value.shape, value.dtype), copied(value, self.device), number)
        with self._lock:
            self._contents.shards[key] = shard

    def hold(self, number: int, closure: int, digest: str, arrays: Sequence[np.ndarray]) -> None:
        """Adds gradients of another store's state. The store must have their program."""
        with self._lock:
            self._contents.gradients.hold(number, closure, self._contents.program(digest), arrays)

    # Operations, which clients ask for.

    def _create(self, request: Create, sender: str | None) -> Message:
        contents = self._contents
        with self._lock:
            self._contents.rules.check(sender)
            if contents.rules.has_done(request.number, request.low):
                return Message({"duplicate": True})
            absent = contents.absent(request.shards, request.if_absent)
            new = [shard for shard, is_new in zip(request.shards, absent) if is_new]
            programs = [None if shard.value is not None else contents.program(shard.initial) for shard in new]
        values = [self._initial_value(shard, program) for shard, program in zip(new, programs)]
        with self._lock:
            self._contents.rules.check(sender)
            if contents.rules.has_done(
                request.number, request.low
            ):  # the same message came on an earlier connection
                return Message({"duplicate": True})
            absent = contents.absent(new, request.if_absent)
            for shard, value, is_new in zip(new, values, absent):
                if is_new:
                    contents.add(shard.key, shard.spec, value)
            contents.rules.did(request.number)
        return Message({})

    def _program(self, program: UpdateProgram, sender: str | None) -> Message:
        digest = program.digest
        with self._compile_lock:  # several workers send one program; one of them compiles it
            with self._lock:
                self._contents.rules.check(sender)
                is_known = digest in self._contents.programs
            compiled = None if is_known else CompiledUpdate(program, self.device)
            with self._lock:
                self._contents.rules.check(sender)
                if compiled is not None:
                    self._contents.programs[digest] = compiled
        return Message({})

    def _step(self, step: Step, sender: str | None) -> Message:
        contents = self._contents
        with self._lock:
            self._contents.rules.check(sender)
            update = None if step.program is None else contents.program(step.program)
            averaged = None if step.gradients is None else contents.program(step.gradients.program)
            if update is not None and contents.unwritten is not None:
                self._snapshots.wait_for_room([update.program.state[at] for at in update.program.written])
                self._contents.rules.check(sender)
            pulled = [contents.shard(key) for key, _ in step.pull]
            tables = [contents.shard(key) for key in step.rows]
            check_tables(tables)
            contents.rules.raise_low(step.closure, step.low)
            if averaged is not None:
                if update is not None:
                    contents.check_update(step, update)
                contents.hold(step, averaged)
            is_duplicate = contents.update(step, update)
            if step.only_apply:
                return Message({"duplicate": is_duplicate})
            return self._read(step, pulled, tables, is_duplicate)

    def _apply_round(self, request: ApplyRound, sender: str | None) -> Message:
        with self._lock:
            self._contents.rules.check(sender)
            self._snapshots.wait_for_room(self._contents.gradients.keys_of(request.number.number))
            self._contents.rules.check(sender)
            return Message({"duplicate": self._contents.apply_round(request)})

    def _assign(self, request: Assign, sender: str | None) -> Message:
        contents, arrays = self._contents, request.values
        with self._lock:
            self._snapshots.wait_for_room(request.keys)
            self._contents.rules.check(sender)
            if contents.rules.has_done(request.number, request.low):
                return Message({"duplicate": True})
            shards = [contents.shard(key) for key in request.keys]
            for shard, array in zip(shards, arrays, strict=True):
                check_assigned(shard, array)
            # Allocate first: writes in place need no memory, so either all values are assigned or none.
            fresh = [
                copied(array, self.device) if shard.value.is_deleted() or not is_overwritten(array) else None
                for shard, array in zip(shards, arrays)
            ]
            for shard, array, value in zip(shards, arrays, fresh):
                contents.change(shard, overwritten(shard.value, array) if value is None else value)
            contents.rules.did(request.number)
        return Message({})

    def _drop(self, request: Drop, sender: str | None) -> Message:
        with self._lock:
            self._contents.rules.check(sender)
            if self._contents.rules.has_done(request.number, request.low):
                return Message({"duplicate": True})
            for key in request.keys:
                self._contents.shards.pop(key, None)  # it may have been dropped before
            self._contents.gradients.forget(request.keys)
            for digest in request.programs:
                self._contents.programs.pop(digest, None)
            self._contents.rules.did(request.number)
        return Message({})

    def _find(self, keys: Sequence[str], sender: str | None) -> Message:
        with self._lock:
            self._contents.rules.check(sender)
            specs = [(key, self._contents.shards[key].spec) for key in keys if key in self._contents.shards]
        return Message({"found": [[key, list(shape), str(dtype)] for key, (shape, dtype) in specs]})

    def _checksum(self, request: None, sender: str | None) -> Message:
        with self._lock:
            self._contents.rules.check(sender)
            views = {key: shard.view() for key, shard in self._contents.shards.items()}
        crc = 0
        for key in sorted(views):
            value = np.asarray(views.pop(key), order="C").reshape(-1).view(np.uint8)
            crc = zlib.crc32(value.data, zlib.crc32(key.encode(), crc))
        return Message({"checksum": f"{crc:08x}"})

    # Under the lock.

    def _initial_value(self, new: NewShard, program: CompiledUpdate | None) -> jax.Array:
        if program is not None:
            return program([], [])[0]
        assert new.value is not None
        return copied(new.value, self.device)

    def _read(
        self, step: Step, pulled: Sequence[HeldShard], tables: Sequence[HeldShard], is_duplicate: bool
    ) -> Message:
        rules = self._contents.rules
        changed = [
            shard for shard, (_, version) in zip(pulled, step.pull) if rules.is_new(shard.number, version)
        ]
        values = shown(changed)
        rows = [rows_of(shard, numbers) for shard, numbers in zip(tables, step.row_numbers)]
        if pulled or tables:
            self._contents.statistics.count_pull(values, rows)
        versions = [[rules.instance, shard.number] for shard in pulled]
        return Message({"versions": versions, "duplicate": is_duplicate}, [*values, *rows])
