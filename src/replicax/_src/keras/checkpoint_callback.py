"""``rx.keras.callbacks.CheckpointCallback``: ``fit`` saves and resumes, also in the middle of an epoch.

``loop_callbacks.py`` runs ``fit`` inside of ``in_fit``, so that this callback comes after the others and is always
closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import keras

from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.manager import CheckpointManager
from replicax._src.errors import ContextError, InvalidArgumentError, UnsupportedError
from replicax._src.framework import use_imported
from replicax._src.keras.passes import LoopOfFit
from replicax._src.keras.resumable_fit import ResumableFit, SavingRules
from replicax._src.options import path_of
from replicax._src.preemption.termination import TerminationConfig
from replicax._src.variables.server_placement import ServerPlacement

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

_MAX_TO_KEEP: Final = 3
_GROWING: Final = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2")


@final
class CheckpointCallback(keras.callbacks.Callback):
    """Saves while ``fit`` runs. When ``fit`` starts, it restores the newest checkpoint and resumes with the next batch.

    ``model.fit(x, y, epochs=10, callbacks=[rx.keras.callbacks.CheckpointCallback("training")])`` is the same call each
    time the program starts. Weights, optimizer, seeds, logs and history are bit-identical to those of a training
    without interruption, also from the middle of an epoch. On SIGTERM to any process, all processes save after the same
    batch and exit with code 42. In a cluster every process passes one to its ``fit``, and writes its part. Keras calls
    it after the other callbacks.

    Callbacks with ``get_state()`` and ``set_state(state)`` are saved and restored. The others restart:
    ``EarlyStopping`` and ``ReduceLROnPlateau`` with their patience, ``ModelCheckpoint(save_best_only=True)`` without
    its best value, Keras's ``TensorBoard`` with batch 0, ``CSVLogger`` with a new file unless ``append=True``.
    ``LearningRateScheduler`` and ``SwapEMAWeights()`` need no state; ``BackupAndRestore`` is overridden. The reference
    page Checkpoints has the full list.

    Args:
      directory: The directory of the checkpoints, which all processes share; or an ``rx.CheckpointManager``, whose
        checkpoint then also contains the state of ``fit``.
      save_freq: "epoch" saves at the end of each epoch; a number saves after so many batches. The end of the last epoch
        is always saved. Training waits for a copy on the host; a thread writes it.
      max_to_keep: The number of newest checkpoints that are kept, 3 by default. None keeps all.
      monitor: A name in the logs of epochs. The ``keep_best`` best checkpoints by it are kept too, and the end of each
        epoch is saved.
      mode: "min", "max" or "auto". "auto" means "max" for names that contain "acc", "auc" and similar words.
      keep_best: The number of best checkpoints that are kept.
      termination_config: How the process ends on preemption: grace period, exit, the source of the signal.

    Raises:
      InvalidArgumentError: An argument is invalid, or the given manager decides it. In ``fit``: the data,
        ``initial_epoch`` or ``steps_per_execution`` differ from those of the checkpoint.
      UnsupportedError: In ``fit``: ``save_freq`` is a number with parameter servers, or the callbacks include
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
    ):
        super().__init__()
        _check(save_freq, mode, termination_config)
        every = save_freq if isinstance(save_freq, int) else None
        self._saving = SavingRules(every, monitor, termination_config or TerminationConfig())
        self._manager: CheckpointManager | None = None
        self._directory: str | None = None
        if isinstance(directory, CheckpointManager):
            if monitor is not None or max_to_keep != _MAX_TO_KEEP:
                raise InvalidArgumentError(
                    "CheckpointCallback was given a CheckpointManager, which decides the checkpoints to keep. Pass "
                    "max_to_keep, best_fn and keep_best to the manager, and leave max_to_keep and monitor out here."
                )
            self._manager = directory
        else:
            self._directory = os.path.abspath(path_of(directory, "directory", "training"))
        self._rules: dict[str, Any] = {"max_to_keep": max_to_keep}
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
    def restored_from(self) -> str | None:
        """The path of the checkpoint from which the last ``fit`` resumed, or None."""
        return self._restored_from

    @contextlib.contextmanager
    def in_fit(
        self, model: Any, strategy: Strategy | None, given: Mapping[str, Any], others: list[Any]
    ) -> Iterator[None]:
        """Surrounds a ``fit`` of a model with these arguments and other callbacks. Private."""
        if self._begin is not None:
            raise ContextError(
                "This CheckpointCallback is used by a fit that has not ended. Make another one with another directory."
            )
        has_servers = strategy is not None and isinstance(strategy.variable_placement, ServerPlacement)
        if has_servers and self._saving.every is not None:
            raise UnsupportedError(
                f"CheckpointCallback(save_freq={self._saving.every}): with parameter servers, workers run batches at "
                "the same time, so training cannot be saved between two batches. Use save_freq='epoch'; "
                "steps_per_epoch makes epochs shorter."
            )
        loop = LoopOfFit()
        self._begin = functools.partial(
            ResumableFit, model, strategy, loop, given, others, self._saving, only_epochs=has_servers
        )
        is_failing = True
        try:
            with loop.watched(model):
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
                "CheckpointCallback works only as a callback passed to fit(). In your own loops use "
                "rx.CheckpointManager and rx.experimental.PreemptionCheckpointHandler."
            )
        if self._directory is not None:
            self._manager = CheckpointManager(Checkpoint(model=self.model), self._directory, **self._rules)
        assert self._manager is not None
        self._run = self._begin(manager=self._manager, num_epochs=int((self.params or {}).get("epochs") or 1))
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
    if save_freq != "epoch" and not (is_number and save_freq > 0):
        raise InvalidArgumentError(
            f"CheckpointCallback: save_freq is 'epoch', or a number of batches of at least 1; got {save_freq!r}."
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
def in_fit(
    model: Any, strategy: Strategy | None, given: Mapping[str, Any], callbacks: list[Any]
) -> Iterator[list[Any]]:
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
    with ours[0].in_fit(model, strategy, given, others):
        yield [*others, *ours]
