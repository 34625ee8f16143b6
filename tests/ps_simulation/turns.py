"""``Turns``: a lock for routines, which get it in the order in which they ask."""

from collections import deque

from ps_simulation.routines import Reply, settled


class Turns:
    """One routine at a time has the turn. It calls ``end`` in a ``finally``."""

    def __init__(self):
        self._is_taken, self._waiting = False, deque()

    def begin(self):
        """Returns a reply that comes when it is the caller's turn."""
        if not self._is_taken:
            self._is_taken = True
            return settled()
        reply = Reply()
        self._waiting.append(reply)
        return reply

    def give_up(self, turn):
        """Ends what ``begin`` has returned, whether it has come or not."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        else:
            self.end()

    def end(self):
        if self._waiting:
            self._waiting.popleft().settle()
        else:
            self._is_taken = False
