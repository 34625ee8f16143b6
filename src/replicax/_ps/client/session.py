"""``Session``: the arrays of a coordinator on the parameter servers, and its session with the tasks."""

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

from replicax._ps.client.groups import Groups
from replicax._ps.client.server_clients import ServerClients
from replicax._ps.client.server_contents import NewShard, ServerContents
from replicax._ps.client.shared_arrays import SharedArrays
from replicax._ps.client.tasks import Tasks
from replicax._ps.placement.placement_plan import ArrayPlace, PlacementNeeds, PlacementPlan
from replicax._ps.placement.placing_rules import (
    PlacementState,
    after_those_beside,
    arrays_to_create,
    check_may_be_whole,
    copy_key,
    plan_placement,
    servers_of,
)
from replicax._ps.placement.server_arrays import Balance, ServerArray
from replicax._ps.programs.programs import Shard, UpdateProgram
from replicax._ps.store.group_rules import View
from replicax._ps.transport.transport import TaskClient
from replicax._src.program_kit.errors import DeviceError

log = logging.getLogger("replicax")


def warn_of_unused_devices(worker: str, num_devices: int, num_used: int) -> None:
    """Warns that a worker has more devices than ``devices_per_worker``, and says how to use all of them."""
    log.warning(
        "%s has %d devices, and %d of them %s used. To use all of them write "
        "ParameterServerStrategy(devices_per_worker=%d), or start the job with `replicax launch "
        "--devices-per-worker %d`.",
        worker,
        num_devices,
        num_used,
        "is" if num_used == 1 else "are",
        num_devices,
        num_devices,
    )


_BY_PROGRAM_BYTES = 16 << 20
"""The size from which a shard is initialized on its server, if its initializer allows, so that this process never has
it.
"""


