"""``Session``: the arrays that a coordinator has on the parameter servers, and its time with the tasks."""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.errors import DeviceError, UnsupportedError
from replicax._src.parameter_servers.client.groups import Groups
from replicax._src.parameter_servers.client.server_clients import ServerClients
from replicax._src.parameter_servers.client.server_contents import NewPiece, ServerContents
from replicax._src.parameter_servers.client.shared_arrays import SharedArrays, copy_key
from replicax._src.parameter_servers.client.tasks import Tasks
from replicax._src.parameter_servers.programs.programs import Piece, UpdateProgram
from replicax._src.parameter_servers.store.group_rules import View
from replicax._src.variables.server_arrays import Balance, ServerArray

log = logging.getLogger("replicax")


def warn_of_unused_devices(worker: str, num_devices: int, num_used: int) -> None:
    """Warns that a worker has more devices than ``devices_per_worker``, and says how to use all of them."""
    log.warning(
        "%s has %d devices, and %d of them %s used. To use all of them write ParameterServerStrategy(devices_per_worker=%d), "
        "or start the job with `replicax launch --devices-per-worker %d`.",
        worker,
        num_devices,
        num_used,
        "is" if num_used == 1 else "are",
        num_devices,
        num_devices,
    )


_BY_PROGRAM_BYTES = 16 << 20
"""A piece from this size on is made on its server, so that nothing of it is ever here, if its initializer allows."""


