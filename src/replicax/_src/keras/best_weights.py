"""The weights that callbacks hold, for the checkpoint of their ``fit``: arrays, which other states of callbacks are
not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import keras

from replicax._src.checkpoint.nests import Holder
from replicax._src.checkpoint.restoring import Restoration, advance_all
from replicax._src.checkpoint.tracked import Growing, Parts, Trackable, escaped


@final
class BestWeights(Trackable, Growing):
    """Those of each ``EarlyStopping(restore_best_weights=True)`` that has some.

    Args:
      callbacks: By the names that they have in the checkpoint.
    """

    def __init__(self, callbacks: Mapping[str, Any]):
        self._callbacks: dict[str, Any] = {
            name: one
            for name, one in callbacks.items()
            if isinstance(one, keras.callbacks.EarlyStopping) and one.restore_best_weights
        }
        self._holder = Holder(self, "best weights")
        self._waiting: set[Restoration] = set()

    def __getitem__(self, name: str) -> Any:
        return self._callbacks[name].best_weights

    def __setitem__(self, name: str, weights: Any) -> None:
        self._callbacks[name].best_weights = weights

    def parts(self) -> Parts:
        """The weights that there are now, by the names of their callbacks."""
        held = [name for name in self._callbacks if self[name] is not None]
        return {escaped(name): self._holder.part(name) for name in held}

    @property
    def is_growing(self) -> bool:
        """Callbacks get theirs in training."""
        return True

    def awaits(self, restoration: Restoration) -> None:
        """Remembers a checkpoint that may have more of them."""
        self._waiting.add(restoration)

    def restore(self) -> None:
        """Takes those that the checkpoint has.

        When training began the callbacks had none, so that there was no place for them.
        """
        places = {
            name: one.model.get_weights() for name, one in self._callbacks.items() if self[name] is None
        }
        for name, place in places.items():
            self[name] = place
        try:
            advance_all(self._waiting)
        finally:
            self._waiting.clear()
            for name, place in places.items():
                if self[name] is place:  # nothing was saved
                    self[name] = None
