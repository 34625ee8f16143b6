"""``ChiefProgress``: Keras's progress bar in the chief, which another process becomes when this one dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import keras


@final
class ChiefProgress(keras.callbacks.ProgbarLogger):
    """Shows the progress bar while this process is the chief. All processes have one.

    A process that becomes chief in the middle of an epoch shows the line of the epoch and the bar from there.

    Args:
      is_chief: Returns True in the chief.
    """

    async_safe = True  # as Keras's own: Keras does not wait for it after each batch

    def __init__(self, is_chief: Callable[[], bool]):
        super().__init__()
        self._is_chief = is_chief
        self._epoch: int | None = None  # while `fit` is in it

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._follow()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._follow()
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._follow()
        super().on_epoch_end(epoch, logs)
        self._epoch = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._follow()
        super().on_train_batch_end(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._follow()
        super().on_test_batch_end(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._follow()
        super().on_predict_batch_end(batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._follow()
        super().on_test_end(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        self._follow()
        super().on_predict_end(logs)

    def _follow(self) -> None:
        verbose = int(self._is_chief())
        if verbose == self.verbose:
            return
        self.verbose, bar = verbose, self.progbar
        if bar is not None:
            bar.verbose = verbose
        if verbose and self._epoch is not None:
            super().on_epoch_begin(
                self._epoch
            )  # it says which epoch it is, and makes a bar that counts from now
            self.progbar = bar
