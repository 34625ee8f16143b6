"""The comparison of a replacement's first step with that of the others: the same code, from the same values.

``Survivors`` exchanges the numbers that are made here. All is pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from replicax._src.cluster.failures import ClusterFailureError, ProgramMismatchError, StateMismatchError
from replicax._src.devices.topology import digest
from replicax._src.drawing.text import printable

NamedDigest = tuple[str, str]
_NUM_SHOWN: Final = 5
_PROGRAM, _STATE, _BATCH = range(3)


@final
@dataclass(frozen=True)
class StepDigests:
    """Texts that depend on all that decides the results of a step.

    Attributes:
      program: Of the code.
      state: Of each array that the step reads, in order: its name, and a text that depends on its bits and shape.
      batch: The same of each array of the batch.
    """

    program: str
    state: Sequence[NamedDigest] = ()
    batch: Sequence[NamedDigest] = ()

    def summary(self) -> np.ndarray:
        """Returns three numbers, [3]: of the code, the state, and the batch."""
        state, batch = (" ".join(digest for _, digest in each) for each in (self.state, self.batch))
        return _numbers([self.program, state, batch])

    def details(self) -> np.ndarray:
        """Returns a number for each array. Of equal programs they are equally many."""
        return _numbers([digest for _, digest in (*self.state, *self.batch)])


def digests_of(names: Iterable[str], arrays: Iterable[Any]) -> list[NamedDigest]:
    """Returns the name of each array, with a text that depends on its bits, dtype and shape."""
    return [
        (name, f"{array.dtype}{list(array.shape)} {digest(array)}")
        for name, array in zip(names, arrays, strict=True)
    ]


@final
class FirstStep:
    """The numbers of all members, as one of them sees them.

    Args:
      names: The names of all tasks.
      what: The purpose of the step, for messages: ``"to run train_step"``.
      reference: The member whose numbers count.
      entered: The replacements, whose first step it is.
      table: The ``summary`` of each task, [num_tasks, 3].
    """

    def __init__(
        self, names: Sequence[str], what: str, reference: int, entered: Sequence[int], table: np.ndarray
    ):
        self._names, self._what, self._reference = names, what, reference
        is_equal = table == table[reference]
        self.differing = tuple(number for number in entered if not is_equal[number].all())
        self._with_other_code = tuple(n for n in self.differing if not is_equal[n, _PROGRAM])
        self._is_equal = is_equal

    @property
    def has_details(self) -> bool:
        """True if all have the same number of details, so that they can be exchanged."""
        return not self._with_other_code

    @property
    def reason(self) -> str:
        """The reason why the step cannot go on with those that differ."""
        names = " and ".join(self._names[number] for number in self.differing)
        return f"{names} would run another step, or with other values"

    def error_of(
        self, number: int, own: StepDigests, details: np.ndarray | None
    ) -> ClusterFailureError | None:
        """Returns the error of a replacement that differs; None for all others.

        Args:
          number: Its number.
          own: What it has.
          details: The numbers of the reference's arrays; None if they were not exchanged.
        """
        if number not in self.differing:
            return None
        me, reference = self._names[number], self._names[self._reference]
        if number in self._with_other_code:
            return ProgramMismatchError(
                f"{me}, a replacement, would run another program than {reference} {self._what}: its code, the shapes of its "
                "batches or the order of its steps differ. Start it with the same code, of the same versions, as the other "
                "tasks, and let each task restore the checkpoint and go on where that was saved."
            )
        assert details is not None
        named = (*own.state, *own.batch)
        differs = own.details() != details
        texts = [name for (name, _), is_other in zip(named, differs, strict=True) if is_other]
        shown = printable(", ".join(texts[:_NUM_SHOWN])) + (", …" if len(texts) > _NUM_SHOWN else "")
        if self._is_equal[number, _STATE]:
            return StateMismatchError(
                f"{me}, a replacement, has another batch than {reference} {self._what} ({shown}): the program's checkpoint "
                "lacks the position of the data, or the data differ between tasks. Give the iterator that the loop "
                "reads to rx.Checkpoint, and seed what is random in the data."
            )
        return StateMismatchError(
            f"{me}, a replacement, has other values than {reference} in the state that it reads {self._what}: {shown}. "
            "A variable that the program's checkpoint lacks? Give all that a step reads to rx.Checkpoint."
        )


def _numbers(texts: Sequence[str]) -> np.ndarray:
    parts = [hashlib.sha256(text.encode()).digest()[:8] for text in texts]
    return np.frombuffer(b"".join(parts), np.uint64)
