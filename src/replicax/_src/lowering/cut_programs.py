"""Programs of all devices, none of which communicates, and the sums on the hosts between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from replicax._src.devices.sums_of_processes import SumsOfProcesses
from replicax._src.fault_tolerance.stepped_program import RoundArrays
from replicax._src.lowering.round_programs import RoundPrograms


@final
class CutPrograms:
    """The programs of one program with rounds of sums.

    Args:
      programs: The programs, of all devices.
      name: Their name for messages.
      sums: The sums of the processes.
    """

    def __init__(self, programs: RoundPrograms, name: str, sums: SumsOfProcesses):
        self._programs, self._name, self._sums = programs, name, sums

    @contextlib.contextmanager
    def followed(self, operands: Sequence[Any]) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """Runs all programs but the last one, and gives that one and its operands, to run inside of the context.

        Args:
          operands: The operands of the program. The caller drops those that the last program may overwrite.

        Raises:
          ClusterFailureError: Another process is gone.
        """
        programs = self._programs
        with self._sums.program(self._name, programs.digest):
            slots = programs.slots(operands)
            programs.run_rounds_on_all(slots, self._combine)
            last = programs.last(slots)
            del slots
            yield last

    def _combine(self, round_index: int, parts: Sequence[RoundArrays]) -> RoundArrays:
        buffers = self._programs.rounds[round_index]
        return [
            self._sums.all_reduce(buffer.reduction, [arrays[at] for arrays in parts])
            for at, buffer in enumerate(buffers)
        ]
