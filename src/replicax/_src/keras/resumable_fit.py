"""One ``fit`` that saves and resumes from the newest checkpoint. ``CheckpointCallback`` uses it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.checkpoint.errors import CheckpointError
from replicax._src.checkpoint.manager import CheckpointManager
from replicax._src.keras import internals
from replicax._src.keras.carried_callbacks import CarriedCallbacks
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.fit_progress import CallbackStates, DataOfFit, FitProgress, ReplayedSteps
from replicax._src.keras.internals import accessor
from replicax._src.keras.loop_position import LoopOfFit
from replicax._src.preemption.guarded_steps import GuardedSteps
from replicax._src.preemption.signals import can_watch
from replicax._src.preemption.termination import TerminationConfig
from replicax._src.strategies.strategy import Strategy
from replicax._src.vocabulary.errors import InvalidArgumentError

log = logging.getLogger("replicax")


@final
@dataclass(frozen=True)
class SavingRules:
    """The rules for when a ``fit`` saves.

    Attributes:
      every: The number of batches between two checkpoints. None saves at the end of each epoch.
      monitor: The name in the logs by which epochs are judged.
      termination: The actions when the process is told to end.
    """

    every: int | None
    monitor: str | None
    termination: TerminationConfig


@final
class ResumableFit:
    """A saving and resuming ``fit``. Its methods are called where a callback's are, after the other callbacks.

    Args:
      call: The call. Its model is built, with its optimizer and metrics.
      strategy: The model's strategy, if it has one.
      loop: Keras's loop.
      others: The other callbacks.
      rules: When it saves.
      only_epochs: True if it can end only after an epoch, because workers run batches at the same time.
      progress: Its position, still at the beginning.
      manager: Writes and reads the checkpoints.
      num_epochs: The number of the last epoch, as Keras counts.
    """

    def __init__(
        self,
        call: FitCall,
        strategy: Strategy | None,
        loop: LoopOfFit,
        others: Sequence[Any],
        rules: SavingRules,
        *,
        only_epochs: bool,
        progress: FitProgress,
        manager: CheckpointManager,
        num_epochs: int,
    ):
        model = call.model
        self._model, self._manager, self._others = model, manager, others
        self._rules, self._only_epochs, self._loop = rules, only_epochs, loop
        self._has_gaps = call.is_validated and call.validation_freq != 1
        self._num_epochs = num_epochs
        self._steps_per_call = max(1, int(model.steps_per_execution))
        self._progress = progress
        self._data = DataOfFit(call.x, loop, self._progress)
        self._saved_at: tuple[int, int, int] | None = None
        self._replay: ReplayedSteps | None = None
        self._is_to_resume = False
        # The variables and their values in the checkpoint, when it resumes in the middle of an epoch.
        self._restored: tuple[list[Any], list[Any]] = ([], [])
        self._initial_epoch = internals.initial_epoch(model)
        self._states, self._carried = CallbackStates(others), CarriedCallbacks(others)
        self._is_replacement = False
        self.restored_from = self._restore()
        self._guarded = self._guard(None if strategy is None else strategy.topology.peers)
        manager.carry("callbacks", self._carried.take)
        manager.carry("batches compared", lambda: getattr(model.train_function, "num_compared", None))
        manager.carry("lengths", lambda: self._data.lengths)

    def _guard(self, peers: Any) -> GuardedSteps | None:
        """Watches for the end of the process, if this thread can."""
        if not can_watch(self._rules.termination):
            log.warning(
                "fit runs outside of the main thread, so CheckpointCallback cannot handle SIGTERM, and the work since "
                "the last checkpoint would be lost. Use TerminationConfig(termination_watcher_fn=...) to tell when to "
                "save and exit."
            )
            return None
        return GuardedSteps(peers, self._rules.termination)

    # --- resuming -------------------------------------------------------------------------------------------

    def _restore(self) -> str | None:
        self._manager.keep_boundaries()  # the end of an earlier fit has closed it
        self._manager.checkpoint.fit = {
            "model": self._model,
            "metrics": list(self._model.metrics),
            "progress": self._progress,
            "data": self._data,
            "callbacks": self._states,
        }
        path = self._manager.restore_or_initialize()
        if path is None:
            return None
        progress = self._progress
        attributes = self._manager.carried("callbacks")
        if attributes is not None:
            self._is_replacement = True
            self._carried.give(attributes)
            self._carried.tell_of_left_out()
        self._data.restore_random()
        self._is_to_resume = True
        self._saved_at = self._now
        if progress.batch:
            model = self._model
            optimizer = [] if model.optimizer is None else model.optimizer.variables
            variables = [*model.variables, *model.metrics_variables, *optimizer]
            self._restored = variables, accessor.get(variables)
        is_over = progress.has_stopped or progress.epoch >= self._num_epochs
        # This follows Keras's BackupAndRestore.
        first = max(progress.epoch, self._num_epochs) if is_over else progress.epoch
        internals.set_initial_epoch(self._model, first)
        if is_over and self._is_replacement:
            log.info("The others have ended the training in %s; this replacement goes on behind it.", path)
        elif is_over:
            log.warning(
                "The training in %s has ended after %d epoch(s). To continue it, pass a larger `epochs`; for "
                "a new training, use another directory.",
                self._manager.directory,
                progress.epoch,
            )
        if is_over:
            return path
        log.info("Restored %s; resuming in epoch %d after batch %d.", path, progress.epoch, progress.batch)
        return path

    def begin_epoch(self, epoch: int) -> None:
        """Prepares the first batch of an epoch, after Keras has reset the metrics."""
        if self._is_to_resume:
            self._resume(epoch)
        else:
            self._progress.epoch, self._progress.batch = epoch, 0
            self._data.begin_epoch()

    def _resume(self, epoch: int) -> None:
        self._is_to_resume = False
        progress = self._progress
        if epoch != progress.epoch:
            raise InvalidArgumentError(
                f"fit() was given initial_epoch={epoch}, and the checkpoint {os.fspath(self.restored_from or '')!r} is "
                f"of epoch {progress.epoch}. Leave initial_epoch out, or give CheckpointCallback another directory."
            )
        self._give_history()
        num_taken = self._data.resume()
        # The epoch began before the checkpoint. Now Keras has reset its metrics, and a LearningRateScheduler has set
        # its rate.
        accessor.set(*self._restored)
        self._restored = [], []
        if progress.batch:
            self._forget_begin_of_epoch()
        if (number := self._manager.carried("batches compared")) is not None:
            self._model.train_function.num_compared = number
        if (lengths := self._manager.carried("lengths")) is not None:
            self._data.take_lengths(lengths)
        if num_taken:
            self._replay = ReplayedSteps(
                self._model, self._loop, num_taken, progress, self._data, self._others
            )

    def _forget_begin_of_epoch(self) -> None:
        """Takes back what ``on_epoch_begin`` has changed in callbacks that were in the epoch before."""
        self._states.set_again()
        attributes = self._manager.carried("callbacks")
        if attributes is not None:
            self._carried.give(attributes)

    def _give_history(self) -> None:
        history = self._model.history
        if history is not None:
            history.epoch = list(self._progress.epochs)
            history.history = {name: list(values) for name, values in self._progress.history.items()}

    # --- saving ---------------------------------------------------------------------------------------------

    def end_batch(self, batch: int, logs: Any) -> None:
        """Handles the end of a call of the model's step, which ends with this batch."""
        if self._replay is not None and self._replay.end_batch():
            return
        progress, every, before = self._progress, self._rules.every, self._progress.num_batches
        progress.batch, progress.logs = batch + 1, dict(logs or {})
        progress.num_batches += self._steps_per_call
        is_counted = every is not None and progress.num_batches // every > before // every
        if is_counted or self._manager.saves_continuously:
            self._save()
        else:
            self._manager.mark_boundary()
        if self._guarded is not None and not self._only_epochs:
            self._guarded.end_and_save(self._save_now)

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Handles the end of an epoch, after its validation and the other callbacks."""
        if self._replay is not None and not self._replay.has_ended:
            raise self._replay.too_few()
        progress, has_stopped = self._progress, bool(self._model.stop_training)
        progress.end_epoch(epoch, logs, has_stopped=has_stopped)
        is_last = has_stopped or epoch + 1 >= self._num_epochs
        if self._rules.every is None or self._rules.monitor is not None or is_last:
            self._save(logs, check_interval=not is_last and self._rules.monitor is None)
        else:
            self._manager.mark_boundary()
        if self._guarded is not None and not is_last:
            self._guarded.end_and_save(self._save_now)

    @property
    def _now(self) -> tuple[int, int, int]:
        return self._progress.num_batches, self._progress.epoch, self._progress.batch

    def _save(self, logs: Mapping[str, Any] | None = None, *, check_interval: bool = True) -> None:
        monitor, metrics = self._rules.monitor, None
        if monitor is not None and logs is not None:
            if monitor in logs:
                metrics = {monitor: logs[monitor]}
            elif not self._is_unjudged(monitor, logs):
                raise InvalidArgumentError(
                    f"CheckpointCallback(monitor={monitor!r}): the logs of an epoch have no such name; they have "
                    f"{sorted(logs)}. Names that start with val_ need validation_data."
                )
        path = self._manager.save(check_interval=check_interval, metrics=metrics)
        if path is not None and os.path.dirname(path) == self._manager.directory:
            self._saved_at = self._now

    def _is_unjudged(self, monitor: str, logs: Mapping[str, Any]) -> bool:
        """True for an epoch that ``validation_freq`` leaves out."""
        is_left_out = self._has_gaps and not any(name.startswith("val_") for name in logs)
        return is_left_out and monitor.startswith("val_")

    def _save_now(self) -> None:
        """Saves before the process ends."""
        if self._rules.termination.save_fn is not None:
            self._rules.termination.save_fn()
            return
        if self._saved_at != self._now:
            self._manager.save_alone(check_interval=False)
            self._saved_at = self._now
        self._manager.wait()

    # --- the end --------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Waits at the end of ``fit`` until all checkpoints are on disk."""
        if self._is_to_resume:  # the training was already complete
            self._give_history()
        self._manager.wait()

    def close(self, *, is_failing: bool) -> None:
        """Restores everything that this object changed, also after an error."""
        internals.set_initial_epoch(self._model, self._initial_epoch)
        if self._replay is not None:
            self._replay.close()
        if self._guarded is not None:
            self._guarded.close()
        with contextlib.suppress(*([CheckpointError] if is_failing else [])):
            self._manager.close()
