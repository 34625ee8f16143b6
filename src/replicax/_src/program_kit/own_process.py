"""This process as a task: its devices and threads before JAX starts, what it counts, how it ends."""

from __future__ import annotations

from replicax._src.cluster.counters import Span, counters
from replicax._src.cluster.figures import vitals
from replicax._src.cluster.progress import compiling
from replicax._src.devices.task_process import prepare_own_process
from replicax._src.jax_internals.jax_compat import Device, end_beside_programs, export_platform
from replicax._src.preemption.unfinished import join_before_saves

__all__ = [
    "Device",
    "Span",
    "compiling",
    "counters",
    "end_beside_programs",
    "export_platform",
    "join_before_saves",
    "prepare_own_process",
    "vitals",
]
