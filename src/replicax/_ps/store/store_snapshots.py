"""``StoreSnapshots``: writes a store to snapshot files while it serves, and restores it from them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

from replicax._ps.store.ack_patience import LONGEST_WRITE_S
from replicax._ps.store.held_shards import HeldShard
from replicax._ps.store.snapshot_entries import Plan
from replicax._ps.store.snapshot_manifest import Manifest
from replicax._ps.store.snapshots import SnapshotFolder
from replicax._ps.store.store_contents import StoreContents
from replicax._ps.store.unwritten import Unwritten

Moment = Callable[[], AbstractContextManager[Mapping[str, Any]]]
"""A context in which the store does not change, and the data that a snapshot of it has besides. It is short: no I/O."""


def any_moment() -> AbstractContextManager[Mapping[str, Any]]:
    """Returns a moment for a store whose updates are not numbered. It adds no data."""
    return nullcontext({})


@final
class StoreSnapshots:
    """Writes snapshots of a store one at a time, and delays updates until there is memory beside one.

    Args:
      contents: The contents of the store.
      lock: The lock of the contents.
      device: The device of restored values.
    """

    def __init__(self, contents: StoreContents, lock: threading.Lock, device: Any):
        self._contents, self._lock, self._device = contents, lock, device
        self._turn = threading.Lock()
        self._has_room = threading.Condition(lock)
        self._folder: SnapshotFolder | None = None

    def write(
        self, directory: Path, epoch: int, moment: Moment = any_moment, kept_epoch: int = 0
    ) -> dict[str, Any]:
        """See ``Store.snapshot``."""
        with self._turn:
            folder = self._folder_of(directory)
            return self._write(folder, folder.previous(), epoch, moment, kept_epoch)

    def restore(self, directory: Path, epoch: int | None, session: int | None) -> dict[str, Any] | None:
        """See ``Store.restore``."""
        contents = self._contents
        with self._turn:
            folder = self._folder_of(directory)
            found = folder.latest_complete(epoch)
            if found is None:
                return None
            snapshot, refused = found
            folder.last = None
            with contextlib.closing(snapshot):
                with self._lock:
                    contents.make_room(session)  # before the new values are read: memory may not hold both
                shards = {
                    key: HeldShard(key, shard.spec, snapshot.value(shard, self._device), shard.number)
                    for key, shard in snapshot.manifest.shards.items()
                }
            for shard in shards.values():
                shard.changed.begin()
            with self._lock:
                contents.rules.check_session(session)
                contents.take(snapshot.content, shards)
            folder.last = snapshot.manifest
        told = {name: snapshot.content[name] for name in ("epoch", "incarnation", "updates")}
        programs = [program["digest"] for program in snapshot.content["programs"]]
        taken = snapshot.content.get("time")  # earlier versions did not write it
        return {
            **told,
            "file": str(snapshot.path),
            "shards": len(shards),
            "keys": list(shards),
            "programs": programs,
            "refused": refused,
            "age_s": None if taken is None else max(0.0, time.time() - taken),
            "position": snapshot.content.get("position"),
            "num_held_gradients": snapshot.content.get("num_held_gradients", 0),
            "applied": list(contents.rules.windows.window_of(str(told["incarnation"])).extent),
        }

    def wait_for_room(self, keys: Sequence[str]) -> None:
        """Waits until these shards can change beside a snapshot that is being written.

        The caller holds the lock, which is released while it waits.
        """
        until = math.inf  # the deadline of the first snapshot, as another may follow at once
        while (unwritten := self._contents.unwritten) is not None and not unwritten.has_room(keys):
            until = min(until, unwritten.until)
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._has_room.wait(left_s):
                return

    def _folder_of(self, directory: Path) -> SnapshotFolder:
        """Returns the folder of the last snapshot, which the next one continues, or a new object for another folder."""
        if self._folder is None or self._folder.path != directory:
            self._folder = SnapshotFolder(directory)
        return self._folder

    def _write(
        self,
        folder: SnapshotFolder,
        previous: Manifest | None,
        epoch: int,
        moment: Moment,
        kept_epoch: int,
    ) -> dict[str, Any]:
        contents = self._contents
        with moment() as said, self._lock:
            plan = Plan.of(list(contents.shards.values()), previous)
            content = {**contents.described(epoch), **said}
            before = [(shard, shard.changed.begin()) for shard in contents.shards.values()]
            shared = {entry.key for entry in plan.entries if entry.value is not None}
            sizes = {shard.key: shard.num_bytes for shard, _ in before}
            contents.unwritten = Unwritten(sizes, shared, time.monotonic() + LONGEST_WRITE_S)
        try:
            path, num_bytes = folder.write(content, plan, self._is_written, kept_epoch)
        except BaseException:
            with self._lock:
                for shard, counted in before:
                    shard.changed.put_back(counted)
            raise
        finally:
            with self._lock:
                contents.unwritten = None
                self._has_room.notify_all()
        told = {"epoch": epoch, "updates": content["updates"], "is_base": plan.previous is None}
        return {"file": str(path), "bytes": num_bytes, **told}

    def _is_written(self, key: str) -> None:
        with self._lock:
            if self._contents.unwritten is not None:
                self._contents.unwritten.written(key)
                self._has_room.notify_all()
