"""Routines: what a process does one step after another, as a generator that yields what it waits for.

A routine yields a ``Reply``, and gets its value or its error, or a number of seconds. It ends with its process.
"""

import functools
from collections.abc import Generator

from replicax._src.vocabulary.errors import ReplicaxError


class Reply:
    """An outcome that comes later: a value or an error."""

    __slots__ = ("_then", "error", "is_done", "value")

    def __init__(self):
        self.is_done, self.value, self.error, self._then = False, None, None, []

    def settle(self, value=None, error=None):
        """Sets the outcome. Only the first one counts."""
        if not self.is_done:
            self.is_done, self.value, self.error = True, value, error
            then, self._then = self._then, []
            for each in then:
                each()

    def then(self, function):
        """Calls a function when there is an outcome, or now."""
        if self.is_done:
            function()
        else:
            self._then.append(function)


class Routine:
    """A generator that runs in a process. Its ``result`` is what it returns, or the error that it raises."""

    def __init__(self, process, generator: Generator):
        self._process, self._generator = process, generator
        self._waits_for = None
        self.result = Reply()
        self._run(None)

    def stop(self):
        """Ends the routine where it is. Nobody gets its result."""
        self._waits_for = self
        self._generator.close()

    def _run(self, reply):
        while True:
            self._waits_for = None
            try:
                if reply is None:
                    awaited = next(self._generator)
                elif reply.error is None:
                    awaited = self._generator.send(reply.value)
                else:
                    awaited = self._generator.throw(reply.error.with_traceback(None))
            except StopIteration as stop:
                self.result.settle(stop.value)
                return
            except ReplicaxError as error:  # others are faults of the run, and nobody's answer
                self.result.settle(error=error)
                return
            if self._waits_for is self:  # it was stopped by what it did
                return
            if not isinstance(awaited, Reply):
                reply = Reply()
                self._process.after(awaited, reply.settle)
            else:
                reply = awaited
            if not reply.is_done:
                self._waits_for = reply
                reply.then(functools.partial(self._resume, reply))
                return

    def _resume(self, reply):
        if self._waits_for is reply:
            self._run(reply)


def settled(value=None):
    """Returns a reply that has come."""
    reply = Reply()
    reply.settle(value)
    return reply
