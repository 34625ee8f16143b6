"""``Names``: names that never repeat in a run, such as instances of stores."""

from collections import Counter


class Names:
    def __init__(self):
        self._counts = Counter()

    def next(self, kind):
        """Returns the next name of a kind: ``"ps 0 store 3"``."""
        self._counts[kind] += 1
        return f"{kind} {self._counts[kind]}"
