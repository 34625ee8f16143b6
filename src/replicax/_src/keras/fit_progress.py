"""The position of a ``fit`` in a checkpoint: epoch, batch, history, position in the data, states of callbacks."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, final

import jax
import keras
import numpy as np

from replicax._src.checkpoint.trees import HostRandomState, NotedState
from replicax._src.cluster.counters import counters
from replicax._src.input.elements import OF_WORKERS, saved_by_other_workers
from replicax._src.keras.dataset_adapters import DistributedInput
from replicax._src.keras.loop_position import LoopOfFit
from replicax._src.keras.overriding import muted
from replicax._src.keras.step_functions import StepFunction
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError

_BATCH_HOOKS: Final = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


@final
@dataclass
class FitProgress(NotedState):
    """The epoch and batch of a ``fit``, and its history.

    Attributes:
      epoch: The current epoch, or the next one between two epochs.
      batch: The number of batches of this epoch that have been trained on.
      num_batches: The number of batches in all epochs.
      logs: The logs of the last batch.
      epochs, history: The values in ``model.history``.
      has_stopped: True if a callback has ended the training before its last epoch.
    """

    epoch: int = 0
    batch: int = 0
    num_batches: int = 0
    logs: Any = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    history: dict[str, list[Any]] = field(default_factory=dict)
    has_stopped: bool = False

    def end_epoch(self, epoch: int, logs: Mapping[str, Any], *, has_stopped: bool) -> None:
        """Records the end of an epoch and its logs."""
        self.epoch, self.batch, self.logs, self.has_stopped = epoch + 1, 0, {}, has_stopped
        self.epochs.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def get_state(self) -> dict[str, Any]:
        """Returns the state for the checkpoint."""
        return self.note_state()()

    def note_state(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that returns the state of now. Lists only grow, so it notes their lengths."""
        noted = {each.name: getattr(self, each.name) for each in fields(self)}
        num_epochs = len(self.epochs)
        lengths = {name: len(values) for name, values in self.history.items()}
        return lambda: {
            **noted,
            "logs": _plain(noted["logs"]),
            "epochs": noted["epochs"][:num_epochs],
            "history": _plain({name: noted["history"][name][:n] for name, n in lengths.items()}),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state from the checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


def _plain(logs: Any) -> Any:
    """Returns the logs as plain numbers in place of arrays."""
    return jax.tree_util.tree_map(
        lambda leaf: (
            np.asarray(leaf).tolist() if isinstance(leaf, (np.generic, np.ndarray, jax.Array)) else leaf
        ),
        logs,
    )


@final
class DataOfFit(NotedState):
    """The position of ``fit`` in its data.

    Keras reads the data in passes; with ``steps_per_epoch`` one pass serves several epochs.

    Keras shuffles arrays and PyDatasets with the random states at the beginning of a pass, or from a number that counts
    epochs (3.16), so these are saved. Datasets of replicax know their position. The state of a PyDataset with
    ``get_state`` and ``set_state`` is taken at the beginning of a pass. All other data are read again.

    Args:
      x: The argument ``x`` of ``fit``.
      loop: Keras's loop, which counts the batches that it takes.
      progress: The epoch and batch.

    Attributes:
      is_there: True if the data are at the checkpoint's position, so that no batch must be read again.
    """

    def __init__(self, x: Any, loop: LoopOfFit, progress: FitProgress):
        self._x, self._loop, self._progress = x, loop, progress
        self._has_state = isinstance(x, keras.utils.PyDataset) and _has_state(x)
        self._random = HostRandomState()
        self._at_pass: dict[str, Any] = {}
        self._restored: Mapping[str, Any] = {}
        self._forgets_length = False
        self.is_there = False

    def begin_epoch(self) -> None:
        """Records that an epoch begins, and possibly a pass with it."""
        if self._forgets_length:
            self._loop.forget_length()
        if not self._num_taken:
            self._at_pass = {
                "random": self._random.get_state(),
                "dataset": self._state_of_x(),
                "pass_number": self._loop.pass_number,
            }

    @property
    def _num_taken(self) -> int:
        return self._loop.num_taken(is_in_epoch=self._progress.batch > 0)

    def get_state(self) -> dict[str, Any]:
        """Returns the state of this process for the checkpoint."""
        return self.note_state()()

    def note_state(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that returns the state of now."""
        taken = self._num_taken
        position = self._x.position(taken or None) if isinstance(self._x, DistributedInput) else None
        own = {"dataset": self._state_of_x(), "position": position}
        if self._has_state or position is not None:
            own = copy.deepcopy(own)  # the data may change it
        at_pass, random, number = self._at_pass, self._random.note_state(), self._loop.pass_number
        return lambda: {"taken": taken, "at_pass": at_pass, "random": random(), "pass_number": number, **own}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes the state from the checkpoint. ``resume`` moves to its position."""
        self._restored = state

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> Any:
        """Returns one state from those of another number of processes, for ``set_state``.

        Raises:
          NotResumableError: The data have no position, or one for each number of processes.
        """
        positions = [state["position"] for state in states]
        if None in positions:
            raise saved_by_other_workers(len(states))
        return {**states[0], "position": {OF_WORKERS: positions}}

    def restore_random(self) -> None:
        """Restores the random states. Called before the callbacks begin the epoch, because those of a new epoch may
        draw numbers then.
        """
        if self._restored:
            self._random.set_state(self._restored["random"])

    def resume(self) -> int:
        """Moves to the restored position. Called in place of ``begin_epoch``.

        Returns:
          The number of batches of the pass that have been trained on.
        """
        state = self._restored
        taken = state["taken"] or 0
        if not self._progress.batch:  # the callbacks have begun this epoch only now
            state = self._restored = {**state, "random": self._random.get_state()}
        before = state["at_pass"] if taken else state
        self._random.set_state(before["random"])
        number = before.get("pass_number")  # older checkpoints have none
        self._loop.set_pass_number(number)
        if before["dataset"] is not None and self._has_state:
            self._x.set_state(before["dataset"])
        if isinstance(self._x, DistributedInput):
            self.is_there = self._x.resume(state["position"], taken)
            if self.is_there:
                self._forgets_length = True
                self._loop.forget_length()
        self._at_pass = {"random": before["random"], "dataset": before["dataset"], "pass_number": number}
        return taken

    @property
    def lengths(self) -> list[Any]:
        """The number of batches of a pass, as the loop knows it, and True if it forgets this number in each epoch."""
        return [self._loop.length, self._forgets_length]

    def take_lengths(self, lengths: Sequence[Any]) -> None:
        """Makes the loop end its passes as that of another process, in a replacement, which has resumed there."""
        self._loop.length, self._forgets_length = lengths
        is_over = lengths[0] is not None and (self._restored["taken"] or 0) >= lengths[0]
        if is_over and isinstance(self._x, DistributedInput):
            self._x.end_pass()  # the loop does not ask for its end

    def end_replay(self) -> None:
        """Records that all batches that were trained on before have been read again."""
        self._random.set_state(self._restored["random"])
        # Keras also counts the epochs in which no pass began.
        self._loop.set_pass_number(self._restored.get("pass_number"))

    def _state_of_x(self) -> Any:
        return self._x.get_state() if self._has_state else None


@final
class CallbackStates:
    """The states of the callbacks that have ``get_state`` and ``set_state``, by class and number.

    The other callbacks restart, including Keras's own.

    Raises:
      UnsupportedError: A callback that restarts would continue training from the wrong weights.
    """

    def __init__(self, callbacks: Sequence[Any]):
        counts: Counter[str] = Counter()
        self._callbacks: dict[str, Any] = {}
        self._restored: Mapping[str, Any] = {}
        for one in callbacks:
            name = type(one).__name__
            if _has_state(one):
                self._callbacks[f"{name}/{counts[name]}"] = one
            elif isinstance(one, keras.callbacks.SwapEMAWeights) and one.swap_on_epoch:
                raise UnsupportedError(
                    "SwapEMAWeights(swap_on_epoch=True) beside a CheckpointCallback: at the end of an epoch the model has the "
                    "averaged weights, and after a restart training would continue from them. Leave swap_on_epoch out: "
                    "validation uses the averaged weights all the same, and so does the model after fit."
                )
            counts[name] += 1

    def get_state(self) -> dict[str, Any]:
        """Returns the states for the checkpoint."""
        return {name: one.get_state() for name, one in self._callbacks.items()}

    def set_state(self, states: Mapping[str, Any]) -> None:
        """Restores the states from the checkpoint. Callbacks that have no state in it restart."""
        self._restored = copy.deepcopy(states)
        self._set(states)

    def set_again(self) -> None:
        """Restores the same states once more."""
        self._set(self._restored)

    def _set(self, states: Mapping[str, Any]) -> None:
        for name in states.keys() & self._callbacks.keys():
            self._callbacks[name].set_state(states[name])


def _has_state(given: Any) -> bool:
    return callable(getattr(given, "get_state", None)) and callable(getattr(given, "set_state", None))


@final
class ReplayedSteps:
    """Stands in for ``model.train_function`` in a resumed epoch.

    It reads the batches that were trained on before the checkpoint and does not train. Meanwhile the other callbacks do
    not get batch events.

    Args:
      num_taken: The number of batches to read. The first call reads all batches of earlier epochs. After that, each
        call reads ``steps_per_execution`` batches of this epoch.
      progress: The batch of the epoch that has been reached, and its logs.
      data: The data, which are notified when all batches have been read.
      callbacks: The other callbacks.
    """

    def __init__(
        self,
        model: Any,
        loop: LoopOfFit,
        num_taken: int,
        progress: FitProgress,
        data: DataOfFit,
        callbacks: Sequence[Any],
    ):
        self._model, self._loop, self._function = model, loop, model.train_function
        self._num_left = self._num_batches = progress.batch
        self._num_before = num_taken - progress.batch
        self._logs, self._data = progress.logs, data
        self._steps = max(1, int(model.steps_per_execution))
        if self._num_batches % self._steps:
            raise InvalidArgumentError(
                f"The checkpoint was saved after batch {self._num_batches} of an epoch, and the model now takes "
                f"steps_per_execution={self._steps} batches at a time, which does not divide that number. Compile it "
                "with the steps_per_execution of the checkpoint."
            )
        self._is_reading = self._num_batches > 0
        self._muted = contextlib.ExitStack()
        for one in callbacks if self._is_reading else ():
            self._muted.enter_context(muted(one, *_BATCH_HOOKS))
        model.train_function = self

    @property
    def has_ended(self) -> bool:
        """True if training has resumed, or resumes with the next batch."""
        return not self._num_before and not self._num_left

    def end_batch(self) -> bool:
        """Records that callbacks have been told of a batch. True if the batch was only read."""
        was_read = self._is_reading
        if was_read and self.has_ended:
            self._is_reading = False
            self._muted.close()
        return was_read

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        if self._num_before:
            self._loop.skip(self._num_before)
            self._read(iterator, self._num_before, self._num_before)
            self._num_before = 0
        if not self._num_left:
            self._finish()
            return self._function(state, iterator)
        self._read(iterator, self._steps, 1)
        self._num_left = max(0, self._num_left - self._steps)
        if not self._num_left:
            self._finish()
        return self._logs, state

    def _read(self, iterator: Iterator[Any], num_wanted: int, num_needed: int) -> None:
        if self._data.is_there:
            return
        num_in_element = self._loop.num_in_element
        wanted, needed = (-(-number // num_in_element) for number in (num_wanted, num_needed))
        if sum(1 for _ in itertools.islice(iterator, wanted)) < needed:
            raise self.too_few()

    def too_few(self) -> InvalidArgumentError:
        """Returns the error for data that end before all batches have been read again."""
        return InvalidArgumentError(
            f"The data have ended before batch {self._num_batches} of the epoch, after which the checkpoint was saved: they are not "
            "the data of then. Give fit the data, batch_size and steps_per_epoch that it had."
        )

    def _finish(self) -> None:
        self._data.end_replay()
        if counters.fit is not None:
            counters.fit.batch = self._num_batches
        if isinstance(self._function, StepFunction):  # otherwise Keras's own function, outside of every scope
            self._function.note_batches()
        self._give_back()

    def _give_back(self) -> None:
        if self._model.train_function is self:
            self._model.train_function = self._function

    def close(self) -> None:
        """Restores the original methods of the model and the callbacks."""
        self._muted.close()
        self._give_back()
