"""``rx.keras.SidecarEvaluator``: evaluates a model beside its training, from the checkpoints that the training
writes.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any, Final, final

import keras

from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.directory import is_of_keras
from replicax._src.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from replicax._src.checkpoint.polling import checkpoints_iterator
from replicax._src.checkpoint.reader import load_checkpoint
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import path_of

log = logging.getLogger("replicax")

_PATIENCE_S: Final = 30.0
_SETTLED_AFTER_S: Final = 1.0  # by then a file that is being written has grown
_NUMBER: Final = re.compile(r"(\d+)(?:\.weights\.h5|\.keras)?$")


@final
class SidecarEvaluator:
    """Evaluates a model on each new checkpoint of a directory, in a process beside the training.

    ``rx.keras.SidecarEvaluator(model, data, "training", max_evaluations=5).start()``. It takes the checkpoints of
    ``rx.Checkpoint(model=model, optimizer=optimizer)`` and its manager, and the files that
    ``keras.callbacks.ModelCheckpoint`` writes. It takes the newest checkpoint, so it may skip some that are written
    while it evaluates.

    Args:
      model: A model with the structure of the trained model, compiled with metrics.
      data: The argument ``x`` of ``model.evaluate``: [rows, ...] arrays, or a dataset.
      checkpoint_dir: The directory in which the training saves.
      steps: The number of batches of one evaluation. None evaluates until the data end.
      max_evaluations: The number of the last checkpoint: the evaluator ends after a name, such as ``ckpt-5``, with this
        number or a higher one. If names have no number, it ends after so many evaluations. None runs without end.
      callbacks: Keras callbacks for ``evaluate``, for example ``TensorBoard`` to write summaries.

    Raises:
      InvalidArgumentError: ``max_evaluations`` is not a positive number, or a checkpoint has no ``model``.

    Source: TensorFlow, ``tf.keras.utils.SidecarEvaluator``.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
    ) -> None:
        if max_evaluations is not None and (not isinstance(max_evaluations, int) or max_evaluations < 1):
            raise InvalidArgumentError(
                f"max_evaluations must be a positive number or None, got {max_evaluations!r:.100}."
            )
        self.model, self.data, self.steps = model, data, steps
        self.checkpoint_dir = path_of(checkpoint_dir, "checkpoint_dir", "training")
        self.max_evaluations = max_evaluations
        self.callbacks = list(callbacks or ())

    def start(self) -> None:
        """Evaluates each new checkpoint until the last one. It blocks.

        Raises:
          CheckpointMismatchError: A checkpoint is of another model.
          InvalidArgumentError: A checkpoint has no ``model``.
        """
        checkpoint = Checkpoint(model=self.model)
        if self.model.optimizer is not None:
            checkpoint.optimizer = self.model.optimizer
        num_evaluations = 0
        paths = checkpoints_iterator(self.checkpoint_dir, timeout=_PATIENCE_S, timeout_fn=self._keep_waiting)
        for path in paths:
            try:
                self._load(checkpoint, path)
            except (OSError, CheckpointNotFoundError, CorruptCheckpointError) as error:
                # The training is still writing the checkpoint, or has removed it.
                log.info("Checkpoint %s cannot be read yet: %s", path, error)
                continue
            results = self.model.evaluate(
                self.data,
                steps=self.steps,
                callbacks=self.callbacks,
                verbose=2,  # type: ignore[arg-type]
                return_dict=True,
            )
            num_evaluations += 1
            log.info("Evaluated %s: %s", path, " ".join(f"{name}={x:.6g}" for name, x in results.items()))
            number = _NUMBER.search(path)
            reached = int(number[1]) if number else num_evaluations
            if self.max_evaluations is not None and reached >= self.max_evaluations:
                return

    def _load(self, checkpoint: Checkpoint, path: str) -> None:
        if is_of_keras(path):
            self._load_file(path)
            return
        if not any(key.startswith("model/") for key in load_checkpoint(path).get_variable_to_shape_map()):
            raise InvalidArgumentError(
                f"The checkpoint {path!r} has no object named 'model'. Save it with "
                "rx.Checkpoint(model=model, optimizer=optimizer)."
            )
        checkpoint.restore(path).expect_partial()

    def _load_file(self, path: str) -> None:
        """Loads a Keras file, which the training may still be writing.

        Raises:
          OSError: The file is being written.
          ValueError: The file is of another model.
        """
        before = os.stat(path)
        try:
            self.model.load_weights(path)
        except ValueError as error:
            time.sleep(_SETTLED_AFTER_S)
            now = os.stat(path)
            if (now.st_mtime_ns, now.st_size) == (before.st_mtime_ns, before.st_size):
                raise
            raise OSError(f"{path!r} was being written ({error!s:.200}).") from error

    def _keep_waiting(self) -> bool:
        log.info(
            "SidecarEvaluator has been waiting %g s for a new checkpoint in %s.",
            _PATIENCE_S,
            self.checkpoint_dir,
        )
        return False
