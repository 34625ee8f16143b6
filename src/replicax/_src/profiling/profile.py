"""``rx.profile``: a trace of JAX's profiler in which steps, replicas and collectives have names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, final

import jax

from replicax._src.cluster.peers import joined_peers
from replicax._src.tracing import profile_names as names
from replicax._src.vocabulary.errors import ContextError
from replicax._src.vocabulary.options import path_of, whole_number


@final
class Profile:
    """A running or finished trace.

    Attributes:
      logdir: The folder of this process's files. In a cluster each process has a folder of its own.
    """

    def __init__(self, logdir: str, of_trace: names.Names):
        self.logdir, self._names = logdir, of_trace

    def step(self, number: int, name: str = "step") -> contextlib.AbstractContextManager[None]:
        """Returns a context for one step. Programs that run inside are parts of it, and not steps of their own.

        Args:
          number: The number of the step.
          name: The name of steps of this kind.
        """
        return self._names.step(name, whole_number("number", number, least=0))


@contextlib.contextmanager
def profile(logdir: str | os.PathLike[str], *, python: bool = False, **options: Any) -> Iterator[Profile]:
    """Records a trace of this process with JAX's profiler, for TensorBoard's profile page, XProf or Perfetto.

    Use it in ``with``. Start it after a few steps, so that the trace does not consist of compilation, and end it a
    few steps later. It does not wait for running steps at the end, so fetch the last result inside, or its steps
    are missing. In the trace

    - each program that ``run``, ``rx.function``, ``run_steps`` and Keras's ``fit`` start is a step, with the
      function's name and a number (``StepTraceAnnotation``); ``with profile.step(n):`` joins several into one;
    - ``replica 0`` and so on show the device of each replica;
    - operations of a replica function have ``replica`` in their names, and collectives have their purpose:
      ``all_reduce``, ``all_gather``, ``sum_gradients``, ``share_variables``, ``sum_together``.

    In a cluster all processes may call it, or only some. With parameter servers the steps are in the workers'
    traces.

    Args:
      logdir: A folder. It is created if necessary.
      python: True to record calls of Python functions too, which takes time and space.
      **options: Options of ``jax.profiler.trace``, such as ``create_perfetto_trace=True``.

    Yields:
      A ``Profile``.

    Raises:
      ContextError: A trace is already running.
      InvalidArgumentError: ``logdir`` is not a path.
    """
    if names.current is not None:
        raise ContextError(
            "rx.profile was entered inside rx.profile, but JAX's profiler records only one trace at a time."
        )
    folder = path_of(logdir, "logdir", "logs/profile")
    peers = joined_peers()
    if peers is not None:
        folder = os.path.join(folder, peers.names[peers.number].replace(" ", "_"))
    chosen = jax.profiler.ProfileOptions()
    chosen.python_tracer_level = int(python)
    of_trace = names.Names()
    with jax.profiler.trace(folder, profiler_options=chosen, **options):
        names.set_current(of_trace)
        try:
            yield Profile(folder, of_trace)
        finally:
            names.set_current(None)
