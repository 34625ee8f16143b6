"""The work of a task for one coordinator, by its job: a parameter server holds shards, a worker runs closures."""

from __future__ import annotations

import re
import threading
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from replicax._ps.client.server_clients import ServerClients
from replicax._ps.store.group_copies import GroupCopies
from replicax._ps.store.group_copy import GroupCopy
from replicax._ps.store.group_rules import View
from replicax._ps.store.log import DEFAULT_LOG_BYTES
from replicax._ps.store.snapshot_keeper import SnapshotKeeper
from replicax._ps.store.snapshots import SnapshotFolder
from replicax._ps.store.store import Store
from replicax._ps.task.server_def import ServerDef, ServerOptions
from replicax._ps.task.service import Ask, Host, Work
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._ps.worker.resources import WorkerPlace
from replicax._ps.worker.worker import Worker
from replicax._src.program_kit.cluster_tasks import Credentials
from replicax._src.program_kit.errors import StaleCoordinatorError


def host_of(definition: ServerDef, options: ServerOptions, credentials: Credentials) -> Host:
    """Makes the host of a task."""
    if definition.job_name == "ps":
        folder = options.snapshot_dir
        own = None if folder is None else Path(folder) / f"ps-{definition.task_index}"
        return PsHost(own, options.snapshot_interval_s, definition.task_index, credentials, options.log_bytes)
    place = WorkerPlace(definition.task_index, definition.cluster.num_tasks("worker"))
    return WorkerHost(place, credentials)


