"""Reports each program on an array that spans processes that runs outside of ``Peers.running``, and its caller.

Programs of the tests import it first. Only ``Peers.running`` agrees on the order of programs. The collectives of another
program may meet those of a different one, and both get wrong values without an error.
"""

import contextlib
import os
import sys
import threading

import jax
from jax._src import pjit
from jax._src.interpreters import pxla

from replicax._src.cluster.peers import Peers
from replicax.testing import report

JAX = os.path.dirname(jax.__file__) + os.sep
NAME = "programs_without_an_order"
_thread = threading.local()
_found = {}
_running, _call = Peers.running, pxla.ExecuteReplicated.__call__


@contextlib.contextmanager
def running(self, *args, **kwargs):
    with _running(self, *args, **kwargs):
        _thread.is_in_order = True
        try:
            yield
        finally:
            _thread.is_in_order = False


def call(self, *args):
    if any(map(is_in_parts, args)) and not getattr(_thread, "is_in_order", False):
        _found[f"{self.name}, called by {caller()}"] = True
        report(**{NAME: list(_found)})
    return _call(self, *args)


def is_in_parts(value):
    """True if no process has all of an array. Programs on replicated arrays need no collectives."""
    return isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)


def caller():
    """The lines outside of JAX, from the innermost on."""
    lines, frame = [], sys._getframe(2)
    while frame is not None and len(lines) < 5:
        if not frame.f_code.co_filename.startswith((JAX, contextlib.__file__)):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


def watch():
    Peers.running = running
    pxla.ExecuteReplicated.__call__ = call
    pjit._get_fastpath_data = lambda *args: None  # otherwise a repeated call would not come by


watch()
