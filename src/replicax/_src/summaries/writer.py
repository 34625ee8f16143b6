"""``SummaryWriter``: writes data for TensorBoard in a thread, in one process of a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Self, final

import jax.numpy as jnp
import numpy as np

from replicax._src.cluster.counters import counters
from replicax._src.cluster.detect import choose_resolver
from replicax._src.cluster.peers import joined_peers
from replicax._src.scope.context import get_strategy, has_strategy
from replicax._src.strategies.strategy import Strategy
from replicax._src.summaries import current, events
from replicax._src.summaries.summary_values import check_place, fetching, taken
from replicax._src.summaries.thread import PendingSummary, WritingThread
from replicax._src.values.future_value import FutureValue
from replicax._src.vocabulary.errors import InvalidArgumentError, SummaryError
from replicax._src.vocabulary.options import path_of, whole_number

log = logging.getLogger("replicax")
_Check = Callable[[str, tuple[int, ...], Any], None]
_AT_THE_END_S = 60.0
_AFTER_AN_ERROR_S = 10.0


@final
class SummaryWriter:
    """Writes numbers, histograms, images and texts by step for TensorBoard, in TensorFlow's form.

    Every process of a cluster creates it and calls its methods with the same arguments. Only the chief writes a file:
    the task ``chief``, worker 0 without one, an evaluator, or the coordinator of parameter servers. Call the methods
    outside of replica functions and ``rx.function``, with values from ``reduce``, ``gather`` or a metric. They do not
    wait for devices or the disk: arrays are copied on their devices, and a thread fetches and writes them. If more than
    ``max_in_flight`` summaries wait, the caller blocks for at most 300 s. The end of a ``with`` block waits until all
    are written, but at most 10 s after an error. The next call raises an error of the thread.

    Args:
      logdir: The folder of the run, which is created if it does not exist. ``gs://`` and ``s3://`` need clients that
        tensorboardX finds.
      strategy: The strategy whose chief writes. None: the strategy of the scope in which the writer is created or first
        used, or else the cluster that this process has joined or that the environment describes.
      max_in_flight: The number of summaries that may wait for the thread.
      flush_every_s: The seconds after which written summaries are on the disk.
      purge_step: The step at which a run restarts. TensorBoard drops the later records of earlier files.

    Raises:
      MissingExtraError: tensorboardX is not installed. It is in the extra ``summaries``.

    Source: tf.summary.SummaryWriter, tf.summary.create_file_writer.

    >>> import tempfile
    >>> import replicax as rx
    >>> with rx.SummaryWriter(tempfile.mkdtemp()) as writer:
    ...     for step in range(3):
    ...         writer.scalar("loss", 1 / (step + 1), step)
    True
    True
    True
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        strategy: Strategy | None = None,
        max_in_flight: int = 256,
        flush_every_s: float = 10.0,
        purge_step: int | None = None,
    ):
        self.logdir = path_of(logdir, "logdir", "logs/run-1")
        self._strategy = strategy or (get_strategy() if has_strategy() else None)
        self._max_in_flight = whole_number("max_in_flight", max_in_flight, least=1)
        self._flush_every_s = flush_every_s
        self._purge_step = None if purge_step is None else whole_number("purge_step", purge_step, least=0)
        self._thread: WritingThread | None = None
        self._writes: bool | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        events.check_installed()

    @property
    def is_writing(self) -> bool:
        """True if this process writes. The value is fixed at the first summary, except that another process writes
        after the death of the chief, if the live processes continue.
        """
        if self._writes is None:
            self._strategy = self._strategy or (get_strategy() if has_strategy() else None)
        if self._writes is None or joined_peers() is not None:
            self._writes = _is_chief(self._strategy)
        return self._writes

    # --- summaries ------------------------------------------------------------------------------------

    def scalar(self, name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
        """Writes one number. ``replicax top`` shows one with the name "loss" or "train/loss" as the loss.

        Args:
          name: The name of the series, such as ``train/loss``.
          data: [] numeric: a Python number, an array, a variable, a ``RemoteValue``.
          step: An int, or a variable such as ``optimizer.iterations``; None: the step of
            ``rx.summary.experimental.set_step``.
          description: A description in Markdown.

        Returns:
          True if this process writes it.

        Raises:
          PerReplicaUseError: The value has a component per replica. Reduce it first.
          ContextError: The caller is in a function that is traced, or that every replica runs.
          InvalidArgumentError: There is no step, or the data have a wrong shape or dtype.
          SummaryError: An earlier summary could not be written, or the queue was full for 300 s.
        """
        counters.note_scalar(name, data)
        return self._add("scalar", name, data, step, description)

    def histogram(
        self, name: str, data: Any, step: Any = None, buckets: int = 30, description: str | None = None
    ) -> bool:
        """Writes a histogram of the finite numbers of an array of any shape.

        Args:
          buckets: The number of intervals between the smallest and the largest number. name, data, step, description:
            See ``scalar``. The whole array is fetched, so do not write it at every step.
        """
        whole_number("buckets", buckets, least=1)
        return self._add("histogram", name, data, step, buckets, description)

    def image(
        self, name: str, data: Any, step: Any = None, max_outputs: int = 3, description: str | None = None
    ) -> bool:
        """Writes images.

        Args:
          data: [n, height, width, channels] with 1 (grey), 3 (RGB) or 4 (RGBA) channels: uint8, or floating within 0
            and 1.
          max_outputs: The number of first images to write.
          name, step, description: See ``scalar``.
        """
        whole_number("max_outputs", max_outputs, least=0)
        return self._add("image", name, data, step, max_outputs, description)

    def text(self, name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
        """Writes a text in Markdown, or an array of texts, which TensorBoard shows as a table.

        Args:
          data: A str, or a pytree of lists of them.
          name, step, description: See ``scalar``.
        """
        return self._add("text", name, data, step, description)

    def keras_model(self, name: str, json: str, step: int) -> bool:
        """Writes a Keras model from its ``to_json``, as ``rx.keras.callbacks.TensorBoard`` does."""
        return self._add("keras_model", name, json, step)

    def _add(self, what: str, name: str, data: Any, step: Any, *options: Any) -> bool:
        check_place(what, name)
        check, make = _KINDS[what]
        if self._is_closed:
            raise InvalidArgumentError(
                f"{what}({name!r}): this SummaryWriter of {self.logdir} has been closed. Make another one."
            )
        if not current.should_record_summaries():
            return False
        step = taken(current.step_or_default(step, what, name), what, name)
        data = taken(data, what, name)
        if not isinstance(data, FutureValue):
            check(name, data.shape, data.dtype)
        if not self.is_writing:
            return False
        wall_time, fetch_step, fetch = time.time(), _step_of(step, what, name), fetching(data)

        def write(file: events.EventFile) -> None:
            array = fetch()
            check(name, array.shape, array.dtype)
            file.add(make(name, array, *options), fetch_step(), wall_time)

        self._running_thread().add(PendingSummary(f"{what}({name!r})", write))
        return True

    def _running_thread(self) -> WritingThread:
        with self._lock:
            if self._thread is None:
                try:
                    file = events.EventFile(self.logdir, self._purge_step)
                except OSError as error:
                    raise SummaryError(f"Summaries cannot be written to {self.logdir}: {error}.") from error
                self._thread = WritingThread(file, self._max_in_flight, self._flush_every_s)
                weakref.finalize(
                    self, self._thread.stop_if_running, _AT_THE_END_S
                )  # stops at the latest when Python exits
            return self._thread

    # --- the default writer ---------------------------------------------------------------------------

    def as_default(self, step: Any = None) -> contextlib.AbstractContextManager[SummaryWriter]:
        """Makes this the default writer of this thread in the block, for ``rx.summary.scalar`` and similar
        functions.
        """
        return current.as_default(self, step)

    def set_as_default(self, step: Any = None) -> None:
        """Makes this the default writer of this thread from now on."""
        current.set_as_default(self, step)

    # --- its life -------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 300.0) -> None:
        """Waits until all summaries are on the disk.

        Raises:
          SummaryError: A summary could not be written, or not all were written within ``timeout_s``.
        """
        if self._thread is not None:
            self._thread.flush(timeout_s)

    def close(self, timeout_s: float = 300.0) -> None:
        """Writes all waiting summaries and closes the file. Later summaries are refused. A second call does nothing,
        unless the first one timed out: then it waits again.

        Raises:
          SummaryError: A summary could not be written, or not all were written within ``timeout_s``.
        """
        self._is_closed = True
        if self._thread is not None:
            self._thread.stop(timeout_s)
            self._thread.check()

    def statistics(self) -> dict[str, float]:
        """Returns ``num_written``, ``num_waiting`` and ``waited_s``, the time for which callers were blocked."""
        if self._thread is None:
            return {"num_written": 0, "num_waiting": 0, "waited_s": 0.0}
        return self._thread.statistics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        if kind is None:
            self.close()
            return
        try:  # the user's error must not wait long, and no other may replace it
            self.close(_AFTER_AN_ERROR_S)
        except (SummaryError, InvalidArgumentError) as failure:
            log.warning("After an error in `with`: %s", failure)

    def __repr__(self) -> str:
        return f"<SummaryWriter of {self.logdir}>"


def _is_chief(strategy: Strategy | None) -> bool:
    if strategy is not None:
        return strategy.extended.should_save_summary
    peers = joined_peers()
    return choose_resolver().membership.is_chief if peers is None else peers.is_leader


def _check_numeric(what: str, name: str, dtype: Any) -> None:
    if not (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise InvalidArgumentError(f"{what}({name!r}) takes real numbers, got {dtype}.")


def _check_scalar(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    _check_numeric("scalar", name, dtype)
    if shape != ():
        raise InvalidArgumentError(
            f"scalar({name!r}) takes one number, got shape {shape}. Reduce it first, or write a histogram."
        )


def _check_image(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    is_color = dtype == np.uint8 or jnp.issubdtype(dtype, jnp.floating)
    if len(shape) != 4 or shape[-1] not in (1, 3, 4) or not is_color:
        raise InvalidArgumentError(
            f"image({name!r}) takes [n, height, width, 1, 3 or 4] of uint8, or of floats within 0 and 1, got "
            f"{dtype}{list(shape)}. For one image give image[None]."
        )


def _check_text(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    del shape
    if np.dtype(dtype).kind not in "UT":
        raise InvalidArgumentError(f"text({name!r}) takes a str, or lists of them, got {dtype}.")


# The check and the builder of each kind of summary.
_KINDS: dict[str, tuple[_Check, Callable[..., Any]]] = {
    "scalar": (_check_scalar, events.scalar),
    "histogram": (lambda name, _, dtype: _check_numeric("histogram", name, dtype), events.histogram),
    "image": (_check_image, events.image),
    "text": (_check_text, events.text),
    "keras_model": (lambda *_: None, events.keras_model),
}


def _step_of(step: Any, what: str, name: str) -> Callable[[], int]:
    if isinstance(step, FutureValue) or step.shape or not jnp.issubdtype(step.dtype, jnp.integer):
        raise InvalidArgumentError(f"{what}({name!r}): the step must be a whole number, got {step!r:.200}.")
    if step.dtype == np.uint64 and int(step) > np.iinfo(np.int64).max:
        raise InvalidArgumentError(f"{what}({name!r}): files have steps of up to 2**63 - 1, got {int(step)}.")
    fetch = fetching(step)
    return lambda: int(fetch())
