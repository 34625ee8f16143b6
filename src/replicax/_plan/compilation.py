"""A program compiled for hardware, and its memory according to the compiler."""

from __future__ import annotations

import contextlib
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import jax

from replicax._src.devices.hardware import Chip, Hardware
from replicax._src.devices.plan import Memory
from replicax._src.jax_internals import jax_compat
from replicax._src.strategies.lower_method import StepProgram
from replicax._src.vocabulary.errors import PlanError

_OUT_OF_MEMORY = re.compile(
    r"\((?P<needed>[\d.]+)(?P<unit>[KMGT]?)\) exceeds available HBM \((?P<limit>[\d.]+)(?P<of>[KMGT]?)\)"
)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Compilation:
    """A program compiled for a topology.

    Attributes:
      jaxpr: The jaxpr of the full program.
      text: The compiled program as HLO; empty if the compiler failed.
      lower_s, compile_s: The seconds that lowering and compiling took.
    """

    jaxpr: Any
    memory: Memory
    text: str
    lower_s: float
    compile_s: float


def compiled_for(hardware: Hardware, program: StepProgram) -> Compilation:
    """Compiles the program of a step for this hardware. Call it inside ``program_on``.

    Raises:
      PlanError: The compiler fails for a reason other than memory.
    """
    start = time.monotonic()
    traced = program.trace()
    lowered = traced.lower()
    lower_s = time.monotonic() - start
    start = time.monotonic()
    # Programs for absent devices cannot be loaded from the cache. The next plan would warn and compile again.
    is_here = hardware.chip.kind == "cpu"
    try:
        with contextlib.nullcontext() if is_here else jax_compat.not_in_persistent_cache():
            executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = _OUT_OF_MEMORY.search(str(error))
        if found is None:
            raise PlanError(f"The compiler for {hardware.name} failed: {error}") from error
        needed, limit = _bytes(found["needed"], found["unit"]), _bytes(found["limit"], found["of"])
        arguments = argument_bytes(program)
        memory = Memory(arguments, 0, 0, needed, max(arguments, needed), limit, is_exact=False)
        return Compilation(traced.jaxpr, memory, "", lower_s, time.monotonic() - start)
    memory = _memory(executable.memory_analysis(), hardware.chip)
    return Compilation(traced.jaxpr, memory, executable.as_text() or "", lower_s, time.monotonic() - start)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _memory(analysis: Any, chip: Chip) -> Memory:
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    outputs, donated = analysis.output_size_in_bytes, analysis.alias_size_in_bytes
    total = arguments + temporaries + outputs - donated
    # The CPU compiler's peak omits temporaries (jax 0.10).
    peak = total if chip.kind == "cpu" else (analysis.peak_memory_in_bytes or total)
    return Memory(arguments, outputs, donated, temporaries, peak, chip.memory_bytes)


def argument_bytes(program: StepProgram) -> int:
    """Returns the bytes of the arguments, including variables, on one device, from their shapes."""
    return sum(bytes_on_device(leaf) for leaf in jax.tree_util.tree_leaves(program.operands))


def bytes_on_device(described: Any) -> int:
    """Returns the bytes of a described array on one device."""
    shape = described.sharding.shard_shape(described.shape) if described.sharding else described.shape
    return math.prod(shape) * described.dtype.itemsize
