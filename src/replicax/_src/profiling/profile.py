"""``rx.profile``: a trace of JAX's profiler in which steps, replicas and collectives have names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, final

import jax

from replicax._src.cluster.peers import joined_peers
from replicax._src.errors import ContextError
from replicax._src.options import path_of, whole_number
from replicax._src.tracing import profile_names as names


@final
class Profile:
    """A trace that is being made, or has been.

    Attributes:
      logdir: Where this process's files are: in a cluster each process has a folder of its own.
    """

    def __init__(self, logdir: str, of_trace: names.Names):
        self.logdir, self._names = logdir, of_trace

    def step(self, number: int, name: str = "step") -> contextlib.AbstractContextManager[None]:
        """Around one step: programs that are started inside are parts of it, not steps of their own.

        Args:
          number: Of the step.
          name: Of steps of this kind.
        """
        return self._names.step(name, whole_number("number", number, least=0))


@contextlib.contextmanager
def profile(logdir: str | os.PathLike[str], *, python: bool = False, **options: Any) -> Iterator[Profile]:
    """Inside, JAX's profiler records what this process does: for TensorBoard's profile page, XProf or Perfetto.

    Begin it after a few steps, for compiling would fill it, and end it after some more. When it ends it waits for
    nothing: fetch the last result inside, or its steps are missing. In the trace

    - each program that ``run``, ``rx.function``, ``run_steps`` and Keras's ``fit`` start is a step, with the function's
      name and a number (``StepTraceAnnotation``); ``with profile.step(n):`` makes one of several;
    - ``replica 0`` and so on say on which device each replica is;
    - operations of a replica function have ``replica`` in their names, and those of collectives what they are for:
      ``all_reduce``, ``all_gather``, ``sum_gradients``, ``share_variables``, ``sum_together``.

    Of a cluster every process may call it, or only some; with parameter servers the steps are in the workers.

    Args:
      logdir: A folder, made if need be.
      python: Whether calls of Python functions are recorded too, which takes time and space.
      **options: Of ``jax.profiler.trace``: ``create_perfetto_trace=True``, say.

    Yields:
      A ``Profile``.

    Raises:
      ContextError: There is one already.
      InvalidArgumentError: `logdir` is no path.
    """
    if names.current is not None:
        raise ContextError(
            "rx.profile was entered inside of rx.profile: JAX's profiler makes one trace at a time."
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
