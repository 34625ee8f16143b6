"""``rx.keras.callbacks.CheckpointCallback``: ``fit`` saves and resumes, also in the middle of an epoch.

``loop_callbacks.py`` runs ``fit`` inside of ``in_fit``, so that this callback comes after the others and is always
closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import keras

from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.manager import CheckpointManager
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.fit_progress import FitProgress
from replicax._src.keras.keras_placement import placement_of
from replicax._src.keras.loop_position import LoopOfFit
from replicax._src.keras.resumable_fit import ResumableFit, SavingRules
from replicax._src.preemption.termination import TerminationConfig
from replicax._src.strategies.strategy import Strategy
from replicax._src.values.framework import use_imported
from replicax._src.vocabulary.errors import ContextError, InvalidArgumentError, UnsupportedError
from replicax._src.vocabulary.options import path_of

_MAX_TO_KEEP: Final = 3
_CONTINUOUS: Final = "continuous"
_GROWING: Final = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2")


@final
class CheckpointCallback(keras.callbacks.Callback):
    """Saves while ``fit`` runs. When ``fit`` starts, it restores the newest checkpoint and resumes with the next batch.

    ``model.fit(x, y, epochs=10, callbacks=[rx.keras.callbacks.CheckpointCallback("training")])`` is the same call each
    time the program starts. Weights, optimizer, seeds, logs and history are bit-identical to those of a training
    without interruption, also from the middle of an epoch. On SIGTERM to any process, all processes save after the same
    batch and exit with code 42. In a cluster every process passes one to its ``fit``, and writes its part. Keras calls
    it after the other callbacks.

    With ``fault_tolerance``, the replacement of a dead worker enters here after the chief's next batch, with its state.

    Callbacks with ``get_state()`` and ``set_state(state)`` are saved and restored. The others restart:
    ``EarlyStopping`` and ``ReduceLROnPlateau`` with their patience, ``ModelCheckpoint(save_best_only=True)`` without
    its best value, Keras's ``TensorBoard`` with batch 0, ``CSVLogger`` with a new file unless ``append=True``.
    ``LearningRateScheduler`` and ``SwapEMAWeights()`` need no state; ``BackupAndRestore`` is overridden. The reference
    page Checkpoints has the full list.

    Args:
      directory: The directory of the checkpoints, which all processes share; or an ``rx.CheckpointManager``, whose
        checkpoint then also contains the state of ``fit``.
      save_freq: "epoch" saves at the end of each epoch; a number saves after so many batches; "continuous" saves after
        the first batch that ends when the last checkpoint is on the disk. The end of the last epoch is always saved.
        Training waits for a copy on the host; a thread writes it.
      max_to_keep: The number of newest checkpoints that are kept, 3 by default. None keeps all.
      monitor: A name in the logs of epochs. The ``keep_best`` best checkpoints by it are kept too, and the end of each
        epoch is saved.
      mode: "min", "max" or "auto". "auto" means "max" for names that contain "acc", "auc" and similar words.
      keep_best: The number of best checkpoints that are kept.
      local_directory: A directory on each host's own disk, for more frequent saves: as for ``rx.CheckpointManager``.
        ``save_freq`` must be a number then.
      local_every: The number of batches after which it saves there, smaller than ``save_freq``.
      save_on_failure: True if a death of another process loses at most the batch that it interrupted, whatever
        ``save_freq`` is: a surviving process saves the end of the last batch at once. This costs the memory of a second
        copy of the state; see ``rx.CheckpointManager``. With ``fault_tolerance`` it has no effect.
      termination_config: How the process ends on preemption: grace period, exit, the source of the signal.

    Raises:
      InvalidArgumentError: An argument is invalid, or the given manager decides it. In ``fit``: the data,
        ``initial_epoch`` or ``steps_per_execution`` differ from those of the checkpoint.
      UnsupportedError: In ``fit``: ``save_freq`` is not "epoch" with parameter servers, or the callbacks include
        ``SwapEMAWeights(swap_on_epoch=True)``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | CheckpointManager,
        save_freq: str | int = "epoch",
        max_to_keep: int | None = _MAX_TO_KEEP,
        *,
        monitor: str | None = None,
        mode: str = "auto",
        keep_best: int = 1,
        termination_config: TerminationConfig | None = None,
        local_directory: str | os.PathLike[str] | None = None,
        local_every: int | None = None,
        save_on_failure: bool = False,
    ):
        super().__init__()
        _check(save_freq, mode, termination_config)
        every = save_freq if isinstance(save_freq, int) else None
        is_continuous = save_freq == _CONTINUOUS
        if is_continuous and (local_directory is not None or local_every is not None):
            raise InvalidArgumentError(
                "CheckpointCallback: local_directory and local_every need a number of batches as save_freq, and save_freq is "
                "'continuous'. Remove local_directory and local_every to save continuously, or give save_freq a number."
            )
        self._saving = SavingRules(local_every or every, monitor, termination_config or TerminationConfig())
        self._manager: CheckpointManager | None = None
        self._directory: str | None = None
        if isinstance(directory, CheckpointManager):
            is_of_manager = local_directory is not None or save_on_failure
            if monitor is not None or max_to_keep != _MAX_TO_KEEP or is_of_manager:
                raise InvalidArgumentError(
                    "CheckpointCallback was given a CheckpointManager, which decides the checkpoints to keep. Pass "
                    "max_to_keep, best_fn, keep_best, local_directory and save_on_failure to the manager, and leave "
                    "max_to_keep, monitor, local_directory and save_on_failure out here."
                )
            if is_continuous != directory.saves_continuously:
                raise InvalidArgumentError(
                    "CheckpointCallback was given a CheckpointManager with continuous="
                    f"{directory.saves_continuously}, and save_freq={save_freq!r}. To save continuously, give "
                    "continuous=True to the manager and save_freq='continuous' here; otherwise remove both."
                )
            self._manager = directory
        else:
            self._directory = os.path.abspath(path_of(directory, "directory", "training"))
        self._rules: dict[str, Any] = {
            "max_to_keep": max_to_keep,
            "save_on_failure": save_on_failure,
            "continuous": is_continuous,
        }
        if local_directory is not None or local_every is not None:
            self._rules |= {
                "local_directory": local_directory,
                "local_every": local_every,
                "checkpoint_interval": every,
            }
        if monitor is not None:
            self._rules |= {
                "keep_best": keep_best,
                "best_fn": lambda metrics: metrics[monitor],
                "best_mode": _mode_of(monitor) if mode == "auto" else mode,
            }
        self._begin: Callable[..., ResumableFit] | None = None  # set during a fit
        self._run: ResumableFit | None = None
        self._restored_from: str | None = None
        use_imported()

    @property
    def manager(self) -> CheckpointManager | None:
        """The manager of the checkpoints, for example for ``callback.manager.best_checkpoint``.

        It is None before the first ``fit`` if a directory was given.
        """
        return self._manager

    @property
    def _saves_on_failure(self) -> bool:
        return bool(
            self._rules["save_on_failure"] if self._manager is None else self._manager.saves_on_failure
        )

    @property
    def restored_from(self) -> str | None:
        """The path of the checkpoint from which the last ``fit`` resumed, or None."""
        return self._restored_from

    @contextlib.contextmanager
    def in_fit(self, call: FitCall, strategy: Strategy | None, others: list[Any]) -> Iterator[None]:
        """Surrounds a ``fit`` with these other callbacks. Private."""
        if self._begin is not None:
            raise ContextError(
                "This CheckpointCallback is used by a fit that has not ended. Make another one with another directory."
            )
        only_epochs = not placement_of(strategy).saves_between_batches
        if only_epochs and (self._saving.every is not None or self._rules["continuous"]):
            save_freq = _CONTINUOUS if self._rules["continuous"] else self._saving.every
            raise UnsupportedError(
                f"CheckpointCallback(save_freq={save_freq!r}): with parameter servers, workers run batches at "
                "the same time, so training cannot be saved between two batches. Use save_freq='epoch'; "
                "steps_per_epoch makes epochs shorter."
            )
        if only_epochs and self._saves_on_failure:
            raise UnsupportedError(
                "CheckpointCallback(save_on_failure=True): with parameter servers, workers run batches at the same time, so "
                "no moment between two batches can be kept. Leave save_on_failure out; the servers' own replicas and "
                "snapshots survive failures."
            )
        loop = LoopOfFit()
        self._begin = functools.partial(
            ResumableFit, call, strategy, loop, others, self._saving, only_epochs=only_epochs
        )
        is_failing = True
        try:
            with loop.watched(call.model):
                yield
            is_failing = False
        finally:
            run, self._run, self._begin = self._run, None, None
            if run is not None:
                run.close(is_failing=is_failing)

    # --- what Keras calls -----------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest checkpoint, if there is one."""
        if self._begin is None:
            raise ContextError(
                "CheckpointCallback works only as a callback passed to fit(). Make it on a line before fit: callback = "
                "rx.keras.callbacks.CheckpointCallback(...), then model.fit(..., callbacks=[callback]). In your own loops use "
                "rx.CheckpointManager and rx.experimental.PreemptionCheckpointHandler."
            )
        progress = FitProgress()
        if self._directory is not None:
            self._manager = CheckpointManager(
                Checkpoint(model=self.model),
                self._directory,
                step_counter=lambda: progress.num_batches,
                **self._rules,
            )
        assert self._manager is not None
        num_epochs = int((self.params or {}).get("epochs") or 1)
        self._run = self._begin(progress=progress, manager=self._manager, num_epochs=num_epochs)
        self._restored_from = self._run.restored_from

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Moves to the checkpoint's position in this epoch."""
        if self._run is not None:
            self._run.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves if a checkpoint is due, or if a process is told to end."""
        if self._run is not None:
            self._run.end_batch(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves if a checkpoint is due, or if a process is told to end."""
        if self._run is not None:
            self._run.end_epoch(epoch, logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        """Waits until all checkpoints are on disk."""
        if self._run is not None:
            self._run.end()


def _check(save_freq: Any, mode: str, config: Any) -> None:
    is_number = isinstance(save_freq, int) and not isinstance(save_freq, bool)
    if save_freq not in ("epoch", _CONTINUOUS) and not (is_number and save_freq > 0):
        raise InvalidArgumentError(
            f"CheckpointCallback: save_freq is 'epoch', 'continuous', or a number of batches of at least 1; got {save_freq!r}."
        )
    if mode not in ("auto", "min", "max"):
        raise InvalidArgumentError(f"CheckpointCallback: mode is 'auto', 'min' or 'max'; got {mode!r}.")
    if config is not None and not isinstance(config, TerminationConfig):
        raise InvalidArgumentError(
            f"termination_config is an rx.experimental.TerminationConfig, got {config!r}."
        )


def _mode_of(monitor: str) -> str:
    return "max" if any(word in monitor for word in _GROWING) else "min"


@contextlib.contextmanager
def in_fit(call: FitCall, strategy: Strategy | None, callbacks: list[Any]) -> Iterator[list[Any]]:
    """Yields the callbacks for the ``fit`` that runs inside the block. A ``CheckpointCallback`` comes last."""
    ours = [one for one in callbacks if isinstance(one, CheckpointCallback)]
    if not ours:
        yield callbacks
        return
    if len(ours) > 1:
        raise InvalidArgumentError(
            f"fit() was given {len(ours)} CheckpointCallbacks, and can resume from one checkpoint only. Give one; "
            "monitor= also keeps the best checkpoints."
        )
    others = [one for one in callbacks if one is not ours[0]]
    with ours[0].in_fit(call, strategy, others):
        yield [*others, *ours]