@final
class Session:
    """The arrays of one coordinator (or program) on the parameter servers.

    Args:
      servers: The clients of the servers.
      platforms: The servers' platforms, for which their programs are compiled.
      tasks: The cluster; None if the servers are stores of this process.
      snapshot_intervals_s: The interval of each parameter server, in order; None for one that takes no snapshots.
      shared: The arrays of programs that share the servers; None if this program does not share them.
      groups: The primaries of all groups, with ``replication=2``; None without.
      instances: The ids of the processes of the parameter servers, in order; empty if they are in this process.

    Attributes:
      client: A random id of this program, which numbers its closures.
      epoch: A counter of the known changes of variables. Values that workers have read in an earlier epoch are old.
      platforms, worker_platforms: The platforms of the servers, and of the workers that have connected.
      num_made: The number of arrays that were created or moved so far.
      devices_per_worker: The number of devices of each worker that are used.
      layout: A counter of moves and copies of shards, which functions that were traced earlier may not know of.
      before_close: A function that is called before the session ends.
      note_variables: A function that is called with ``num_made`` when that has grown.
    """

    def __init__(
        self,
        servers: ServerClients,
        platforms: Sequence[str] = ("cpu",),
        tasks: Tasks | None = None,
        snapshot_intervals_s: Sequence[float | None] = (),
        shared: SharedArrays | None = None,
        groups: Groups | None = None,
        instances: Sequence[str] = (),
    ):
        self.instances = tuple(instances)
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
        self.note_variables: Callable[[int], None] = lambda num_made: None
        self.platforms = tuple(platforms)
        self._lock = threading.RLock()  # held while arrays are created, which waits for servers
        self._state_lock = threading.Lock()  # never held during a wait
        self._balance = Balance([0] * len(servers))
        self._unmade: list[weakref.ref[ServerArray]] = []
        self._made: weakref.WeakKeyDictionary[ServerArray, weakref.finalize | None] = (
            weakref.WeakKeyDictionary()
        )
        self.num_made = self._next_key = 0
        self._dropped: deque[_Dropped] = deque()  # by garbage collection, which takes no lock
        self._unwanted: list[_Dropped] = []  # what the servers may have, and nobody uses
        # Copies whose creation has failed, and which other programs may use.
        self._unsure_copies: set[Shard] = set()
        self._num_uses: Counter[tuple[int, str]] = Counter()  # uses of programs, by server and digest
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

    def connect(self, job: str, index: int) -> TaskClient:
        """Returns a new client of a task. Does not wait for it."""
        assert self._tasks is not None
        return self._tasks.connect(job, index)

    def close(self) -> None:
        """Ends the session with the tasks, which drop its data."""
        self.before_close()
        self.servers.close()
        if self._tasks is not None:
            self._tasks.close()

    def meet_worker(self, name: str, told: Mapping[str, Any]) -> None:
        """Records a worker's description of itself. Programs are then made for its platform, too.

        Raises:
          DeviceError: It has fewer devices than ``devices_per_worker``.
        """
        wanted, have = self.devices_per_worker, int(told["num_devices"])
        if have < wanted:
            raise DeviceError(
                f"{name} has {have} device(s), but workers run {wanted} replicas each (devices_per_worker). "
                f"Start it with as many as the others (replicax server --devices {wanted}, for virtual ones), "
                "or use a number that all workers have."
            )
        if have > wanted and not self._has_warned:
            self._has_warned = True  # the other workers are usually like this one
            warn_of_unused_devices(name, have, wanted)
        with self._state_lock:
            self.worker_platforms = tuple(sorted({*self.worker_platforms, str(told["platform"])}))

    def use_primaries(self, views: Sequence[View]) -> None:
        """Connects to the primaries of all groups, given by their views."""
        self.servers.use_primaries(views)
        self.renew()

    def compare_copies(self) -> list[int]:
        """Compares the two copies of all shards. Returns the parameter servers where they differ."""
        return self._contents.compare_copies()

    def send_view(self, task: int, view: View, timeout_s: float) -> None:
        """Tells a parameter server which servers hold a group; see ``Tasks.send_view``."""
        assert self._tasks is not None
        self._tasks.send_view(task, view, timeout_s)

    @property
    def bytes_on(self) -> list[int]:
        """The number of bytes of this program's arrays on each parameter server."""
        return list(self._balance.bytes_on)

    # --- creating -------------------------------------------------------------------------------------

    def add(self, array: ServerArray) -> ServerArray:
        """Registers an array to be created. Arrays created together are placed in the order of registration."""
        with self._lock:
            if self._shared is not None:
                self._shared.name(array)
            self._unmade.append(weakref.ref(array))
        return array

    def plan(self, needs: PlacementNeeds) -> PlacementPlan:
        """Returns the plan for what a function needs. It sends nothing, and changes nothing on the servers.

        If programs share the servers, only the servers know where the chief has put a value. Then it asks them, and
        places the values, so that the plan has nothing left to do.

        Raises:
          UnsupportedError: An array must be kept whole, but exists in shards.
          UnavailableError: The chief has not created an array in time.
        """
        with self._lock:
            if self._shared is not None:
                return self._placed_shared(needs, self._shared)
            self._count_dropped()
            state = PlacementState(self._registered(), self._balance.bytes_on, self._next_key)
            plan = plan_placement(needs, state)
            self._next_key += len(plan.created) + len(plan.moved)
            return plan

    def carry_out(self, plan: PlacementPlan) -> bool:
        """Creates, moves and copies arrays on the servers.

        Returns:
          False if another thread has placed one of the arrays since the plan was made. Nothing has happened then: make
          another plan.
        """
        with self._lock:
            if not plan.is_current:
                return False
            self._drop_waiting()
            num_made = self.num_made
            try:
                self._create(plan)
                self._move(plan)
                self._copy(plan)
            finally:
                if self.num_made > num_made:
                    self.note_variables(self.num_made)
            return True

    def make(self, arrays: Sequence[ServerArray]) -> None:
        """Creates arrays on the servers, with all registered ones that have no array to stand beside."""
        with self._lock:
            if all(array.is_made for array in arrays):
                return  # without a request, which another server might not answer
            self._drop_waiting()
            if self._shared is not None:
                self._make_shared(arrays, self._shared)
                return
            is_done = self.carry_out(self.plan(PlacementNeeds(arrays)))
            assert is_done  # nobody else has held the lock

    def _placed_shared(self, needs: PlacementNeeds, shared: SharedArrays) -> PlacementPlan:
        """Places the arrays of programs that share the servers. Returns a plan that has nothing left to do."""
        for array in needs.kept_whole:
            check_may_be_whole(array)
            array.row_ranges = ()
        for array, other in needs.colocated:
            self._colocate_shared(array, other, shared)
        self.make(needs.used)
        for array, near in needs.copied:
            self.make([array])
            every = range(self.num_ps)
            for ps in every if near is None else servers_of(near, {a: ArrayPlace.of(a) for a in near}):
                self._copy_shared(array, ps, shared)
        places = {array: ArrayPlace.of(array) for array in needs.used}
        return PlacementPlan(places, places)

    def _make_shared(self, arrays: Sequence[ServerArray], shared: SharedArrays) -> None:
        """Creates or finds arrays that other programs use, too. They stay on the servers when this program drops
        them.
        """
        missing = [array for array in arrays if not array.is_made]
        if shared.is_chief:
            wanted = arrays_to_create(missing, self._registered())
        else:
            wanted = after_those_beside(missing)
        try:
            absent = shared.place(wanted, self._balance)
            # One that exists was created by another chief, or by an earlier call that failed.
            self._contents.create(self._new_shards(absent), if_absent=True)
        except BaseException:
            for array in wanted:
                self._forget_shards(array)
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

    def _registered(self) -> list[ServerArray]:
        """Returns the arrays that do not exist yet, in the order of their registration."""
        return [array for ref in self._unmade if (array := ref()) is not None and not array.is_made]

    def _forget_shards(self, array: ServerArray) -> None:
        for shard in array.shards:
            self._balance.remove(shard.ps, array.bytes_of(shard))
        array.shards = ()

    def _forget_made(self) -> None:
        self._unmade = [ref for ref in self._unmade if (a := ref()) is not None and not a.is_made]

    def _create(self, plan: PlacementPlan) -> None:
        if plan.created:
            shards = [(array, shard) for array in plan.created for shard in plan.places[array].shards]
            self._create_own(self._new_shards(shards))
            for array in plan.created:
                self._put(array, plan)
            self._forget_made()

    def _move(self, plan: PlacementPlan) -> None:
        """Moves arrays. The old shards are dropped last, so that a failure leaves each array at a place that has it."""
        if not plan.moved:
            return
        values = self.servers.read([array.shards for array in plan.moved])
        new = [
            NewShard(shard, array.shape_of(shard), array.dtype, _part_of(value, array, shard))
            for array, value in zip(plan.moved, values, strict=True)
            for shard in plan.places[array].shards
        ]
        self._create_own(new)
        for array in plan.moved:
            dropping = self._made.get(array)
            if dropping is not None:
                dropping.detach()
            self._unwanted += map(_Dropped.of, array.shards)
            self._forget_shards(array)
            self._put(array, plan)
        self.layout += 1
        self._drop_waiting()

    def _copy(self, plan: PlacementPlan) -> None:
        if not plan.copied:
            return
        arrays = list(dict.fromkeys(array for array, _ in plan.copied))
        values = dict(zip(arrays, self.servers.read([array.shards for array in arrays]), strict=True))
        copies = [(array, Shard(ps, plan.places[array].copies[ps])) for array, ps in plan.copied]
        for ps in sorted(
            {shard.ps for _, shard in copies}
        ):  # a failure of one leaves the copies on others known
            there = [(array, shard) for array, shard in copies if shard.ps == ps]
            self._create_own(
                [NewShard(shard, array.shape, array.dtype, values[array]) for array, shard in there]
            )
            for array, shard in there:
                self._set_copy(array, shard)

    def _put(self, array: ServerArray, plan: PlacementPlan) -> None:
        """Records the place of an array that the servers have there."""
        place = plan.places[array]
        array.key, array.row_ranges, array.shards = place.key, place.row_ranges, place.shards
        array.colocated_with, array.initial = plan.beside.get(array), None
        self.num_made += 1
        for shard in array.shards:
            self._balance.add(shard.ps, array.bytes_of(shard))
        sized = [(shard, array.bytes_of(shard)) for shard in array.shards]
        dropping = weakref.finalize(array, _drop, self._dropped, sized, array.copies, array.num_bytes)
        dropping.atexit = False
        self._set_made(array, dropping)

    def _set_copy(self, array: ServerArray, shard: Shard) -> None:
        array.copies[shard.ps] = shard.key
        self._balance.add(shard.ps, array.num_bytes)
        self.layout += 1

    def _create_own(self, new: Sequence[NewShard]) -> None:
        """Creates shards that no other program knows. If it fails, some may exist, which the next call drops."""
        try:
            self._contents.create(new)
        except BaseException:
            self._unwanted += [_Dropped.of(each.shard) for each in new]
            raise

    def _new_shards(self, shards: Sequence[tuple[ServerArray, Shard]]) -> list[NewShard]:
        return [
            NewShard(shard, array.shape_of(shard), array.dtype, self._initial(array, shard))
            for array, shard in shards
        ]

    def _initial(self, array: ServerArray, shard: Shard) -> np.ndarray | UpdateProgram:
        assert array.initial is not None
        size = int(np.prod(array.shape_of(shard))) * array.dtype.itemsize
        program = getattr(array.initial, "program", None)
        if program is not None and size >= _BY_PROGRAM_BYTES:
            start, stop = shard.rows or (0, array.shape[0])
            made = program(start, stop, self.platforms)
            if made is not None:
                return made
        return _part_of(np.asarray(array.initial(), array.dtype), array, shard)

    def _colocate_shared(self, array: ServerArray, other: ServerArray, shared: SharedArrays) -> None:
        """Places the shards of an array beside another one's. The chief moves an existing one, and the others wait."""
        if not array.is_made:
            array.colocated_with = other
            return
        self.make([other])
        if ArrayPlace.of(array).is_beside(ArrayPlace.of(other)):
            return
        try:
            if not shared.is_chief:
                shared.wait_colocated(array, other)
                return
            (value,) = self.servers.read([array.shards])
            self._unwanted += map(_Dropped.of, array.shards)
            self._forget_shards(array)
            array.colocated_with = other
            array.initial = lambda: value
            self._unmade.append(weakref.ref(array))
            self.make([array])  # after it has dropped the old shards, which have the same keys
        finally:
            self.layout += 1

    def _copy_shared(self, array: ServerArray, ps: int, shared: SharedArrays) -> None:
        """Makes sure that a server has a copy of a small array without shards."""
        if array.shards[0].ps == ps or ps in array.copies:
            return
        shard = Shard(ps, copy_key(array.key, ps))
        has_failed = shard in self._unsure_copies
        if has_failed or not shared.has_copy(array, ps):
            (value,) = self.servers.read([array.shards])
            self._unsure_copies.add(shard)
            self._contents.create([NewShard(shard, array.shape, array.dtype, value)], if_absent=True)
            if has_failed:  # it may have the value of the first try
                self._contents.assign([((shard,), value)])
            self._unsure_copies.discard(shard)
        self._set_copy(array, shard)

    def restored(self, ps: int, keys: Collection[str] | None) -> list[str]:
        """Gives its programs to a parameter server that restarted from a snapshot, and has all values read again.

        Args:
          ps: The number of the parameter server.
          keys: The keys of the shards that the snapshot has; None if the server has all.

        Returns:
          The names of the arrays with a shard that the server should have and lacks.

        Raises:
          UnavailableError: It is lost again.
        """
        self._contents.send_all_programs(ps)
        self.renew()
        if keys is None:
            return []
        made = [(array.name, array.keys_on(ps) - set(keys)) for array in self._all_made()]
        # A thread may have created an array there since the server restarted.
        lacks = self._contents.lacking(ps, sorted(set().union(*(new for _, new in made))))
        return [name for name, new in made if new & lacks]

    def names_on(self, ps: int) -> list[str]:
        """Returns the names of the arrays that have a shard or a copy on a parameter server."""
        return sorted(array.name for array in self._all_made() if array.keys_on(ps))

    def keep_programs(self, owner: Any, updates: Sequence[tuple[int, UpdateProgram]]) -> None:
        """Gives parameter servers their programs of a function, which are dropped when ``owner`` is deleted."""
        uses = [(ps, update.digest) for ps, update in updates]
        with self._lock:
            self._num_uses.update(uses)
            weakref.finalize(owner, self._dropped.extend, [_Dropped(*use) for use in uses]).atexit = False
            for ps, update in updates:
                self._contents.send_program(ps, update)

    def has_update(self, digest: str) -> bool:
        """True if a parameter server was given that program."""
        return self._contents.has_program(digest)

    def _count_dropped(self) -> None:
        """Takes the shards and programs of deleted variables and functions off the counts. ``_drop_waiting`` drops
        them.
        """
        for dropped in [self._dropped.popleft() for _ in range(len(self._dropped))]:
            if dropped.shard is not None:
                self._balance.remove(dropped.ps, dropped.num_bytes)
            else:
                self._num_uses[dropped.ps, dropped.program] -= 1
            self._unwanted.append(dropped)

    def _drop_waiting(self) -> None:
        """Drops from the servers what nobody uses: of deleted variables and functions, and of calls that failed.

        If it fails, the next call drops all again.
        """
        self._count_dropped()
        if not self._unwanted:
            return
        uses = dict.fromkeys((each.ps, each.program) for each in self._unwanted if each.shard is None)
        unused = [use for use in uses if not self._num_uses[use]]
        self._contents.drop([each.shard for each in self._unwanted if each.shard is not None], unused)
        self._unwanted = []
        for use in unused:
            del self._num_uses[use]

    # --- values ---------------------------------------------------------------------------------------

    def read(self, arrays: Sequence[ServerArray]) -> list[np.ndarray]:
        """Returns the full values of arrays. All values on one server are of the same moment."""
        self.make(arrays)
        return self.servers.read([array.shards for array in arrays])

    def read_rows(self, array: ServerArray, ids: np.ndarray) -> np.ndarray:
        """Returns a copy of the rows of an array at ``ids`` [n]."""
        self.make([array])
        return self.servers.read_rows(array.shards, ids, array.shape[0])

    def assign(self, array: ServerArray, value: np.ndarray) -> None:
        """Replaces a value, on every server that has a shard or a copy of it."""
        with self._lock:
            if not array.is_made:
                if self._shared is None or self._shared.is_chief:
                    kept = np.array(value)  # the caller may change its array
                    array.initial = lambda: kept
                    return
                self.make([array])
            if self._shared is not None:
                num_copies = len(array.copies)
                self._shared.find_copies(array)
                self.layout += len(array.copies) - num_copies
            copies = [((Shard(ps, key),), value) for ps, key in array.copies.items()]
            # Under the lock: else another thread may move the array, or copy its old value to another server.
            self._contents.assign([(array.shards, value), *copies])
        self.renew()

    def apply_round(self, number: int, low: int, closures: Sequence[int]) -> None:
        """Has all servers apply the mean of the gradients of these closures; see ``ServerContents.apply_round``."""
        self._contents.apply_round(number, low, closures)

    def renew(self) -> None:
        """Starts another epoch: closures that are sent from now on read variables again.

        So they see earlier assignments, and the changes of closures that have ended. It does not wait for a thread
        that waits for a server.
        """
        with self._state_lock:
            self.epoch += 1


def _part_of(value: np.ndarray, array: ServerArray, shard: Shard) -> np.ndarray:
    """Returns the part of an array's value that a shard has."""
    part = value if shard.rows is None else value[shard.rows[0] : shard.rows[1]]
    return np.asarray(part, order="C").reshape(array.shape_of(shard))


@dataclass(frozen=True)
class _Dropped:
    """An object to drop on a server: a use of a program, by its digest, or a shard with its number of bytes."""

    ps: int
    program: str = ""
    shard: Shard | None = None
    num_bytes: int = 0

    @classmethod
    def of(cls, shard: Shard) -> _Dropped:
        """Returns a shard whose bytes are not counted."""
        return cls(shard.ps, shard=shard)


def _drop(
    dropped: deque[_Dropped],
    shards: Sequence[tuple[Shard, int]],
    copies: Mapping[int, str],
    num_bytes: int,
) -> None:
    """Queues the shards of a deleted array to be dropped. Garbage collection calls it, so it takes no lock."""
    dropped.extend(_Dropped(shard.ps, shard=shard, num_bytes=size) for shard, size in shards)
    dropped.extend(_Dropped(ps, shard=Shard(ps, key), num_bytes=num_bytes) for ps, key in copies.items())
