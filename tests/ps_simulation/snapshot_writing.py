"""``SnapshotWriting``: writes and restores snapshots of a simulated store: ``KeeperRules`` says when, as in ``SnapshotKeeper``."""

from ps_simulation.turns import Turns
from replicax._ps.store.keeper_rules import KeeperRules
from replicax._src.vocabulary.errors import SnapshotError

TICK_S = 1.0


class SnapshotWriting:
    """Writes a snapshot when it is due, and when it is asked.

    Args:
      process: The process that writes.
      kept: What it writes: has ``progress``, ``holds_counters``, ``write(epoch, kept_epoch)``, a generator, and ``restore(epoch)``.
      interval_s: The time between two snapshots.
      restores: False to ignore the snapshots that are there.
      when_due: Called when a snapshot is due.
      turns: The turns of all that write in this folder.
    """

    def __init__(self, process, kept, interval_s, *, restores=True, when_due=None, turns=None):
        self._process, self._kept, self._interval_s = process, kept, interval_s
        self._when_due = when_due or self.ask
        self._turns = turns or Turns()
        self.rules = KeeperRules(interval_s)
        restored = kept.restore() if restores else None
        self.rules.start(process.world.now, kept.progress, restored)

    def start(self):
        """Begins to look whether a snapshot is due."""
        self._process.run(self._tick())

    @property
    def restored(self):
        return self.rules.restored_in(self._kept.progress.instance)

    def ask(self):
        """Writes a snapshot soon, if something has changed."""
        self.rules.ask()
        self._process.run(self._write_asked())

    def take(self, epoch=0, kept_epoch=0):
        """Writes a snapshot now."""
        request = self.rules.requested_snapshot(epoch) if epoch else None
        yield self._turns.begin()
        try:
            before = self._kept.progress
            if request is not None:
                self.rules.begins(request)
            yield from self._kept.write(epoch, kept_epoch)
            self.rules.wrote(before)
        finally:
            self._turns.end()

    def go_back(self, epoch):
        """Restores the snapshot of an epoch. Returns its description."""
        session, request = self._kept.store.rules.session, self.rules.requested_restore(epoch)
        yield self._turns.begin()
        try:
            self.rules.begins(request)
            yield self._process.scenario.read_s
            self._kept.store.rules.check_session(session)
            restored = self._kept.restore(epoch)
            self.rules.restored(request, self._kept.progress, restored)
        finally:
            self._turns.end()
        return restored

    def _write_asked(self):
        while self.rules.takes_ask():
            try:
                if self.rules.has_changed(self._kept.progress) and self._kept.holds_counters:
                    yield from self.take()
            except SnapshotError as error:
                self.rules.failed(str(error))
            self.rules.done()

    def _tick(self):
        while not self.rules.is_over:
            yield min(self._interval_s, TICK_S)
            progress = self._kept.progress
            is_due = self.rules.tick(self._process.world.now, progress)
            if is_due and self.rules.has_changed(progress) and self._kept.holds_counters:
                self._when_due()
