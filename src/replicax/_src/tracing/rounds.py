"""A replica's program as rounds: computations, arrays to combine over the replicas, computations, and so on.

``segments_of`` cuts it where the arrays are combined. Then each segment can be a program of its own, and the caller
exchanges the arrays between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from replicax._src.tracing.equations import variables
from replicax._src.tracing.flat import Atom

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Computation:
    """An operation of one replica, between numbered values.

    Attributes:
      evaluate: Maps the replica's operands to its results.
      invariant: The computation of the results that are equal on all replicas, from operands that are; None if there is
        no such result.
    """

    operands: Sequence[Atom]
    results: Sequence[int]
    evaluate: Callable[[Sequence[Any]], Sequence[Any]]
    invariant: Computation | None = None

    @property
    def is_constant(self) -> bool:
        """True if it has no operands but literals."""
        return not variables(self.operands)


@dataclass(frozen=True)
class Combined:
    """A value that is the sum, maximum or minimum of one array of each replica.

    Attributes:
      part: The number of the replica's array.
      result: The number of the value, which is equal on all replicas.
    """

    part: int
    result: int
    reduction: Reduction


@dataclass(frozen=True)
class RoundsOfSums:
    """The program of a replica.

    Attributes:
      inputs: The numbers of the operands.
      consts: The constant values, by number.
      computations: All computations, in an order that respects their operands.
      rounds: For each round, the values that are combined then.
      outputs: The results.
    """

    inputs: Sequence[int]
    consts: Mapping[int, Any]
    computations: Sequence[Computation]
    rounds: Sequence[Sequence[Combined]]
    outputs: Sequence[Atom]


@dataclass
class Segment:
    """A part of the program that runs without the other replicas.

    Attributes:
      computations: Its computations, in order.
      takes: The numbers of the values that it takes: operands of the program, combined values, and values that earlier
        segments pass on.
      passes: The numbers of the values that it passes on to later segments.
    """

    computations: list[Computation] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)


def segments_of(program: RoundsOfSums) -> list[Segment]:
    """Cuts a program of C rounds into C + 1 segments. Each of the first C computes the arrays of one round.

    A computation is in the first segment that needs it. One that no round needs, such as the update of a variable, is
    in the last segment. That one takes no value that an earlier segment computed and that is equal on all replicas: it
    computes such values again. So the last segment of a program whose results are equal on all replicas needs only
    operands and combined values, and a process can run it for sums that others have computed.
    """
    return _Cut(program).segments


class _Cut:
    def __init__(self, program: RoundsOfSums):
        self._program = program
        self._producers = {
            value: index for index, each in enumerate(program.computations) for value in each.results
        }
        self._segment_of: dict[int, int] = {}  # of each computation that is in one
        self.segments = [Segment() for _ in range(len(program.rounds) + 1)]
        for index, combined in enumerate(program.rounds):
            self._fill(index, [each.part for each in combined])
        self._fill(len(program.rounds), program.outputs)

    def _fill(self, segment_index: int, targets: Iterable[Atom]) -> None:
        segment, is_last = self.segments[segment_index], segment_index == len(self._program.rounds)
        chosen: dict[int, Computation] = {}
        taken: set[int] = set()
        missing = variables(targets)
        while missing:
            value = missing.pop()
            producer = self._producers.get(value)
            if producer is None:
                if value not in self._program.consts:
                    taken.add(value)
                continue
            if producer in chosen and value in chosen[producer].results:
                continue
            computation = self._program.computations[producer]
            first_segment = self._segment_of.get(producer, segment_index)
            invariant = computation.invariant
            if is_last and invariant is not None and value in invariant.results:
                computation = invariant
            elif first_segment < segment_index and not computation.is_constant:
                taken.add(value)
                if value not in self.segments[first_segment].passes:
                    self.segments[first_segment].passes.append(value)
                continue
            chosen[producer] = computation
            missing += variables(computation.operands)
        self._segment_of = dict.fromkeys(chosen, segment_index) | self._segment_of
        segment.computations = [chosen[index] for index in sorted(chosen)]
        segment.takes = sorted(taken)
