"""``SteppedProgram``: a step that can be repeated, and the types of its sums. ``Survivors`` runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from replicax._src.fault_tolerance.first_step import StepDigests

RoundArrays = Sequence[np.ndarray]
"""The values of the buffers of one round: flat arrays."""

CombineRound = Callable[[int, Sequence[RoundArrays]], RoundArrays]
"""Combines the arrays of one round over all replicas, in the order of the replicas' numbers.

It gets the index of the round, and the arrays of each replica of this process, which it must not change. It may raise
any error. The arrays that it returns must keep their values until the first round of the next step.
"""


class SteppedProgram(Protocol):
    """One step, with its batch."""

    @property
    def reductions(self) -> Sequence[Sequence[str]]:
        """Of each round, the reduction of each of its buffers: ``"sum"``, ``"max"`` or ``"min"``. Empty if the step has
        no rounds, because every process computes the whole batch.
        """
        ...

    @property
    def num_rows(self) -> int | None:
        """The number of rows of the batch, of all replicas. None if the step has no batch."""
        ...

    def digests(self) -> StepDigests:
        """Returns digests of the code, and of all that ``sums`` and ``update`` would read now. It changes nothing."""
        ...

    def sums(self, replicas: Sequence[int], combine: CombineRound) -> list[RoundArrays]:
        """Runs the rounds for some replicas, and returns their combined arrays. It changes nothing. ``combine`` may end
        it with an error; then it is called again, perhaps with other replicas.
        """
        ...

    def update(self, sums: Sequence[RoundArrays]) -> Any:
        """Changes the state with the combined arrays of all rounds, and returns the outputs."""
        ...