@final
class WorkerHost:
    """The host of a worker. It has no data that outlives its coordinator."""

    def __init__(self, place: WorkerPlace, credentials: Credentials):
        self.asks: Mapping[str, Ask] = {"primaries": self._primaries}
        self.restored = self.snapshots = None
        self.instance = uuid.uuid4().hex
        self._place, self._credentials = place, credentials
        self._servers: ServerClients | None = None

    def begin(self, incarnation: str, ps: Sequence[str]) -> Work:
        """Makes the work. It connects to no ps before the first use."""
        clients = [TaskClient(address, self._credentials, f"ps {index}") for index, address in enumerate(ps)]
        self._servers = ServerClients(clients, incarnation)
        return Worker(self._servers, self._place, lambda: _traffic(clients))

    def close(self) -> None:
        """Does nothing, because a worker has no data to save."""

    def _primaries(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Switches the connections to the parameter servers that serve the variables now."""
        if self._servers is not None:
            self._servers.use_primaries(map(View.of, header["views"]))
        return {}


@final
class PsHost:
    """The host of a parameter server: its store and the store's snapshots, or the copies and snapshots of groups.

    It starts with the snapshots of the coordinator that took the newest snapshot.

    Args:
      directory: The folder of the snapshots of this task; None turns snapshots off.
      interval_s: The seconds between two snapshots.
      index: The index of this task.
      credentials: The credentials for other parameter servers, with ``replication=2``.
      log_bytes: The most memory that each group uses for updates that its backup lacks.

    Raises:
      SnapshotError: There are snapshots, but none can be read.
    """

    def __init__(
        self,
        directory: Path | None,
        interval_s: float,
        index: int,
        credentials: Credentials,
        log_bytes: int = DEFAULT_LOG_BYTES,
    ):
        self._store, self._interval_s = Store(), interval_s
        self._index, self._credentials, self._log_bytes = index, credentials, log_bytes
        self._directory = directory
        self._turns: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._keeper: SnapshotKeeper | None = None
        self._copies: GroupCopies | None = None
        self._restored: GroupCopies | None = None
        self._restored_groups: Mapping[str, Any] = {}
        if directory is not None:
            self._restore_newest(directory)
        self.asks: Mapping[str, Ask] = {"group": self._take_view}
        if self._keeper is not None:
            self.asks = {**self.asks, "snapshot": self._snapshot, "restore": self._restore}

    @property
    def instance(self) -> str:
        return self._store.instance

    @property
    def snapshots(self) -> Mapping[str, Any] | None:
        return None if self._keeper is None else {"interval_s": self._interval_s}

    @property
    def restored(self) -> Mapping[str, Any] | None:
        if self._keeper is None:
            return None
        groups = self._restored_groups if self._restored or self._copies else {}  # else they are dropped
        return groups or self._keeper.restored

    def begin(self, incarnation: str, ps: Sequence[str]) -> Work:
        """Makes the work for a coordinator. The store keeps its contents if they belong to that coordinator."""
        if self._keeper is not None:
            self._keeper.begin(incarnation)
        restored, self._restored = self._restored, None
        if restored is not None and restored.incarnation != incarnation:
            restored.close()
            restored = None
        if restored is None:
            self._restored_groups = {}  # their data is dropped
            restored = self._new_copies(incarnation)
        self._copies = restored
        return PsWork(self._store, incarnation, self._copies, self._keeper)

    def close(self) -> None:
        """Takes the last snapshots."""
        if self._keeper is not None:
            self._keeper.close()
        if self._copies is not None:
            self._copies.close_keepers()

    def _restore_newest(self, directory: Path) -> None:
        """Restores the snapshots of the coordinator that took the newest one. Those of others are obsolete."""
        found = sorted(directory.glob("group-*")) if directory.is_dir() else []
        groups = {int(path.name[6:]): path for path in found if re.fullmatch(r"group-\d+", path.name)}
        owners = {path: SnapshotFolder(path).latest_owner() for path in (directory, *groups.values())}
        _, newest = max((owner for owner in owners.values() if owner is not None), default=(0.0, None))
        # If no header can be read, restoring raises the reason.
        is_wanted = {path: owner is None or owner[1] == newest for path, owner in owners.items()}
        self._keeper = SnapshotKeeper(
            self._store, directory, self._interval_s, restores=is_wanted.pop(directory)
        )
        if newest is not None:
            self._restored = self._new_copies(newest)
            for group, path in groups.items():
                if is_wanted[path]:
                    self._restored.restore(group)
            if told := self._restored.restored:
                self._restored_groups = {"incarnation": newest, "groups": told}

    def _new_copies(self, incarnation: str) -> GroupCopies:
        keep = None if self._keeper is None else self._keep
        return GroupCopies(self._index, incarnation, self._connect, self._log_bytes, keep)

    def _keep(self, group: int, restores: bool, copy: GroupCopy) -> SnapshotKeeper:
        assert self._directory is not None
        return SnapshotKeeper(
            copy,
            self._directory / f"group-{group}",
            self._interval_s,
            restores=restores,
            when_due=copy.order_snapshot,
            turn=self._turns[group],
        )

    def _connect(self, index: int, address: str) -> TaskClient:
        return TaskClient(address, self._credentials, f"ps {index}")

    def _take_view(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Applies the coordinator's decision about which servers hold a group. Returns the roles of this task."""
        assert self._copies is not None
        if header["incarnation"] != self._copies.incarnation:  # another coordinator has come in the meantime
            raise StaleCoordinatorError(f"The session of coordinator {header['incarnation']} has ended.")
        self._copies.take(View.of(header["view"]), header["ps"])
        return {"groups": self._copies.described()}

    def _snapshot(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._keeper is not None
        return self._keeper.take(header["epoch"], header.get("kept_epoch", 0))

    def _restore(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._keeper is not None
        if "stop" in header:
            self._store.end_closures(header["incarnation"], header["stop"], header["unfinished"])
        restored = self._keeper.restore(header["epoch"])
        return {"instance": self._store.instance, "restored": restored}


@final
class PsWork:
    """The work of a parameter server: its store, which belongs to one coordinator during the session.

    Args:
      store: The store of the task.
      incarnation: The session id of the coordinator.
      copies: The copies of groups, with ``replication=2``; the store is empty then.
      keeper: The keeper of the store's snapshots, if there are any.
    """

    def __init__(
        self, store: Store, incarnation: str, copies: GroupCopies, keeper: SnapshotKeeper | None = None
    ):
        self._store, self._incarnation, self._copies, self._keeper = store, incarnation, copies, keeper
        store.hello(incarnation)

    def answer(self, message: Message) -> Message:
        """Executes a request."""
        if "group" in message.header:
            return self._copies.answer(message)
        return self._store.answer(message)

    def statistics(self) -> Mapping[str, Any]:
        """Returns the statistics of the store and of its snapshots."""
        held = self._copies if self._copies else self._store
        of_own = {} if self._keeper is None else self._keeper.statistics()
        return {**of_own, **held.statistics()}

    def close(self) -> None:
        """Drops all shards."""
        self._copies.close()
        self._store.leave()


def _traffic(clients: Sequence[TaskClient]) -> dict[str, int]:
    """Returns the number of bytes that clients have received and sent."""
    counts = [client.statistics() for client in clients]
    return {way: sum(count[way] for count in counts) for way in ("bytes_in", "bytes_out")}
