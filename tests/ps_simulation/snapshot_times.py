"""``SnapshotTimes``: when a simulated parameter server writes snapshots, as ``SnapshotKeeper`` has it."""

import math

TICK_S = 1.0


class SnapshotTimes:
    """Writes a snapshot at intervals if something has changed, soon after counters were created, and when it is asked.

    Args:
      process: The process that writes.
      kept: What it writes: has ``progress``, ``holds_counters`` and ``write(epoch)``, a generator.
      interval_s: The time between two snapshots.
      when_due: Called when a snapshot is due.
    """

    def __init__(self, process, kept, interval_s, when_due=None):
        self._process, self._kept, self._interval_s = process, kept, interval_s
        self._when_due = when_due or self.ask
        self._is_asked = self._is_over = self._is_driven = False
        self.is_writing = False
        self.num_written = 0
        self.last = kept.progress
        process.run(self._run())

    def begin(self):
        """Takes snapshots at intervals again, because another coordinator has come."""
        self._is_driven = False

    def ask(self):
        """Writes a snapshot if something has changed, or after the one that is being written."""
        self._is_asked = True
        if not self.is_writing:
            self._process.run(self._write_asked())

    def take(self, epoch=0):
        """Writes a snapshot now."""
        while self.is_writing:
            yield 0.001
        self._is_driven = self._is_driven or epoch > 0
        self.is_writing = True
        try:
            before = self._kept.progress
            yield from self._kept.write(epoch)
            self.last = before
            self.num_written += 1
        finally:
            self.is_writing = False

    def end(self):
        self._is_over = True

    @property
    def has_changed(self):
        return self._kept.progress != self.last and self._kept.holds_counters and not self._is_driven

    def _write_asked(self):
        while self._is_asked and not self._is_over:
            self._is_asked = False
            if self.has_changed:
                yield from self.take()

    def _run(self):
        due, created = self._process.world.now + self._interval_s, self._kept.num_created
        last_created = None
        while not self._is_over:
            yield min(self._interval_s, TICK_S)
            before, created = created, self._kept.num_created
            has_new = created and created == before != last_created and self._interval_s < math.inf
            if has_new or self._process.world.now >= due:
                last_created = created
                if self.has_changed and not self._is_over:
                    self._when_due()
                due = self._process.world.now + self._interval_s
