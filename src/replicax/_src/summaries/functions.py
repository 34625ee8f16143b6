"""TensorFlow's summary functions, such as ``rx.summary.scalar``, which write to the default writer."""

from __future__ import annotations

import os
from typing import Any

from replicax._src.cluster.counters import counters
from replicax._src.summaries.current import default_writer
from replicax._src.summaries.writer import SummaryWriter


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
) -> SummaryWriter:
    """Creates a ``SummaryWriter`` from the arguments of TensorFlow's function.

    Args:
      logdir: The folder of the run.
      max_queue: The number of summaries that may wait for the writing thread; 256 by default.
      flush_millis: The milliseconds after which written summaries are on the disk; 10,000 by default. filename_suffix,
        name: Accepted and ignored.

    Source: tf.summary.create_file_writer.
    """
    del filename_suffix, name
    given: dict[str, Any] = {}
    if max_queue is not None:
        given["max_in_flight"] = max_queue
    if flush_millis is not None:
        given["flush_every_s"] = flush_millis / 1000
    return SummaryWriter(logdir, **given)


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Calls ``SummaryWriter.scalar`` of the default writer; returns False without one.

    With or without a writer, ``replicax top`` shows the number as the loss if its name is "loss" or "train/loss".

    Source: tf.summary.scalar.
    """
    writer = default_writer()
    if writer is None:
        counters.note_scalar(name, data)
        return False
    return writer.scalar(name, data, step, description)


def histogram(
    name: str, data: Any, step: Any = None, buckets: int = 30, description: str | None = None
) -> bool:
    """Calls ``SummaryWriter.histogram`` of the default writer; returns False without one. Source:
    tf.summary.histogram.
    """
    writer = default_writer()
    return writer is not None and writer.histogram(name, data, step, buckets, description)


def image(
    name: str, data: Any, step: Any = None, max_outputs: int = 3, description: str | None = None
) -> bool:
    """Calls ``SummaryWriter.image`` of the default writer; returns False without one. Source: tf.summary.image."""
    writer = default_writer()
    return writer is not None and writer.image(name, data, step, max_outputs, description)


def text(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Calls ``SummaryWriter.text`` of the default writer; returns False without one. Source: tf.summary.text."""
    writer = default_writer()
    return writer is not None and writer.text(name, data, step, description)


def flush(writer: SummaryWriter | None = None) -> None:
    """Calls ``SummaryWriter.flush`` of ``writer``, or of the default writer. Source: tf.summary.flush."""
    writer = writer or default_writer()
    if writer is not None:
        writer.flush()
