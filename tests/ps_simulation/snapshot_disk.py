"""``Disk``: the snapshots of one simulated parameter server, in memory. It outlives the server's processes."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: what ``IntegerStore.described`` returned, its counters, and where it was taken."""

    content: dict
    counters: dict
    epoch: int = 0
    position: tuple | None = None
    at: float = 0.0


NUM_KEPT = 2  # as few as ``SnapshotFolder`` keeps, when each snapshot is a base


@dataclass
class Disk:
    """Folders of snapshots, oldest first, by their names: ``""`` or ``"group 1"``."""

    folders: dict = field(default_factory=dict)

    def write(self, folder, snapshot):
        kept = self.folders.setdefault(folder, [])
        kept.append(snapshot)
        del kept[:-NUM_KEPT]

    def newest(self, folder, epoch=None):
        """Returns the newest snapshot of a folder, of that epoch if it is given; None if there is none."""
        found = [each for each in self.folders.get(folder, ()) if epoch is None or each.epoch == epoch]
        return found[-1] if found else None


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
        "applied": list(store.windows.window_of(incarnation).extent),
    }
