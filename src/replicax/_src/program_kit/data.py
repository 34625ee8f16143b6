"""Datasets on a worker: opened, read ahead, as arrays that a program or another process may get."""

from __future__ import annotations

from replicax._src.devices.split import InputContext, InputOptions
from replicax._src.input.dataset import Optional, OutOfRangeError
from replicax._src.input.host_elements import HostElements, host_value
from replicax._src.input.prefetch import Prefetcher
from replicax._src.input.sources import cut_rows
from replicax._src.user.tensorflow_values import python_function_of

__all__ = [
    "HostElements",
    "InputContext",
    "InputOptions",
    "Optional",
    "OutOfRangeError",
    "Prefetcher",
    "cut_rows",
    "host_value",
    "python_function_of",
]
