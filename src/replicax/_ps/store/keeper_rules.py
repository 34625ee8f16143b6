"""The rules that say when a server writes a snapshot, and which requests it executes. Pure: no clock, thread or file.

- Without requests, a snapshot is due at every interval, and soon after the last of some new shards was created. Both
  write only what has changed.
- A coordinator that asks for snapshots of epochs, or to restore one, gets no others. They would delay those, and
  replace the file of the last epoch that all servers have.
- A coordinator sends a request once it has the answer to the one before, or has given that up. So when a newer request
  or another coordinator has come, nobody waits for the earlier request: it is *late*, and is refused. Its snapshot
  would have values of a later moment.
- Epochs only rise. A request with a lower epoch than an earlier one is late, however it came.
- What was restored is described until the store drops it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from replicax._ps.store.log import Position
from replicax._src.program_kit.errors import SnapshotError


class Progress(NamedTuple):
    """Counters that tell whether a store has changed.

    Attributes:
      instance: See ``Store.instance``.
      num_changes: A number that differs after every change of a value.
      num_created: The number of shards ever created.
      position: The position of the last update, if updates are numbered.
    """

    instance: str
    num_changes: int
    num_created: int
    position: Position | None = None


@final
@dataclass(frozen=True)
class SnapshotRequest:
    """A coordinator's request to write or to restore the snapshot of an epoch.

    Attributes:
      epoch: The number of the epoch.
      number: The place of the request among all that arrived.
    """

    epoch: int
    number: int


@final
class KeeperRules:
    """The state of one snapshot keeper. Not thread-safe.

    Args:
      interval_s: The seconds between two snapshots; ``math.inf`` for none at intervals.

    Attributes:
      is_over: True once no snapshot at intervals is written any more.
      num_written: The number of snapshots that were written.
      error: The problem of the last snapshot at an interval; empty if it was written.
    """

    def __init__(self, interval_s: float):
        self._interval_s = interval_s
        self.is_over = False
        self.num_written = 0
        self.error = ""
        self._last: Progress | None = None  # the progress at the newest snapshot
        self._due = math.inf
        self._num_created = 0
        self._is_asked = self._is_writing = self._is_driven = False
        self._owner: str | None = None
        self._num_requests = self._begun_at = self._highest_epoch = 0
        self._restored: tuple[str, Mapping[str, Any]] | None = None

    def start(self, now: float, progress: Progress, restored: Mapping[str, Any] | None) -> None:
        """Begins, with a store that may have been restored from a snapshot that is described."""
        self._due, self._num_created = now + self._interval_s, progress.num_created
        self._note_restored(progress, restored)

    def begin(self, incarnation: str) -> None:
        """Records that a coordinator begins. Snapshots are written at intervals again, until it asks for epochs."""
        self._is_driven = False
        self._num_requests += 1  # all earlier requests are late now
        self._begun_at = self._num_requests
        if incarnation != self._owner:
            self._owner, self._highest_epoch = incarnation, 0
        if self._restored is not None and self._restored[1]["incarnation"] != incarnation:
            self._restored = None

    def end(self) -> None:
        """Ends snapshots at intervals."""
        self.is_over = True

    # --- at intervals -----------------------------------------------------------------------------------------

    def tick(self, now: float, progress: Progress) -> bool:
        """True if a snapshot is due. It is written if ``has_changed``."""
        before, self._num_created = self._num_created, progress.num_created
        assert self._last is not None
        has_new = self._num_created == before != self._last.num_created and self._interval_s < math.inf
        if not has_new and now < self._due:
            return False
        self._due = now + self._interval_s
        return True

    def ask(self) -> None:
        """Records that a snapshot shall be written if something has changed."""
        self._is_asked = True

    def takes_ask(self) -> bool:
        """True if a snapshot was asked for. It is being written then, until ``done``."""
        if self.is_over or not self._is_asked:
            return False
        self._is_writing, self._is_asked = True, False  # another request may come while it writes
        return True

    def done(self) -> None:
        """Records that the snapshot that ``takes_ask`` began is written, or that there was nothing to write."""
        self._is_writing = False

    @property
    def is_writing(self) -> bool:
        """True from ``ask`` until the snapshot is written."""
        return self._is_asked or self._is_writing

    def has_changed(self, progress: Progress) -> bool:
        """True if a snapshot at an interval, if there is a shard, would have something that the newest one lacks."""
        assert self._last is not None
        return not self._is_driven and progress[:2] != self._last[:2]

    def has_moved(self, progress: Progress) -> bool:
        """True if a last snapshot of all shall be written, unless there is no shard.

        A new position counts as a change: with it, a server that restarts lacks only the later updates.
        """
        assert self._last is not None
        is_behind = not self._is_driven and progress.position != self._last.position
        return is_behind or self.has_changed(progress)

    # --- requests ---------------------------------------------------------------------------------------------

    def requested_snapshot(self, epoch: int) -> SnapshotRequest:
        """Records that a request to write the snapshot of an epoch has arrived.

        Raises:
          SnapshotError: It is late.
        """
        if epoch < self._highest_epoch:
            raise SnapshotError(
                f"The request for a snapshot of epoch {epoch} is late: one of epoch {self._highest_epoch} has arrived "
                "before. Ask again with a higher epoch."
            )
        self._highest_epoch = epoch
        return self._request(epoch)

    def requested_restore(self, epoch: int) -> SnapshotRequest:
        """Records that a request to restore the snapshot of an epoch has arrived."""
        return self._request(epoch)

    def begins(self, request: SnapshotRequest) -> None:
        """Checks a request whose turn has come, because another snapshot was being written when it arrived. From now on
        only requests write snapshots.

        Raises:
          SnapshotError: It is late.
        """
        if request.number != self._num_requests:
            raise _late(request)
        self._is_driven = True

    def _request(self, epoch: int) -> SnapshotRequest:
        self._num_requests += 1
        return SnapshotRequest(epoch, self._num_requests)

    # --- results ----------------------------------------------------------------------------------------------

    def wrote(self, before: Progress) -> None:
        """Records a snapshot that was written, with the progress before it."""
        self._last, self.error = before, ""
        self.num_written += 1  # last: who waits for it may read the error

    def failed(self, error: str) -> bool:
        """Records that a snapshot at an interval was not written. Returns True if the error is new, to be logged."""
        is_new = not self.error and not self.is_over
        self.error = error
        return is_new

    def restored(
        self, request: SnapshotRequest, progress: Progress, restored: Mapping[str, Any] | None
    ) -> None:
        """Records that a request has restored a snapshot, described as by ``Store.restore``.

        Raises:
          SnapshotError: A coordinator has come meanwhile, and the store has dropped the snapshot's values again.
        """
        if request.number < self._begun_at:
            raise _late(request)
        self._note_restored(progress, restored)

    def restored_in(self, instance: str) -> Mapping[str, Any] | None:
        """Returns the description of the snapshot that was restored last.

        None if the store is another instance now: it has dropped the snapshot's values.
        """
        if self._restored is None or self._restored[0] != instance:
            return None
        return self._restored[1]

    def _note_restored(self, progress: Progress, restored: Mapping[str, Any] | None) -> None:
        self._last = progress
        self._restored = None if restored is None else (progress.instance, restored)
        if restored is not None and self._owner is None:
            self._owner = restored["incarnation"]
            self._highest_epoch = max(self._highest_epoch, restored["epoch"])


def _late(request: SnapshotRequest) -> SnapshotError:
    return SnapshotError(
        f"The request for the snapshot of epoch {request.epoch} is late: a newer request has arrived, or another "
        "coordinator. Nothing was written or restored. Ask again with a higher epoch."
    )
