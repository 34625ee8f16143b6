"""``rx.keras.callbacks.TensorBoard``: Keras's callback of this name without TensorFlow. It writes through
``rx.SummaryWriter``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import jax
import keras
import numpy as np

from replicax._src.profiling.profile import profile
from replicax._src.scope import context
from replicax._src.summaries.events import check_installed
from replicax._src.summaries.writer import SummaryWriter
from replicax._src.values.framework import use_imported
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError
from replicax._src.vocabulary.options import path_of, whole_number

log = logging.getLogger("replicax")


@final
class TensorBoard(keras.callbacks.Callback):
    """Writes the data of ``keras.callbacks.TensorBoard`` for TensorBoard, without TensorFlow.

    There are two runs in ``log_dir``: ``train`` has ``epoch_<metric>`` and ``epoch_learning_rate``, ``validation`` has
    ``epoch_<metric>`` and ``evaluation_<metric>_vs_iterations``. It works under every strategy and without one. Give it
    to ``fit`` or ``evaluate`` in all processes: the chief writes.

    Args:
      log_dir: The directory of the logs, created if needed.
      histogram_freq: The number of epochs between two histograms of each weight. 0 writes none.
      write_graph: True writes the layers of the model for TensorBoard's graph page, not its operations. Subclassed
        models have no graph.
      write_images: True writes the weights as images, with the histograms.
      write_steps_per_second: True writes ``epoch_steps_per_second``, and with batches also ``batch_steps_per_second``.
      update_freq: "epoch", "batch", or the number of batches between two ``batch_<metric>`` values. Writing waits for
        the step.
      profile_batch: The batch that ``rx.profile`` records, or the first and last of a range, counted from 1. 0 records
        none.
      embeddings_freq, embeddings_metadata: Must be left out: the embedding projector reads checkpoints of TensorFlow.

    Raises:
      MissingExtraError: tensorboardX (the extra ``summaries``) is not installed.
      UnsupportedError: ``embeddings_freq`` or ``embeddings_metadata`` is given.
      InvalidArgumentError: ``update_freq`` or ``profile_batch`` has another value.

    Source: keras.callbacks.TensorBoard.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: int | str = "epoch",
        profile_batch: int | str | Sequence[int] = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: Any = None,
    ):
        super().__init__()
        if embeddings_freq or embeddings_metadata is not None:
            raise UnsupportedError(
                "rx.keras.callbacks.TensorBoard writes no embeddings: TensorBoard's projector reads them from checkpoints of "
                "TensorFlow. Leave embeddings_freq and embeddings_metadata out."
            )
        check_installed()
        use_imported()  # for `closed_on_error`, because Keras does not tell callbacks of errors
        self.log_dir = path_of(log_dir, "log_dir", "logs/run-1")
        self.histogram_freq = whole_number("histogram_freq", histogram_freq, least=0)
        self.write_graph, self.write_images = write_graph, write_images
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = _update_freq(update_freq)
        self._first_profiled, self._last_profiled = _range_of(profile_batch)
        self._writers: dict[str, SummaryWriter] = {}
        self._profile = contextlib.ExitStack()
        self._is_profiling = self._is_training = self._is_restored = False
        self._num_batches = self._iterations_before = 0
        self._batch_began = self._epoch_began = 0.0

    # --- what it knows, for CheckpointCallback ----------------------------------------------------------

    def get_state(self) -> dict[str, int]:
        """Returns the number of batches so far. A ``fit`` that resumes continues this count."""
        return {"num_batches": self._num_batches}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Restores the number of batches."""
        self._num_batches, self._is_restored = state["num_batches"], True

    # --- writers ----------------------------------------------------------------------------------------

    @property
    def _train(self) -> SummaryWriter:
        return self._writer("train")

    @property
    def _validation(self) -> SummaryWriter:
        return self._writer("validation")

    def _writer(self, run: str) -> SummaryWriter:
        if run not in self._writers:
            strategy = context.owner_of(self.model)
            self._writers[run] = SummaryWriter(os.path.join(self.log_dir, run), strategy=strategy)
        return self._writers[run]

    def _close(self) -> None:
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()

    def close_after(self, error: BaseException) -> None:
        """Ends the profile and closes the writers of a loop that has raised."""
        self._is_training = self._is_restored = False
        self._end_profile()
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.__exit__(type(error), error, error.__traceback__)

    # --- Keras's hooks ----------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_training = True
        if not self._is_restored:
            self._num_batches = 0
        described = _json_of(self.model) if self.write_graph else None
        if described is not None:
            self._train.keras_model("keras", described, step=0)

    def on_train_end(self, logs: Any = None) -> None:
        self._end_profile()
        self._is_training = self._is_restored = False
        self._close()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.write_steps_per_second:
            self._iterations_before = self._iterations()
            self._epoch_began = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._num_batches += 1
        self._batch_began = time.monotonic()
        if self._num_batches == self._first_profiled and self._train.is_writing:
            self._profile.enter_context(profile(os.path.join(self.log_dir, "train")))
            self._is_profiling = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        number = self._num_batches
        if self.update_freq and number % self.update_freq == 0:
            for name, value in (logs or {}).items():
                self._train.scalar(f"batch_{name}", value, number)
            if self.write_steps_per_second:
                passed = time.monotonic() - self._batch_began
                self._train.scalar("batch_steps_per_second", 1.0 / max(passed, 1e-9), number)
        if self._is_profiling and number >= self._last_profiled:
            jax.block_until_ready(
                jax.tree_util.tree_leaves(logs)
            )  # otherwise the profile would miss the step
            self._end_profile()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = dict(logs or {})
        training = {name: value for name, value in logs.items() if not name.startswith("val_")}
        if logs:
            training.update(self._learning_rates())
        if logs and self.write_steps_per_second:
            passed = time.monotonic() - self._epoch_began
            training["steps_per_second"] = (self._iterations() - self._iterations_before) / max(passed, 1e-9)
        for name, value in training.items():
            self._train.scalar(f"epoch_{name}", value, epoch)
        for name in logs.keys() - training.keys():
            self._validation.scalar(f"epoch_{name.removeprefix('val_')}", logs[name], epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write_weights(epoch)

    def on_test_end(self, logs: Any = None) -> None:
        if getattr(self.model, "optimizer", None) is not None:
            step = self._iterations()
            for name, value in (logs or {}).items():
                self._validation.scalar(f"evaluation_{name}_vs_iterations", value, step)
        if not self._is_training:
            self._close()

    # --- parts ------------------------------------------------------------------------------------------

    def _end_profile(self) -> None:
        self._is_profiling = False
        self._profile.close()

    @property
    def _fitted(self) -> Any:
        return self.model

    def _iterations(self) -> int:
        return int(np.asarray(self._fitted.optimizer.iterations))

    def _learning_rates(self) -> dict[str, float]:
        optimizer = self._fitted.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # the inner one of a LossScaleOptimizer
        several = getattr(optimizer, "optimizers", None)  # those of a MultiOptimizer
        if several is not None:
            return {f"learning_rate_{one.name}": float(one.learning_rate) for one in several}
        if isinstance(optimizer, keras.optimizers.Optimizer):
            return {"learning_rate": float(np.asarray(optimizer.learning_rate))}
        return {}

    def _write_weights(self, epoch: int) -> None:
        for layer in self._fitted.layers:
            for weight in layer.weights:
                if not np.issubdtype(np.dtype(keras.backend.standardize_dtype(weight.dtype)), np.number):
                    continue
                name, value = weight.path.replace(":", "_"), weight.value
                self._train.histogram(f"{name}/histogram", value, epoch)
                picture = _picture_of(value) if self.write_images else None
                if picture is not None:
                    self._train.image(f"{name}/image", picture, epoch)


@contextlib.contextmanager
def closed_on_error(callbacks: Sequence[Any]) -> Iterator[None]:
    """Closes the callbacks of this class if a Keras loop raises."""
    try:
        yield
    except BaseException as error:
        for one in callbacks:
            if isinstance(one, TensorBoard):
                one.close_after(error)
        raise


def _json_of(model: Any) -> str | None:
    """Returns Keras's description of a model whose layers are known before it runs; None for other models and on
    failure.
    """
    if type(model).__name__ not in ("Functional", "Sequential"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns about Keras's variables (Keras 3.15)
            return model.to_json()
    except Exception as error:  # as in Keras's callback: a layer without get_config must not stop training
        log.warning("TensorBoard: cannot write model %r as a graph: %s", model.name, error)
        return None


def _update_freq(given: Any) -> int:
    """Returns the number of batches between two writes, or 0 for none."""
    if given in ("epoch", "batch"):
        return int(given == "batch")
    if isinstance(given, str):
        raise InvalidArgumentError(
            f'update_freq must be "epoch", "batch" or a number of batches, got {given!r}.'
        )
    return whole_number("update_freq", given, least=1)


def _range_of(given: Any) -> tuple[int, int]:
    """Returns the first and the last batch of ``profile_batch``; 0 and 0 for none."""
    parts = given.split(",") if isinstance(given, str) else given
    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    try:
        numbers = [int(part) for part in parts]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (1, 2) or numbers[0] < len(numbers) - 1 or numbers[-1] < numbers[0]:
        raise InvalidArgumentError(
            "profile_batch must be a batch number, counted from 1, or a first and a last number, such as (10, 20), or "
            f"0 for none. Got {given!r}."
        )
    return numbers[0], numbers[-1]


def _picture_of(value: Any) -> Any:
    """Returns a weight as an image, [n, height, width, channels], as Keras does; None if it has too many dims."""
    image = np.squeeze(np.asarray(value))
    if image.ndim == 1:
        image = image.reshape(1, -1, 1, 1)
    elif image.ndim == 2:
        image = image.T if image.shape[0] > image.shape[1] else image
        image = image[None, :, :, None]
    elif image.ndim == 3:
        if keras.config.image_data_format() == "channels_last":
            image = image.transpose(2, 0, 1)
        image = image[..., None]
    if image.ndim != 4 or image.shape[-1] not in (1, 3, 4):
        return None
    return image.astype(np.float32)
