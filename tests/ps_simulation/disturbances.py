"""``Disturbances``: which faults hit whom in a run, and when; so a check can say that a loss has a reason."""

from typing import NamedTuple

GAP_S = 5.0  # two disturbances with less time between them are one: nobody may have recovered


class Disturbance(NamedTuple):
    """A fault that hit a process, or the network between two.

    Attributes:
      start, end: When.
      targets: The names of the processes, one or two.
    """

    start: float
    end: float
    targets: frozenset


class Disturbances:
    """All disturbances of a run, in their order.

    >>> faults = Disturbances()
    >>> faults.note(10.0, 20.0, ["ps 0"])
    >>> faults.note(32.0, 3.0, ["ps 0", "coordinator"])
    >>> faults.note(33.0, 3.0, ["ps 0", "worker 1"])
    >>> faults.longest("coordinator", "ps 0"), faults.longest("worker 1", "ps 0"), faults.longest("worker 0", "ps 1")
    (25.0, 26.0, 0.0)
    >>> faults.is_calm(["ps 0"], 36.5, 40.0), faults.is_calm(["ps 0", "ps 1"], 9.0, 12.0)
    (True, False)
    >>> [(start, end, sorted(names)) for start, end, names in faults.periods({"ps 0", "coordinator"}, 3.0)]
    [(10.0, 35.0, ['coordinator', 'ps 0'])]
    """

    def __init__(self):
        self._all = []

    def note(self, start, lasting_s, targets):
        """Records a disturbance."""
        self._all.append(Disturbance(start, start + lasting_s, frozenset(targets)))

    @property
    def has_any(self):
        """True if there was a disturbance."""
        return bool(self._all)

    def of(self, name):
        """Returns the disturbances of a process, and of its connections."""
        return [each for each in self._all if name in each.targets]

    def between(self, one, other, gap_s=GAP_S):
        """Returns the times, each a start and an end, in which two processes could perhaps not talk."""
        times = []
        for start, end, targets in sorted(self._all, key=lambda each: each.start):
            if not targets <= {one, other}:
                continue
            if times and start <= times[-1][1] + gap_s:
                times[-1] = times[-1][0], max(times[-1][1], end)
            else:
                times.append((start, end))
        return times

    def periods(self, names, gap_s):
        """Yields the times in which any of these processes, or the network between them, was disturbed again within a gap.

        Yields:
          A start, an end, and the names of all that was disturbed.
        """
        within = sorted(each for each in self._all if each.targets <= names)
        while within:
            start, end, disturbed = within.pop(0)
            while within and within[0].start <= end + gap_s:
                each = within.pop(0)
                end, disturbed = max(end, each.end), disturbed | each.targets
            yield start, end, disturbed

    def longest(self, one, other, gap_s=GAP_S):
        """Returns the longest time in seconds for which two processes could perhaps not talk."""
        return max((end - start for start, end in self.between(one, other, gap_s)), default=0.0)

    def is_calm(self, names, start, end):
        """True if nothing disturbed any of these processes in that time."""
        return not any(each.start <= end and each.end >= start for name in names for each in self.of(name))
