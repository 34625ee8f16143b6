"""The position of Keras's loop in a pass through its data. The loop counts it, and nothing public tells it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

from replicax._src.keras.overriding import overridden


@final
class LoopOfFit:
    """Keras's own count of the batches that it has taken in a pass, of the ``fit`` that runs inside of ``watched``.

    With ``steps_per_epoch`` a pass has several epochs, and Keras begins another one where this count reaches the end.
    """

    def __init__(self) -> None:
        self._loop: Any = None

    @contextlib.contextmanager
    def watched(self, model: Any) -> Iterator[None]:
        """Inside, ``fit`` of this model is one. Its loop is seen where Keras gives it to the model, to build that."""
        original = model._symbolic_build  # Keras 3.12 to 3.15: there is no public way to the loop

        def build(*args: Any, **kwargs: Any) -> Any:
            if self._loop is None:  # the next ones are of evaluations
                self._loop = kwargs.get("iterator", args[0] if args else None)
            return original(*args, **kwargs)

        with overridden(model, _symbolic_build=build):
            yield

    def num_taken(self, *, is_in_epoch: bool) -> int:
        """How many batches of its pass it has taken; 0: the next batch begins another pass."""
        loop = self._loop
        goes_on = is_in_epoch or (loop.steps_per_epoch is not None and loop._current_iterator is not None)
        return loop._steps_seen if goes_on else 0

    def skip(self, num_batches: int) -> None:
        """Counts batches that were taken in its place."""
        self._loop._steps_seen += num_batches
