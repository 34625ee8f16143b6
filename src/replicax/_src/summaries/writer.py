"""``SummaryWriter``: what TensorBoard shows, written by one process of a cluster, by a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, final

import jax.numpy as jnp
import numpy as np

from replicax._src.cluster.detect import choose_resolver
from replicax._src.cluster.peers import joined_peers
from replicax._src.context import get_strategy, has_strategy
from replicax._src.errors import InvalidArgumentError, SummaryError
from replicax._src.options import path_of, whole_number
from replicax._src.parameter_servers.coordinator.remote_value import RemoteValue
from replicax._src.summaries import current, events
from replicax._src.summaries.taking import check_place, fetching, taken
from replicax._src.summaries.thread import Entry, WritingThread

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

log = logging.getLogger("replicax")
_Check = Callable[[str, tuple[int, ...], Any], None]
_AT_THE_END_S = 60.0
_AFTER_AN_ERROR_S = 10.0


@final
class SummaryWriter:
    """Writes what TensorBoard shows: numbers, histograms, images and texts by step, in TensorFlow's form.

    Every process of a cluster makes it and calls its methods, with the same arguments; the chief (worker 0 if there is
    none; an evaluator too, which is on its own) writes, and only there is a file. With parameter servers the
    coordinator is the chief. Call them outside of replica functions and ``rx.function``, on values that ``reduce``,
    ``gather`` or a metric gave. They do not wait for devices, nor for the disk: arrays are copied where they are, and a
    thread fetches and writes them. If more than ``max_in_flight`` are behind, the caller waits, 300 s at most. The end
    of a ``with`` waits until all is written; after an error 10 s at most. What goes wrong in the thread is raised by
    the next call.

    Args:
      logdir: The folder of the run, made if need be; ``gs://`` and ``s3://`` if tensorboardX finds their clients.
      strategy: Whose chief writes. None: of the scope in which the writer is made or first used, else of the cluster
        that this process has joined or that the environment describes.
      max_in_flight: How many summaries may wait for the thread.
      flush_every_s: After how many seconds what has been written is on the disk.
      purge_step: For a run that begins again at this step: TensorBoard drops what earlier files have from it on.

    Raises:
      MissingExtraError: tensorboardX is not installed: the extra ``summaries``.

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
        """Whether this process is the one that writes; known from the first summary on, and then fixed."""
        if self._writes is None:
            self._writes = _is_chief(self._strategy)
        return self._writes

    # --- summaries ------------------------------------------------------------------------------------

    def scalar(self, name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
        """One number.

        Args:
          name: Of the series, ``train/loss``.
          data: [] numeric: a Python number, an array, a variable, a ``RemoteValue``.
          step: An int, or a variable such as ``optimizer.iterations``; None: ``rx.summary.experimental.set_step``'s.
          description: In Markdown.

        Returns:
          Whether this process writes it.

        Raises:
          PerReplicaUseError: It has a component for each replica: reduce it first.
          ContextError: In a function that is traced, or that every replica runs.
          InvalidArgumentError: There is no step, or the data are not of this kind.
          SummaryError: An earlier summary could not be written, or too many are behind for 300 s.
        """
        return self._add("scalar", name, data, step, description)

    def histogram(
        self, name: str, data: Any, step: Any = None, buckets: int = 30, description: str | None = None
    ) -> bool:
        """How the numbers of an array of any shape are distributed; what is not finite is left out.

        Args:
          buckets: How many intervals between the smallest and the largest.
          name, data, step, description: As ``scalar``. The whole array is fetched: write it every so many steps.
        """
        whole_number("buckets", buckets, least=1)
        return self._add("histogram", name, data, step, buckets, description)

    def image(
        self, name: str, data: Any, step: Any = None, max_outputs: int = 3, description: str | None = None
    ) -> bool:
        """Pictures.

        Args:
          data: [n, height, width, channels] with 1 (grey), 3 (RGB) or 4 (RGBA) channels: uint8, or floating within 0
            and 1.
          max_outputs: How many of the n, the first ones.
          name, step, description: As ``scalar``.
        """
        whole_number("max_outputs", max_outputs, least=0)
        return self._add("image", name, data, step, max_outputs, description)

    def text(self, name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
        """A text, or an array of texts, which TensorBoard shows as a table; in Markdown.

        Args:
          data: A str, or a pytree of lists of them.
          name, step, description: As ``scalar``.
        """
        return self._add("text", name, data, step, description)

    def keras_model(self, name: str, json: str, step: int) -> bool:
        """A Keras model, as its ``to_json`` describes it; what ``rx.keras.callbacks.TensorBoard`` writes."""
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
        if not isinstance(data, RemoteValue):
            check(name, data.shape, data.dtype)
        if not self.is_writing:
            return False
        wall_time, fetch_step, fetch = time.time(), _step_of(step, what, name), fetching(data)

        def write(file: events.EventFile) -> None:
            array = fetch()
            check(name, array.shape, array.dtype)
            file.add(make(name, array, *options), fetch_step(), wall_time)

        self._running_thread().add(Entry(f"{what}({name!r})", write))
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
                    self, self._thread.stop_unless_asked, _AT_THE_END_S
                )  # at the latest when Python ends
            return self._thread

    # --- the default writer ---------------------------------------------------------------------------

    def as_default(self, step: Any = None) -> contextlib.AbstractContextManager[SummaryWriter]:
        """Inside, in this thread, ``rx.summary.scalar`` and its kin write here; with ``step``, if they name none."""
        return current.as_default(self, step)

    def set_as_default(self, step: Any = None) -> None:
        """As ``as_default``, from now on."""
        current.set_as_default(self, step)

    # --- its life -------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 300.0) -> None:
        """Waits until all summaries are on the disk.

        Raises:
          SummaryError: One could not be written, or they were not after ``timeout_s``.
        """
        if self._thread is not None:
            self._thread.flush(timeout_s)

    def close(self, timeout_s: float = 300.0) -> None:
        """Writes what is waiting, and ends. Further summaries are refused. Closing again does nothing, but where it
        took too long: then it waits once more.

        Raises:
          SummaryError: One could not be written, or they were not after ``timeout_s``.
        """
        self._is_closed = True
        if self._thread is not None:
            self._thread.stop(timeout_s)
            self._thread.check()

    def statistics(self) -> dict[str, float]:
        """``num_written``; ``num_waiting`` for the thread; ``waited_s``, how long callers waited for it."""
        if self._thread is None:
            return {"num_written": 0, "num_waiting": 0, "waited_s": 0.0}
        return self._thread.statistics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        if kind is None:
            self.close()
            return
        try:  # the error is not to wait for what may never come, and to be the one that is raised
            self.close(_AFTER_AN_ERROR_S)
        except (SummaryError, InvalidArgumentError) as failure:
            log.warning("After an error in `with`: %s", failure)

    def __repr__(self) -> str:
        return f"<SummaryWriter of {self.logdir}>"


def _is_chief(strategy: Strategy | None) -> bool:
    strategy = strategy or (get_strategy() if has_strategy() else None)
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
            f"{dtype}{list(shape)}. Of one picture give image[None]."
        )


def _check_text(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    del shape
    if np.dtype(dtype).kind not in "UT":
        raise InvalidArgumentError(f"text({name!r}) takes a str, or lists of them, got {dtype}.")


# What may be written of each kind, and its form.
_KINDS: dict[str, tuple[_Check, Callable[..., Any]]] = {
    "scalar": (_check_scalar, events.scalar),
    "histogram": (lambda name, _, dtype: _check_numeric("histogram", name, dtype), events.histogram),
    "image": (_check_image, events.image),
    "text": (_check_text, events.text),
    "keras_model": (lambda *_: None, events.keras_model),
}


def _step_of(step: Any, what: str, name: str) -> Callable[[], int]:
    if isinstance(step, RemoteValue) or step.shape or not jnp.issubdtype(step.dtype, jnp.integer):
        raise InvalidArgumentError(f"{what}({name!r}): the step must be a whole number, got {step!r:.200}.")
    if step.dtype == np.uint64 and int(step) > np.iinfo(np.int64).max:
        raise InvalidArgumentError(f"{what}({name!r}): files have steps of up to 2**63 - 1, got {int(step)}.")
    fetch = fetching(step)
    return lambda: int(fetch())
