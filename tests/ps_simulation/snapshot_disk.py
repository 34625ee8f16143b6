"""``Disk``: the snapshots of one simulated parameter server, in memory, with the real rules of their chains."""

from dataclasses import dataclass, field

from replicax._ps.store.snapshot_rules import (
    continued,
    extends,
    is_of_epoch,
    is_whole,
    next_number,
    removable,
    restore_order,
)
from replicax._src.vocabulary.errors import SnapshotError

COUNTER_BYTES = 100
CHANGED_BYTES = 20  # of a counter, in a snapshot that continues another one


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: what ``IntegerStore.described`` returned, its counters, and where it was taken."""

    content: dict
    counters: dict
    epoch: int
    position: tuple | None
    at: float
    chain: tuple


@dataclass
class Disk:
    """Folders of snapshots by their names, ``""`` or ``"group 1"``: for each the snapshots by number."""

    folders: dict = field(default_factory=dict)

    def newest(self, name):
        """Returns the newest snapshot of a folder; None if there is none."""
        found = self.folders.get(name)
        return found[max(found)] if found else None


class SnapshotFiles:
    """A folder as one process has it, as ``SnapshotFolder``.

    Attributes:
      last: The chain of the snapshot that was written or restored last.
    """

    def __init__(self, disk, name):
        self._disk, self._name = disk, name
        self.last = None
        self._num_bases = 0

    @property
    def _files(self):
        return self._disk.folders.setdefault(self._name, {})

    def write(self, content, counters, epoch, position, at, kept_epoch=0):
        """Writes a snapshot, then removes those that are no longer needed."""
        files, number = self._files, next_number(self._files)
        num_bytes = COUNTER_BYTES * len(counters)
        num_new = CHANGED_BYTES * len(counters)
        before = self.last
        highest = max((each.epoch for each in files.values()), default=0)
        assert not epoch or epoch > highest, f"epoch {epoch} is written after epoch {highest}"
        sizes = {each: dict(snapshot.chain)[each] for each, snapshot in files.items()}
        is_base = (
            before is None
            or not is_whole(before, {each for each, _ in before}, sizes)
            or not extends(before, num_new, num_bytes)
        )
        chain = continued(None, number, num_bytes) if is_base else continued(before, number, num_new)
        files[number] = Snapshot(content, counters, epoch, position, at, tuple(chain))
        of_epoch = [
            files[n].chain for n in restore_order(files) if kept_epoch and files[n].epoch == kept_epoch
        ]
        for each in removable(list(files), before, chain, *of_epoch[:1]):
            del files[each]
        self.last = chain
        self._num_bases += is_base
        if self._num_bases >= 2:
            whole = [set(dict(each.chain)) for each in files.values() if set(dict(each.chain)) <= set(files)]
            are_apart = any(one.isdisjoint(other) for one in whole for other in whole)
            assert are_apart, f"if one file is damaged, none of the snapshots {sorted(files)} can be restored"

    def restore(self, epoch=None):
        """Returns the newest intact snapshot, of that epoch if it is given; None if there is none at all."""
        files = self._files
        for number in restore_order(files):
            snapshot = files[number]
            if is_of_epoch(snapshot.epoch, epoch) and all(each in files for each, _ in snapshot.chain):
                self.last, self._num_bases = snapshot.chain, 0  # later files belong to another past
                return snapshot
        if files:
            raise SnapshotError(f"None of the snapshots {sorted(files)} can be restored.")
        return None


def restored_of(snapshot, store, now):
    """Returns the description of a restored snapshot, as ``Store.restore`` does."""
    incarnation = snapshot.content["incarnation"]
    return {
        "incarnation": incarnation,
        "epoch": snapshot.epoch,
        "updates": snapshot.content["updates"],
        "keys": list(snapshot.counters),
        "programs": snapshot.content["programs"],
        "age_s": now - snapshot.at,
        "position": None if snapshot.position is None else list(snapshot.position),
        "num_held_gradients": snapshot.content["num_held_gradients"],
        "applied": list(store.rules.windows.window_of(incarnation).extent),
    }
