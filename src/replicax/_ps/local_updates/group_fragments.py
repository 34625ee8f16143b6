"""``GroupFragment``: which arrays of a group form a fragment, and by which programs the syncers keep it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from replicax._ps.local_updates.attached_arrays import TravellingArray
from replicax._ps.local_updates.background_exchange import AskServer, ExchangedFragment
from replicax._ps.local_updates.fragment_programs import FragmentPrograms
from replicax._ps.local_updates.fragment_split import split_evenly
from replicax._ps.local_updates.fragment_values import FragmentValues
from replicax._ps.local_updates.outer_optimizer import OuterOptimizer, OuterSgd
from replicax._src.program_kit.errors import InvalidArgumentError

_NAME: Final = "rx.experimental.LocalUpdates"


@final
@dataclass
class GroupFragment:
    """A fragment of the attached arrays.

    Attributes:
      number: Its number.
      numbers: The arrays, by their numbers in ``AttachedArrays.specs``.
      values: Their values in one array.
      optimizer: The outer optimizer; None for arrays that no gradient changes, of which groups take the mean.
      tokens: The rows that the group had counted at its last boundary.
    """

    number: int
    numbers: Sequence[int]
    values: FragmentValues
    optimizer: OuterOptimizer | None
    tokens: int = field(default=0)

    def exchanged_by(self, ask: AskServer, num_groups: int, *, is_compressed: bool) -> ExchangedFragment:
        """Returns the fragment as it is exchanged with the server that ``ask`` asks."""

        def programs(**update: Any) -> FragmentPrograms:
            return self.programs(num_groups, is_compressed=is_compressed, **update)

        match self.optimizer:
            case OuterSgd(rate, decay, is_nesterov):
                return ExchangedFragment(ask, programs(is_nesterov=is_nesterov), rate, decay)
            case None:
                return ExchangedFragment(ask, programs(is_state=True))
            case optimizer:
                return ExchangedFragment(ask, programs(optimizer=optimizer))

    def programs(self, num_groups: int, *, is_compressed: bool, **update: Any) -> FragmentPrograms:
        """Returns its programs, with an update of ``FragmentPrograms``. Arrays without gradients travel as float32."""
        return FragmentPrograms(
            f"local updates/{self.number}",
            self.values.size,
            num_groups,
            is_compressed=is_compressed and self.optimizer is not None,
            **update,
        )


def fragments_of(
    specs: Sequence[TravellingArray], num_fragments: int, optimizer: OuterOptimizer
) -> list[GroupFragment]:
    """Returns fragments of about equal sizes, and then one of the arrays without gradients, if there are any.

    Raises:
      InvalidArgumentError: There are fewer parameters than fragments.
    """
    trained = [number for number, spec in enumerate(specs) if not spec.is_state]
    state = [number for number, spec in enumerate(specs) if spec.is_state]
    if num_fragments > len(trained):
        raise InvalidArgumentError(
            f"{_NAME}(fragments={num_fragments}): {len(trained)} parameters were attached, and a fragment has at "
            f"least one. Write fragments={max(1, len(trained))} or less."
        )
    sizes = [math.prod(specs[number].shape) for number in trained]
    runs = split_evenly(sizes, num_fragments)
    parts: list[tuple[Sequence[int], OuterOptimizer | None]] = [
        ([trained[at] for at in run], optimizer) for run in runs
    ]
    if state:
        parts.append((state, None))
    return [
        GroupFragment(
            number,
            numbers,
            FragmentValues([specs[each].shape for each in numbers], [specs[each].dtype for each in numbers]),
            optimizer,
        )
        for number, (numbers, optimizer) in enumerate(parts)
    ]
