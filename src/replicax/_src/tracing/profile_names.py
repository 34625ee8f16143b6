"""Names of steps and replicas in the traces of JAX's profiler."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import final

import jax

from replicax._src.devices.named_devices import device_name
from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat


@final
class Names:
    """The names of one trace."""

    def __init__(self) -> None:
        self._num_steps: collections.Counter[str] = collections.Counter()
        self._told: set[Topology] = set()
        self._is_in_step = False

    @contextlib.contextmanager
    def launch(self, name: str, topology: Topology) -> Iterator[None]:
        """Context around the launch of a program: counts it as a step of its name, unless it is part of a step."""
        self._tell_replicas(topology)
        if self._is_in_step:
            with jax.profiler.TraceAnnotation(name):
                yield
        else:
            number = self._num_steps[name]
            self._num_steps[name] += 1
            with jax.profiler.StepTraceAnnotation(name, step_num=number):
                yield

    @contextlib.contextmanager
    def step(self, name: str, number: int) -> Iterator[None]:
        """Context around a step that the user numbers."""
        before, self._is_in_step = self._is_in_step, True
        try:
            with jax.profiler.StepTraceAnnotation(name, step_num=number):
                yield
        finally:
            self._is_in_step = before

    def _tell_replicas(self, topology: Topology) -> None:
        """Writes one event per replica, once, that names its device, because programs of one name run on all
        replicas.
        """
        if topology in self._told:
            return
        self._told.add(topology)
        for r in topology.local_replicas:
            for device in topology.grid[r]:
                ordinal = jax_compat.local_number(device)
                with jax.profiler.TraceAnnotation(
                    f"replica {r}", device=device_name(device), device_ordinal=ordinal
                ):
                    pass


# The names of the current trace; None if no trace is being made.
current: Names | None = None


def launching(name: str, topology: Topology) -> contextlib.AbstractContextManager[None]:
    """Context around the launch of a program, which names it in the trace that is being made, if any."""
    return contextlib.nullcontext() if current is None else current.launch(name, topology)


def set_current(names: Names | None) -> None:
    """Sets the names of the trace that starts; None when it ends."""
    global current
    current = names