@final
class Session:
    """The arrays of one coordinator (or program) on the parameter servers.

    Args:
      servers: The clients of the servers.
      platforms: The servers' platforms, for which their programs are compiled.
      tasks: The cluster; None if the servers are stores of this process.
      snapshot_intervals_s: One for each parameter server, in order; None for one that takes no snapshots.
      shared: The arrays of programs that share the servers; None if this program has them to itself.
      groups: The primaries of all groups, if each piece is on two servers; None if it is on one.

    Attributes:
      client: A random text that names this program: its closures are numbered by it.
      epoch: Counts the known changes of variables: values that workers have read in an earlier epoch are old.
      platforms, worker_platforms: The platforms of the servers, and of the workers that have been met.
      num_made: The number of keys that arrays have got: it grows when arrays are made.
      devices_per_worker: The number of devices of each worker that are used.
      layout: Counts moves and copies of pieces: functions that were traced before may not know of them.
      before_close: Called before the time with the tasks ends.
    """

    def __init__(
        self,
        servers: ServerClients,
        platforms: Sequence[str] = ("cpu",),
        tasks: Tasks | None = None,
        snapshot_intervals_s: Sequence[float | None] = (),
        shared: SharedArrays | None = None,
        groups: Groups | None = None,
    ):
        self.servers, self._contents = servers, ServerContents(servers)
        self.groups = groups
        if groups is not None:
            servers.use_primaries(groups.views)
        self.client = uuid.uuid4().hex
        self._shared = shared
        self.snapshot_intervals_s = tuple(snapshot_intervals_s) or (None,) * len(servers)
        for ps, interval_s in enumerate(self.snapshot_intervals_s):
            servers[ps].returns |= interval_s is not None
        self._tasks = tasks
        self.epoch = self.layout = 0
        self.devices_per_worker = 1
        self.worker_platforms: tuple[str, ...] = ()
        self.before_close: Callable[[], None] = lambda: None
        self.platforms = tuple(platforms)
        self._lock = threading.RLock()  # held while arrays are made: that waits for servers
        self._state_lock = threading.Lock()  # never held while something waits
        self._balance = Balance(len(servers))
        self._unmade: list[weakref.ref[ServerArray]] = []
        self._made: weakref.WeakKeyDictionary[ServerArray, weakref.finalize | None] = (
            weakref.WeakKeyDictionary()
        )
        self.num_made = 0
        self._dropped: deque[_Dropped] = deque()
        self._num_uses: Counter[tuple[int, str]] = Counter()  # of programs, by server and digest
        self._has_warned = False

    @property
    def num_ps(self) -> int:
        return len(self.servers)

    @property
    def incarnation(self) -> Any:
        return self.servers.incarnation

    @property
    def num_workers(self) -> int:
        return 0 if self._tasks is None else len(self._tasks.addresses("worker"))

    @property
    def ps_addresses(self) -> Sequence[str]:
        return () if self._tasks is None else self._tasks.addresses("ps")

    def connect(self, job: str, index: int) -> Any:
        """Returns a new client of a task. Does not wait for it."""
        assert self._tasks is not None
        return self._tasks.connect(job, index)

    def close(self) -> None:
        """Ends the time with the servers: what is there is dropped."""
        self.before_close()
        self.servers.close()
        if self._tasks is not None:
            self._tasks.close()

    def meet_worker(self, name: str, told: Mapping[str, Any]) -> None:
        """A worker has told what it has: programs are made for its platform from now on.

        Raises:
          DeviceError: It has fewer devices than the others.
        """
        wanted, have = self.devices_per_worker, int(told["num_devices"])
        if have < wanted:
            raise DeviceError(
                f"{name} has {have} device(s), and workers run {wanted} replicas each (devices_per_worker). "
                f"Start it with as many as the others (replicax server --devices {wanted}, for virtual ones), or say a number "
                "that all have."
            )
        if have > wanted and not self._has_warned:
            self._has_warned = True  # the other workers are mostly like this one
            warn_of_unused_devices(name, have, wanted)
        with self._state_lock:
            self.worker_platforms = tuple(sorted({*self.worker_platforms, str(told["platform"])}))

    def use_primaries(self) -> None:
        """Takes over the primaries that ``groups`` names now."""
        assert self.groups is not None
        self.servers.use_primaries(self.groups.views)
        self.renew()

    def on_one_server(self) -> list[int]:
        """Compares the two copies of all pieces. Returns the parameter servers where they differ."""
        return self._contents.on_one_server()

    def tell_view(self, task: int, view: View, timeout_s: float) -> None:
        """Tells a parameter server who serves a group; see ``Tasks.tell_view``."""
        assert self._tasks is not None
        self._tasks.tell_view(task, view, timeout_s)

    @property
    def bytes_on(self) -> list[int]:
        """The bytes of our arrays on each parameter server."""
        return list(self._balance.bytes_on)

    # --- making ---------------------------------------------------------------------------------------

    def add(self, array: ServerArray) -> ServerArray:
        """Remembers an array that is to be made: those made together are placed in the order in which they were
        added.
        """
        with self._lock:
            if self._shared is not None:
                self._shared.name(array)
            self._unmade.append(weakref.ref(array))
        return array

    def make(self, arrays: Sequence[ServerArray]) -> None:
        """Puts arrays on the servers, with all that were added before and stand beside nothing."""
        with self._lock:
            self._drop_waiting()
            missing = {id(array) for array in arrays if not array.is_made}
            if not missing:
                return
            if self._shared is not None and not self._shared.is_chief:
                self._make_shared([array for array in arrays if id(array) in missing], self._shared)
                return
            waiting = [array for ref in self._unmade if (array := ref()) is not None and not array.is_made]
            last = max((n for n, array in enumerate(waiting) if id(array) in missing), default=-1)
            chosen = [a for n, a in enumerate(waiting) if id(a) in missing or (n < last and a.beside is None)]
            if self._shared is not None:
                self._make_shared(chosen, self._shared)
                return
            made: list[ServerArray] = []
            try:
                for array in _with_those_beside(chosen):
                    self._place(array)
                    made.append(array)
                self._create(made)
            except BaseException:
                for array in made:  # it is tried again when they are needed again
                    self._forget_pieces(array)
                raise
            self._forget_made()

    def _make_shared(self, arrays: Sequence[ServerArray], shared: SharedArrays) -> None:
        """Makes arrays that others may have, too: they stay on the servers when they are gone here."""
        wanted = _with_those_beside(arrays)
        absent = shared.place(wanted, self._balance)
        try:
            self._create_pieces(absent)
        except BaseException:
            for array, _ in absent:
                array.pieces = ()
            raise
        for array in wanted:
            array.initial = None
            self._set_made(array, None)
        self._forget_made()

    def _set_made(self, array: ServerArray, dropping: weakref.finalize | None) -> None:
        with self._state_lock:
            self._made[array] = dropping

    def _all_made(self) -> list[ServerArray]:
        with self._state_lock:
            return list(self._made)

    def _forget_pieces(self, array: ServerArray) -> None:
        for piece in array.pieces:
            self._balance.remove(piece.ps, array.bytes_of(piece))
        array.pieces = ()

    def _forget_made(self) -> None:
        self._unmade = [ref for ref in self._unmade if (a := ref()) is not None and not a.is_made]

    def _place(self, array: ServerArray) -> None:
        array.key = f"{self.num_made}:{array.name}"
        self.num_made += 1
        if array.beside is not None:
            array.place_beside(array.beside, self._balance)
        else:
            array.place(self._balance)

    def _create(self, arrays: Sequence[ServerArray]) -> None:
        self._create_pieces([(array, piece) for array in arrays for piece in array.pieces])
        for array in arrays:
            array.initial = None
            sized = [(piece, array.bytes_of(piece)) for piece in array.pieces]
            dropping = weakref.finalize(array, _drop, self._dropped, sized, array.copies, array.num_bytes)
            dropping.atexit = False
            self._set_made(array, dropping)

    def _create_pieces(self, pieces: Sequence[tuple[ServerArray, Piece]]) -> None:
        new = [
            NewPiece(piece, array.shape_of(piece), array.dtype, self._initial(array, piece))
            for array, piece in pieces
        ]
        # Keys are new: one that is there was made by this very call, or by another chief that shares it.
        self._contents.create(new, if_absent=True)

    def _initial(self, array: ServerArray, piece: Piece) -> np.ndarray | UpdateProgram:
        assert array.initial is not None
        size = int(np.prod(array.shape_of(piece))) * array.dtype.itemsize
        program = getattr(array.initial, "program", None)
        if program is not None and size >= _BY_PROGRAM_BYTES:
            start, stop = piece.rows or (0, array.shape[0])
            made = program(start, stop, self.platforms)
            if made is not None:
                return made
        value = np.asarray(array.initial(), array.dtype)
        part = value if piece.rows is None else value[piece.rows[0] : piece.rows[1]]
        return np.asarray(part, order="C").reshape(array.shape_of(piece))

    def keep_whole(self, array: ServerArray) -> None:
        """Sees to it that an array is not cut.

        Raises:
          UnsupportedError: It is on the servers in shards.
        """
        with self._lock:
            if array.is_made and array.shards:
                raise UnsupportedError(
                    f"Variable {array.name!r} has to be whole for its optimizer, and is in {len(array.shards)} shards on the "
                    "parameter servers: something used it before the first training step was traced. Train first, or have the "
                    "variable_partitioner leave it in one piece."
                )
            array.shards = ()

    def put_beside(self, array: ServerArray, other: ServerArray) -> None:
        """Sees to it that an array has its pieces where another has them: moves it if it is elsewhere."""
        with self._lock:
            if not array.is_made:
                array.beside = other
                return
            self.make([other])
            if [(p.ps, p.rows) for p in array.pieces] == [(p.ps, p.rows) for p in other.pieces]:
                return
            if self._shared is not None and not self._shared.is_chief:
                self._shared.wait_beside(array, other)
                return
            (value,) = self.servers.read([array.pieces])
            self._contents.drop(array.pieces)
            dropping = self._made.get(array)
            if dropping is not None:
                dropping.detach()
            self._forget_pieces(array)
            array.beside = other
            array.initial = lambda: value
            self._unmade.append(weakref.ref(array))
            self.make([array])
            self.layout += 1

    def copy_to(self, array: ServerArray, ps: int) -> None:
        """Sees to it that a server has a copy of a small array that is whole."""
        with self._lock:
            self.make([array])
            if array.pieces[0].ps == ps or ps in array.copies:
                return
            piece = Piece(ps, copy_key(array, ps))
            if self._shared is None or not self._shared.has_copy(array, ps):
                (value,) = self.servers.read([array.pieces])
                is_shared = self._shared is not None
                self._contents.create([NewPiece(piece, array.shape, array.dtype, value)], if_absent=is_shared)
            array.copies[ps] = piece.key
            self._balance.add(ps, array.num_bytes)
            self.layout += 1

    def restored(self, ps: int, keys: Collection[str] | None) -> list[str]:
        """Gives its programs to a parameter server that has gone back to a snapshot, and has all values read again.

        Args:
          keys: The keys of the pieces that it has; None: it has all.

        Returns:
          Names of the arrays that have a piece there which it does not have.

        Raises:
          UnavailableError: It is gone again.
        """
        self._contents.send_all_programs(ps)
        self.renew()
        return [
            array.name
            for array in self._all_made()
            if keys is not None and not array.keys_on(ps) <= set(keys)
        ]

    def names_on(self, ps: int) -> list[str]:
        """Returns the names of the arrays that have a piece or a copy on a parameter server."""
        return sorted(array.name for array in self._all_made() if array.keys_on(ps))

    def keep_programs(self, owner: Any, updates: Sequence[tuple[int, UpdateProgram]]) -> None:
        """Gives parameter servers their programs of a function; they are dropped when ``owner`` is gone."""
        uses = [(ps, update.digest) for ps, update in updates]
        with self._lock:
            self._num_uses.update(uses)
            weakref.finalize(owner, self._dropped.extend, [_Dropped(*use) for use in uses]).atexit = False
            for ps, update in updates:
                self._contents.send_program(ps, update)

    def has_update(self, digest: str) -> bool:
        """Returns True if a parameter server was given that program."""
        return self._contents.has_program(digest)

    def _drop_waiting(self) -> None:
        """Frees what variables and functions that are gone have left on the servers."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if not dropped:
            return
        unused: list[tuple[int, str]] = []
        for each in dropped:
            if each.piece is not None:
                self._balance.remove(each.ps, each.num_bytes)
                continue
            use = each.ps, each.program
            self._num_uses[use] -= 1
            if not self._num_uses[use]:
                del self._num_uses[use]
                unused.append(use)
        self._contents.drop([each.piece for each in dropped if each.piece is not None], unused)

    # --- values ---------------------------------------------------------------------------------------

    def read(self, arrays: Sequence[ServerArray]) -> list[np.ndarray]:
        """The values of arrays, each whole; those on one server as they were at one moment."""
        self.make(arrays)
        return self.servers.read([array.pieces for array in arrays])

    def read_rows(self, array: ServerArray, ids: np.ndarray) -> np.ndarray:
        """The rows of an array at ``ids`` [n]; a copy."""
        self.make([array])
        return self.servers.read_rows(array.pieces, ids, array.shape[0])

    def assign(self, array: ServerArray, value: np.ndarray) -> None:
        """Replaces a value, on every server that has a piece or a copy of it."""
        with self._lock:
            if not array.is_made:
                if self._shared is None or self._shared.is_chief:
                    kept = np.array(value)  # the caller may write into its own
                    array.initial = lambda: kept
                    return
                self.make([array])
            if self._shared is not None:
                self._shared.find_copies(array)
        pieces = [(array.pieces, value), *(((Piece(ps, key),), value) for ps, key in array.copies.items())]
        self._contents.assign(pieces)
        self.renew()

    def apply_round(self, number: int, low: int, closures: Sequence[int]) -> None:
        """Has all servers apply the mean of the gradients of these closures; see ``ServerContents.apply_round``."""
        self._contents.apply_round(number, low, closures)

    def renew(self) -> None:
        """Begins another epoch: closures that are sent from now on read again what workers have read ahead.

        So they see what was assigned before, and what the closures that have ended have changed. It does not wait for
        a thread that waits for a server.
        """
        with self._state_lock:
            self.epoch += 1


def _with_those_beside(arrays: Sequence[ServerArray]) -> list[ServerArray]:
    """Arrays that are to be made, each after the one that it stands beside, if that is to be made too."""
    found: dict[ServerArray, None] = {}

    def add(array: ServerArray) -> None:
        if array.is_made or array in found:
            return
        if array.beside is not None:
            add(array.beside)
        found[array] = None

    for array in arrays:
        add(array)
    return list(found)


@dataclass(frozen=True)
class _Dropped:
    """Something to drop on a server: a use of a program, by its digest, or a piece and the bytes it counts."""

    ps: int
    program: str = ""
    piece: Piece | None = None
    num_bytes: int = 0


def _drop(
    dropped: deque[_Dropped],
    pieces: Sequence[tuple[Piece, int]],
    copies: Mapping[int, str],
    num_bytes: int,
) -> None:
    """An array is gone; its pieces will be dropped. Takes no lock, for garbage collection."""
    dropped.extend(_Dropped(piece.ps, piece=piece, num_bytes=size) for piece, size in pieces)
    dropped.extend(_Dropped(ps, piece=Piece(ps, key), num_bytes=num_bytes) for ps, key in copies.items())
