"""Compiled update programs, which run in place on the values of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import jax
import numpy as np
from jax import export

from replicax._ps.programs.programs import NamedRows, UpdateProgram
from replicax._ps.store.held_values import Spec, is_wide, with_dtypes
from replicax._src.program_kit.errors import InvalidArgumentError
from replicax._src.program_kit.own_process import export_platform

_MIN_CHECKED_BYTES: Final = 1 << 20


@final
class CompiledUpdate:
    """An update program, ready to run on one device.

    Attributes:
      program: The program that was compiled.
      state: The shape and dtype of each value of the program's state, in order.
      operands: The shape and dtype of each operand.
      results: The shape and dtype of each result. A program without state returns the initial value of a shard.

    Raises:
      InvalidArgumentError: The blob is not a program, or not one that updates shards on this device.
    """

    def __init__(self, program: UpdateProgram, device: Any):
        self.program = program
        exported = _deserialized(program, device)
        inputs, results = _specs(exported.in_avals), _specs(exported.out_avals)
        _check(program, inputs, results)
        num_state = len(program.state)
        self.state, self.operands, self.results = inputs[:num_state], inputs[num_state:], results
        self._wide = [dtype for _, dtype in (*inputs, *results) if is_wide(dtype)]
        with with_dtypes(self._wide):
            self._run = _compiled(exported, inputs, program.written, device)
        analysis = self._run.memory_analysis()
        self._temporary_bytes = getattr(analysis, "temp_size_in_bytes", 0)

    def rows(self, operands: Sequence[np.ndarray]) -> list[list[np.ndarray] | None]:
        """Returns for each written shard the numbers of the rows that may change; None if any may."""
        if not self.program.rows:
            return [None] * len(self.program.written)
        return [
            None if named is None else [_numbers(each, operands[each.operand]) for each in named]
            for named in self.program.rows
        ]

    def check_operands(self, operands: Sequence[np.ndarray]) -> None:
        """Raises InvalidArgumentError unless the program takes these operands."""
        got = [(value.shape, value.dtype) for value in operands]
        if got != self.operands:
            raise InvalidArgumentError(
                f"Program {self.program.digest} takes the operands {_texts(self.operands)}, got {_texts(got)}. "
                "Send operands of the shapes and dtypes that the program was exported for, or export another program."
            )

    def __call__(self, state: Sequence[jax.Array], operands: Sequence[np.ndarray]) -> list[jax.Array]:
        """Returns the results when they are ready. They take the memory of the written state, whose old values are
        deleted.

        Raises:
          MemoryError: There is no memory for temporary values; nothing has changed.
        """
        self._check_memory()
        with with_dtypes(self._wide):
            results = self._run(*state, *operands)
        results[0].block_until_ready()  # all are ready together; a failure on a CPU is raised here
        return results

    def _check_memory(self) -> None:
        # XLA loses the buffers that it would write if it runs out of memory (jax 0.10), so check the memory first.
        if self._temporary_bytes < _MIN_CHECKED_BYTES:
            return
        try:
            np.empty(self._temporary_bytes, np.uint8)
        except MemoryError:
            raise MemoryError(
                f"Program {self.program.digest} needs {self._temporary_bytes} bytes of temporary memory, more "
                "than is free. Nothing was updated. Use more parameter servers, or smaller shards."
            ) from None


def _deserialized(program: UpdateProgram, device: Any) -> export.Exported:
    try:
        exported = export.deserialize(bytearray(program.blob))
    except ImportError:
        raise  # the message of an ImportError names what is missing
    except Exception as error:
        raise InvalidArgumentError(
            f"{len(program.blob)} bytes are not a program: {error}. "
            "Send the output of jax.export, of a version of JAX that this one reads."
        ) from error
    platform = export_platform(device)
    if platform not in exported.platforms or exported.nr_devices != 1:
        raise InvalidArgumentError(
            f"An update program for {exported.nr_devices} devices of {', '.join(exported.platforms)} cannot run on "
            "one "
            f'of {platform}. Export it with platforms=["{platform}"].'
        )
    return exported


def _specs(avals: Sequence[Any]) -> list[Spec]:
    return [(tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals]


def _check(program: UpdateProgram, inputs: Sequence[Spec], results: Sequence[Spec]) -> None:
    expected = [inputs[position] for position in program.written]
    is_initial = not inputs and len(results) == 1
    if not is_initial and (list(results) != expected or not expected):
        raise InvalidArgumentError(
            f"An update program returns {_texts(results)}, but the shards that it writes are "
            f"{_texts(expected)}. It has to return one new value for each of these, in order, with its shape "
            "and dtype, and to write at least one."
        )


def _numbers(named: NamedRows, operand: np.ndarray) -> np.ndarray:
    numbers = operand[..., 0] if named.are_indices else operand
    return numbers if not named.start else numbers.astype(np.int64) - named.start


def _compiled(exported: export.Exported, inputs: Sequence[Spec], written: Sequence[int], device: Any) -> Any:
    def run(*flat: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(exported.in_tree, flat)
        return jax.tree.leaves(exported.call(*args, **kwargs))

    here = jax.sharding.SingleDeviceSharding(device)
    avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in inputs]
    jitted = jax.jit(run, donate_argnums=tuple(written), out_shardings=here)
    return jitted.lower(*avals).compile()


def _texts(specs: Sequence[Spec]) -> str:
    return "[" + ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in specs) + "]"
