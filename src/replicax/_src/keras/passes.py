"""The position of Keras's loop in a pass through its data. Keras counts it in private fields only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

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
        """Watches a ``fit`` of this model inside the block. Keras passes its loop to the model when it builds the
        model.
        """
        original = model._symbolic_build  # Keras 3.12 to 3.15 have no public name for the loop

        def build(*args: Any, **kwargs: Any) -> Any:
            if self._loop is None:  # later loops are of evaluations
                self._loop = kwargs.get("iterator", args[0] if args else None)
            return original(*args, **kwargs)

        with overridden(model, _symbolic_build=build):
            yield

    def num_taken(self, *, is_in_epoch: bool) -> int:
        """Returns the number of batches taken in this pass. 0 means that the next batch starts another pass."""
        loop = self._loop
        goes_on = is_in_epoch or (loop.steps_per_epoch is not None and loop._current_iterator is not None)
        return loop._steps_seen if goes_on else 0

    def skip(self, num_batches: int) -> None:
        """Counts batches that other code took in place of the loop."""
        self._loop._steps_seen += num_batches

    def forget_length(self) -> None:
        """Makes an epoch without ``steps_per_epoch`` end with its data. Keras ends each after as many batches as the
        first one had, but an epoch that other workers began may have more or fewer.
        """
        if self._loop.steps_per_epoch is None:
            self._loop._num_batches = None
