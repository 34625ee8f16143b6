"""``rx.keras.callbacks.CheckpointCallback``: ``fit`` saves, and goes on where it was, in the middle of an epoch too.

``loop_callbacks.py`` has ``fit`` run in its ``in_fit``, so that it comes after the other callbacks, and is closed
whatever happens.
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
    """Saves while ``fit`` runs, and restores the newest checkpoint when it begins: ``fit`` goes on with the next batch.

    ``model.fit(x, y, epochs=10, callbacks=[rx.keras.callbacks.CheckpointCallback("training")])``, the same call each
    time the program is started: weights, optimizer, seeds, logs and history are bit by bit those of a training that was
    never interrupted, from the middle of an epoch too. When SIGTERM tells a process to end, all save after the same
    batch and exit with code 42. In a cluster every process gives one to its ``fit``; the chief writes. It is called
    after the other callbacks.

    Callbacks with ``get_state()`` and ``set_state(state)`` are saved and restored. The others restart:
    ``EarlyStopping`` and ``ReduceLROnPlateau`` with their patience, ``ModelCheckpoint(save_best_only=True)`` without
    its best value, Keras's ``TensorBoard`` with batch 0, ``CSVLogger`` with a new file unless ``append=True``.
    ``LearningRateScheduler`` and ``SwapEMAWeights()`` lose nothing; ``BackupAndRestore`` is overridden. The whole list
    is on the page Checkpoints of the reference.

    Args:
      directory: Of the checkpoints, which all processes share; or an ``rx.CheckpointManager``, whose checkpoint then
        has ``fit`` too.
      save_freq: "epoch", at the end of each, or a number of batches. The end of the last epoch is saved always.
        Training waits for a copy on the host; a thread writes it.
      max_to_keep: How many of the newest are kept; None: all. 3 by default.
      monitor: A name in the logs of epochs: the ``keep_best`` best by it are kept too, and the end of each epoch is
        saved.
      mode: "min", "max", or "auto": "max" where the name has "acc", "auc" or the like in it.
      keep_best: How many of the best.
      termination_config: What is done otherwise when the process is to end: grace period, exit, who says so.

    Raises:
      InvalidArgumentError: A value that has no meaning, or one that the given manager decides. In ``fit``: other data,
        ``initial_epoch`` or ``steps_per_execution`` than when it was saved.
      UnsupportedError: In ``fit``: ``save_freq`` is a number, with parameter servers; or beside
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
                    "CheckpointCallback was given a CheckpointManager, which decides what is kept: give max_to_keep, best_fn and "
                    "keep_best to that one, and leave max_to_keep and monitor out here."
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
        self._begin: Callable[..., ResumableFit] | None = None  # set while a fit runs
        self._run: ResumableFit | None = None
        self._restored_from: str | None = None
        use_imported()

    @property
    def manager(self) -> CheckpointManager | None:
        """Of the checkpoints: ``callback.manager.best_checkpoint``, say.

        None before the first ``fit``, if a directory was given.
        """
        return self._manager

    @property
    def restored_from(self) -> str | None:
        """The path of the checkpoint from which the last ``fit`` went on; None if there was none."""
        return self._restored_from

    @contextlib.contextmanager
    def in_fit(
        self, model: Any, strategy: Strategy | None, given: Mapping[str, Any], others: list[Any]
    ) -> Iterator[None]:
        """Around a ``fit`` of a model with these arguments and other callbacks. Private."""
        if self._begin is not None:
            raise ContextError(
                "This CheckpointCallback is in a fit that has not ended. Make another one, with another directory."
            )
        has_servers = strategy is not None and isinstance(strategy.variable_placement, ServerPlacement)
        if has_servers and self._saving.every is not None:
            raise UnsupportedError(
                f"CheckpointCallback(save_freq={self._saving.every}): with parameter servers workers take batches at the same time, and no "
                "moment is between two of them. Save at the ends of epochs, with save_freq='epoch'; steps_per_epoch makes them shorter."
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
                "CheckpointCallback works in fit(), which it has to know from its beginning on. In loops of your own use "
                "rx.CheckpointManager and rx.experimental.PreemptionCheckpointHandler."
            )
        if self._directory is not None:
            self._manager = CheckpointManager(Checkpoint(model=self.model), self._directory, **self._rules)
        assert self._manager is not None
        self._run = self._begin(manager=self._manager, num_epochs=int((self.params or {}).get("epochs") or 1))
        self._restored_from = self._run.restored_from

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Goes to where the checkpoint is in this epoch."""
        if self._run is not None:
            self._run.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves, if it is time, or if a process is to end."""
        if self._run is not None:
            self._run.end_batch(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves, if it is time, or if a process is to end."""
        if self._run is not None:
            self._run.end_epoch(epoch, logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        """Waits until all is on the disk."""
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
    """Inside ``fit`` runs, with the callbacks that it is to be given: that of this kind comes last."""
    ours = [one for one in callbacks if isinstance(one, CheckpointCallback)]
    if not ours:
        yield callbacks
        return
    if len(ours) > 1:
        raise InvalidArgumentError(
            f"fit() was given {len(ours)} CheckpointCallbacks, and it can go on from one checkpoint. Give one; monitor= keeps the best too."
        )
    others = [one for one in callbacks if one is not ours[0]]
    with ours[0].in_fit(model, strategy, given, others):
        yield [*others, *ours]
