"""Describes every kind of dataset that a user can pass, so that it can be opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Final

from replicax._src.input.adapters.grain import describe_grain
from replicax._src.input.adapters.hugging_face import describe_hugging_face
from replicax._src.input.adapters.iterables import describe_iterable
from replicax._src.input.adapters.keras import describe_keras
from replicax._src.input.adapters.row_datasets import describe_rows
from replicax._src.input.adapters.tensorflow import describe_tensorflow
from replicax._src.input.adapters.torch import describe_torch
from replicax._src.input.description import Description
from replicax._src.input.elements import Elements, UnsupportedSourceError
from replicax._src.values.array_types import SupportsArray

_DESCRIBERS: Final[list[Callable[[Any], Description | None]]] = [
    describe_rows,
    describe_grain,
    describe_tensorflow,
    describe_keras,
    describe_hugging_face,  # before torch, because Hugging Face's IterableDataset inherits from a class of torch
    describe_torch,
]
"""Each returns None for what it does not know."""


def describe(dataset: Any) -> Description:
    """Describes any dataset: arrays, files, another library's dataset, an iterable, or an iterator. Reads nothing.

    Raises:
      UnsupportedSourceError: The value is none of these.
    """
    for describe_kind in _DESCRIBERS:
        description = describe_kind(dataset)
        if description is not None:
            return description
    _refuse_what_is_no_dataset(dataset)
    description = describe_iterable(dataset)
    if description is not None:
        return description
    raise UnsupportedSourceError(
        f"Got {dataset!r} of type {type(dataset).__name__}, which is not a dataset. Use "
        "rx.data.from_arrays(...).batch(n), grain datasets, tf.data.Dataset, torch's DataLoader, Hugging Face "
        "datasets, keras.utils.PyDataset, and iterables of batches (a list, a generator, an object with __iter__)."
    )


def open_elements(dataset: Any) -> Elements:
    """Opens all of any dataset; see ``describe``."""
    return describe(dataset).open_all()


def _refuse_what_is_no_dataset(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, SupportsArray):  # it is also iterable over its rows
        raise UnsupportedSourceError(
            f"Got {name}, an array and not a dataset. Arrays need a batch size; use "
            "rx.data.from_arrays(x).batch(n)."
        )
    if isinstance(dataset, tuple | Mapping):
        raise UnsupportedSourceError(
            f"Got a {name}, a pytree and not a dataset. Arrays need a batch size; use rx.data.from_arrays(x).batch(n). "
            "Pass a series of batches as a list."
        )
    if dataset is None or isinstance(dataset, str | bytes | bytearray | Set | int | float | complex):
        raise UnsupportedSourceError(
            f"Got {dataset!r} of type {name}, which is not a dataset. Use rx.data.from_arrays(x).batch(n), a "
            "grain dataset, or an iterable of batches."
        )
    if callable(dataset) and not isinstance(dataset, Iterable):
        raise UnsupportedSourceError(
            f"Got {dataset!r}, which is a callable and not a dataset. Call it and pass its result, or "
            "use strategy.distribute_datasets_from_function."
        )
