"""How far a ``fit`` is, as a checkpoint has it: the epoch and batch, its history, and where it is in its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

import jax
import keras
import numpy as np

from replicax._src.checkpoint.trees import HostRandomState
from replicax._src.errors import InvalidArgumentError
from replicax._src.keras.datasets import DistributedInput
from replicax._src.keras.passes import LoopOfFit
from replicax._src.keras.steps import StepFunction


@final
@dataclass
class Progress:
    """Where ``fit`` is.

    Attributes:
      epoch: The one that has begun, or that would be the next.
      batch: How many of its batches have been trained with.
      num_batches: How many in all epochs.
      logs: Of the last batch.
      epochs, history: As ``model.history`` has them.
      has_stopped: A callback has ended the training before its last epoch.
    """

    epoch: int = 0
    batch: int = 0
    num_batches: int = 0
    logs: Any = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    history: dict[str, list[Any]] = field(default_factory=dict)
    has_stopped: bool = False

    def end_epoch(self, epoch: int, logs: Mapping[str, Any], *, has_stopped: bool) -> None:
        """An epoch has ended, with its logs."""
        self.epoch, self.batch, self.logs, self.has_stopped = epoch + 1, 0, {}, has_stopped
        self.epochs.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def get_state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {**asdict(self), "logs": _plain(self.logs), "history": _plain(self.history)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """From the checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


def _plain(logs: Any) -> Any:
    """Numbers, in place of arrays."""
    return jax.tree_util.tree_map(
        lambda leaf: (
            np.asarray(leaf).tolist() if isinstance(leaf, (np.generic, np.ndarray, jax.Array)) else leaf
        ),
        logs,
    )


@final
class DataOfFit:
    """Where ``fit`` is in its data.

    Keras goes through them in passes, with ``steps_per_epoch`` in one for several epochs.

    Arrays and PyDatasets are shuffled by the random states as they are when a pass begins; datasets of ours know their
    position; a PyDataset with ``get_state`` and ``set_state`` is asked when a pass begins. All others are read again.

    Args:
      x: The argument of ``fit``.
      loop: Of Keras, which counts what it takes.
      progress: Of the ``fit``.
    """

    def __init__(self, x: Any, loop: LoopOfFit, progress: Progress):
        self._x, self._loop, self._progress = x, loop, progress
        self._random = HostRandomState()
        self._at_pass: dict[str, Any] = {}
        self._restored: Mapping[str, Any] = {}

    def begin_epoch(self) -> None:
        """An epoch begins, and with it maybe a pass."""
        if not self._num_taken:
            self._at_pass = {"random": self._random.get_state(), "dataset": self._state_of_x()}

    @property
    def _num_taken(self) -> int:
        return self._loop.num_taken(is_in_epoch=self._progress.batch > 0)

    def get_state(self) -> dict[str, Any]:
        """For the checkpoint, of this process."""
        taken = self._num_taken
        position = self._x.position(taken or None) if isinstance(self._x, DistributedInput) else None
        return {
            "taken": taken,
            "at_pass": self._at_pass,
            "random": self._random.get_state(),
            "dataset": self._state_of_x(),
            "position": position,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """From the checkpoint; ``resume`` goes there."""
        self._restored = state

    def resume(self) -> int:
        """In place of ``begin_epoch``, where what was restored goes on.

        Returns:
          How many batches Keras will give that have been trained with.
        """
        state = self._restored
        taken = state["taken"] or 0
        before = state["at_pass"] if taken else state
        self._random.set_state(before["random"])
        if before["dataset"] is not None:
            getattr(self._x, "set_state", _ignore)(before["dataset"])
        if isinstance(self._x, DistributedInput):
            self._x.resume(state["position"], taken)
        self._at_pass = {"random": before["random"], "dataset": before["dataset"]}
        return taken

    def end_replay(self) -> None:
        """All that had been trained with has been read again."""
        self._random.set_state(self._restored["random"])

    def _state_of_x(self) -> Any:
        get, set_ = getattr(self._x, "get_state", None), getattr(self._x, "set_state", None)
        is_dataset = isinstance(self._x, keras.utils.PyDataset)
        return get() if is_dataset and callable(get) and callable(set_) else None


def _ignore(state: Any) -> None:
    """The data are of another kind now."""


@final
class ReplayedSteps:
    """In place of ``model.train_function`` until all batches have been read that had been trained with: reads, and
    trains nothing.

    Args:
      model: Whose.
      loop: Of Keras.
      num_before: How many batches of earlier epochs come first; they are read in one call.
      num_batches: How many of this epoch: each call reads as many as the model's ``steps_per_execution``.
      logs: What the last of them had returned.
      data: Told when it is done.
    """

    def __init__(
        self, model: Any, loop: LoopOfFit, num_before: int, num_batches: int, logs: Any, data: DataOfFit
    ):
        self._model, self._loop, self._function = model, loop, model.train_function
        self._num_before, self._num_left, self._num_batches = num_before, num_batches, num_batches
        self._logs, self._data = logs, data
        steps = max(1, int(model.steps_per_execution))
        if num_batches % steps:
            raise InvalidArgumentError(
                f"The checkpoint was saved after batch {num_batches} of an epoch, and the model now takes steps_per_execution={steps} "
                "batches at a time, which do not end there. Compile it with the steps_per_execution that it had."
            )
        self._steps = steps
        model.train_function = self

    @property
    def has_ended(self) -> bool:
        """Whether training has begun again, or does with the next batch."""
        return not self._num_before and not self._num_left

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        if self._num_before:
            self._loop.skip(self._num_before)
        self._num_before -= self._read(iterator, self._num_before, self._num_before)
        if self._num_left:
            is_last = self._num_left <= self._steps
            self._read(iterator, self._steps, 1)
            self._num_left -= self._steps
            if is_last:
                self._finish()
            return self._logs, state
        self._finish()
        return self._function(state, iterator)

    def _read(self, iterator: Iterator[Any], num_wanted: int, num_needed: int) -> int:
        for number in range(num_wanted):
            try:
                next(iterator)
            except StopIteration:
                if number < num_needed:
                    raise self.too_few() from None
                break
        return num_wanted

    def too_few(self) -> InvalidArgumentError:
        """The error for data that end before all has been read again."""
        return InvalidArgumentError(
            f"The data have ended before batch {self._num_batches} of the epoch, after which the checkpoint was saved: they are not "
            "the data of then. Give fit the data, batch_size and steps_per_epoch that it had."
        )

    def _finish(self) -> None:
        self._data.end_replay()
        if isinstance(self._function, StepFunction):  # Keras's own, outside of every scope
            self._function.note_batches()
        self.remove()

    def remove(self) -> None:
        """Gives the model its function back."""
        if self._model.train_function is self:
            self._model.train_function = self._function
