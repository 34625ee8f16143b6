"""The position of Keras's loop in a pass through its data. Keras counts it in private fields only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

from replicax._src.keras import internals
from replicax._src.keras.overriding import overridden


@final
class LoopOfFit:
    """Keras's count of the batches that it has taken in a pass, for the ``fit`` that runs inside of ``watched``.

    With ``steps_per_epoch`` a pass has several epochs. Keras starts another pass when this count reaches the end.
    """

    def __init__(self) -> None:
        self._loop: Any = None

    @contextlib.contextmanager
    def watched(self, model: Any) -> Iterator[None]:
        """Watches a ``fit`` of this model inside the block. Keras passes its loop to the model when it may have to
        build the model.
        """
        original = getattr(model, internals.BUILD)

        def build(*args: Any, **kwargs: Any) -> Any:
            if self._loop is None:  # later loops are of evaluations
                self._loop = kwargs.get("iterator", args[0] if args else None)
            return original(*args, **kwargs)

        with overridden(model, **{internals.BUILD: build}):
            yield

    def num_taken(self, *, is_in_epoch: bool) -> int:
        """Returns the number of batches taken in this pass. 0 means that the next batch starts another pass."""
        loop = self._loop
        goes_on = is_in_epoch or (loop.steps_per_epoch is not None and internals.has_pass(loop))
        return internals.num_taken(loop) if goes_on else 0

    def skip(self, num_batches: int) -> None:
        """Counts batches that other code took in place of the loop."""
        internals.set_num_taken(self._loop, internals.num_taken(self._loop) + num_batches)

    @property
    def num_in_element(self) -> int:
        """The number of batches in an element of the loop's iterator."""
        return internals.num_in_element(self._loop)

    def forget_length(self) -> None:
        """Makes an epoch without ``steps_per_epoch`` end with its data. Keras ends each after as many batches as the
        first one had, but an epoch that other workers began may have more or fewer.
        """
        if self._loop.steps_per_epoch is None:
            internals.set_length(self._loop, None)

    @property
    def length(self) -> int | None:
        """The number of batches after which a pass ends; None if it ends with the data."""
        return internals.length(self._loop)

    @length.setter
    def length(self, num_batches: int | None) -> None:
        internals.set_length(self._loop, num_batches)

    @property
    def pass_number(self) -> int | None:
        """The number from which Keras shuffles this pass; None if it draws random numbers (before 3.16)."""
        return internals.pass_number(self._loop)

    def set_pass_number(self, number: int | None) -> None:
        """Makes the pass that begins now the one with this number."""
        internals.set_pass_number(self._loop, number)
