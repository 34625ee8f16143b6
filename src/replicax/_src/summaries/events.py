"""Builds TensorBoard records in TensorFlow 2's form from host values. No devices, no threads.

tensorboardX defines the records and writes the file.
"""

from __future__ import annotations

import importlib
import io
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from replicax._src.packaging.extras import missing_extra

_file_numbers = itertools.count()


def check_installed() -> None:
    """Raises MissingExtraError if tensorboardX is not installed."""
    _part("event_file_writer")


def _part(name: str) -> Any:
    try:
        return importlib.import_module(f"tensorboardX.{name}")
    except ImportError as error:
        raise missing_extra("Writing summaries", "summaries", "tensorboardX") from error


@final
class EventFile:
    """One file of a run, in a folder that is created if it does not exist.

    Args:
      logdir: The folder of the run.
      purge_step: The step from which TensorBoard drops the records of earlier files of the run.
    """

    def __init__(self, logdir: str, purge_step: int | None = None):
        _part("record_writer").directory_check(logdir)
        suffix = f".{os.getpid()}.{next(_file_numbers)}.v2"
        self._file = _part("event_file_writer").EventsWriter(os.path.join(logdir, "events"), suffix)
        if purge_step is not None:
            events = _part("proto.event_pb2")
            begins = events.SessionLog(status=events.SessionLog.START)
            self._write(step=purge_step, session_log=begins)
        self._file.flush()

    def add(self, value: Any, step: int, wall_time: float) -> None:
        """Appends a summary that a function below has built."""
        summary = _part("proto.summary_pb2").Summary(value=[value])
        self._write(step=step, wall_time=wall_time, summary=summary)

    def flush(self) -> None:
        """Writes all appended summaries to the disk."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        event = _part("proto.event_pb2").Event(**{"wall_time": time.time(), **fields})
        self._file.write_event(event)


def scalar(name: str, data: np.ndarray, description: str | None) -> Any:
    """Builds the summary of one number."""
    return _summary("scalars", name, _tensor("DT_FLOAT", (), float_val=[float(data)]), description)


def histogram(name: str, data: np.ndarray, buckets: int, description: str | None) -> Any:
    """Builds a histogram of the finite numbers over equal intervals: rows of left end, right end, count."""
    numbers = data.astype(np.float64).reshape(-1)
    numbers = numbers[np.isfinite(numbers)]
    table = np.zeros((buckets, 3))
    if numbers.size and numbers.min() == numbers.max():  # TensorFlow's form for equal values
        table[:, :2] = numbers[0]
        table[-1, 2] = numbers.size
    elif numbers.size:
        counts, edges = np.histogram(numbers, buckets)
        table = np.stack([edges[:-1], edges[1:], counts], axis=1)
    tensor = _tensor("DT_DOUBLE", table.shape, tensor_content=table.tobytes())
    return _summary("histograms", name, tensor, description)


def image(name: str, data: np.ndarray, max_outputs: int, description: str | None) -> Any:
    """Builds the summary of the first images of [n, height, width, channels]. Floating values are within 0 and 1."""
    pictures = [_png(picture) for picture in data[:max_outputs]]
    parts = [str(data.shape[2]).encode(), str(data.shape[1]).encode(), *pictures]
    return _summary("images", name, _tensor("DT_STRING", (len(parts),), string_val=parts), description)


def text(name: str, data: np.ndarray, description: str | None) -> Any:
    """Builds the summary of one text or an array of texts, in Markdown."""
    parts = [str(one).encode() for one in data.reshape(-1)]
    return _summary("text", name, _tensor("DT_STRING", data.shape, string_val=parts), description)


def keras_model(name: str, json: np.ndarray) -> Any:
    """Builds the summary of a Keras model for TensorBoard's graph page."""
    tensor = _tensor("DT_STRING", (), string_val=[str(json).encode()])
    return _summary("graph_keras_model", name, tensor, None, b"1")


def _summary(plugin: str, name: str, tensor: Any, description: str | None, content: bytes = b"") -> Any:
    parts = _part("proto.summary_pb2")
    metadata = parts.SummaryMetadata(
        plugin_data=parts.SummaryMetadata.PluginData(plugin_name=plugin, content=content),
        summary_description=description or "",
    )
    return parts.Summary.Value(tag=name, metadata=metadata, tensor=tensor)


def _tensor(dtype: str, shape: Sequence[int], **content: Any) -> Any:
    shapes = _part("proto.tensor_shape_pb2").TensorShapeProto
    dims = [shapes.Dim(size=size) for size in shape]
    return _part("proto.tensor_pb2").TensorProto(dtype=dtype, tensor_shape=shapes(dim=dims), **content)


def _png(picture: np.ndarray) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("Writing summaries of images", "summaries", "pillow") from error
    if picture.dtype != np.uint8:
        # This is TensorFlow's rounding.
        picture = np.clip(np.nan_to_num(picture.astype(np.float32)) * 255.5, 0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(content, "png")
    return content.getvalue()
