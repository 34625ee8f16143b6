"""Opens every kind of dataset that a user can pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from typing import Any, Final, Protocol, runtime_checkable

from replicax._src.input.adapters.grain import open_grain
from replicax._src.input.adapters.hugging_face import open_hugging_face
from replicax._src.input.adapters.keras import open_keras
from replicax._src.input.adapters.tensorflow import open_tensorflow
from replicax._src.input.adapters.torch import open_torch
from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.elements import (
    Elements,
    NumberedIterator,
    OneShotIterator,
    UnsupportedSourceError,
)
from replicax._src.input.files.dataset import FileDataset
from replicax._src.input.files.share import merged
from replicax._src.input.pipeline import Dataset
from replicax._src.input.steps import Filter, Map

_OPENERS: Final[list[Callable[[Any], Elements | None]]] = [
    open_grain,
    open_tensorflow,
    open_keras,
    open_hugging_face,  # before torch, because Hugging Face's IterableDataset inherits from a class of torch
    open_torch,
]
"""Each returns None for what it does not know."""


def open_elements(dataset: Any) -> Elements:
    """Opens any dataset: arrays, files, another library's dataset, an iterable, or once an iterator.

    Raises:
      UnsupportedSourceError: The value is none of these.
    """
    if isinstance(dataset, Dataset):
        return _open_ours(dataset)
    for open_kind in _OPENERS:
        elements = open_kind(dataset)
        if elements is not None:
            return elements
    _refuse_what_is_no_dataset(dataset)
    name = type(dataset).__name__
    if isinstance(dataset, Iterator):
        iterator = OneShotIterator(dataset)
        reason = (
            f"The position of a one-shot {name} cannot be saved or restored: a generator goes through its "
            "elements once. Use rx.data.from_arrays(...), a grain dataset or a list of batches."
        )
        return Elements(f"a one-shot {name}", iterator.start, look=iterator.look, not_resumable=reason)
    if isinstance(dataset, Sequence):
        return Elements(
            f"a {name} of {len(dataset)} elements",
            lambda: NumberedIterator(dataset.__getitem__, len(dataset)),
            count=lambda: len(dataset),
            fingerprint=lambda: {"length": len(dataset)},
        )
    if isinstance(dataset, Iterable):
        reason = (
            f"The position of a {name} cannot be saved or restored: nothing says that its __iter__ yields the same "
            "again. Use rx.data.from_arrays(...), a grain dataset, or a class with __getitem__ and __len__ that is "
            "registered as a collections.abc.Sequence."
        )
        return Elements(
            f"a {name}",
            lambda: iter(dataset),
            count=lambda: _length(dataset),
            is_count_promised=True,
            not_resumable=reason,
        )
    raise UnsupportedSourceError(
        f"Got {dataset!r} of type {type(dataset).__name__}, which is not a dataset. Use "
        "rx.data.from_arrays(...).batch(n), grain datasets, tf.data.Dataset, torch's DataLoader, Hugging Face "
        "datasets, keras.utils.PyDataset, and iterables of batches (a list, a generator, an object with __iter__)."
    )


def _open_ours(dataset: Dataset) -> Elements:
    is_mapped, source = dataset.has(Map), dataset.source
    if not source.has_arrays and not is_mapped:
        raise UnsupportedElementError(
            f"The elements of {dataset!r} are text or bytes, which devices cannot hold. Call .map(parse), where parse "
            "converts one record to a pytree of arrays, and then .batch(n)."
        )
    of_hint = of_files = None
    if dataset.has_hint:
        of_hint = lambda num, index: _open_ours(dataset.with_hint(num, index))  # noqa: E731
    if isinstance(dataset, FileDataset):
        of_files = lambda num, index: _open_ours(dataset.of_files(num, index))  # noqa: E731
    return Elements(
        source.description,
        dataset.__iter__,
        count=lambda: dataset.cardinality,
        declared_spec=lambda: dataset.element_spec,
        look=dataset.first,
        fingerprint=lambda: dataset.fingerprint,
        are_arrays=not is_mapped,
        is_batched=dataset.is_batched,
        batch_size=dataset.batch_size,
        has_order_of_its_own=dataset.has_order_of_its_own,
        row_bytes=None if dataset.has(Map, Filter) else source.row_bytes,
        is_immutable=not dataset.is_mapped_in_batches,
        count_files=lambda: len(source.files) or None,
        of_files=of_files,
        of_hint=of_hint,
        merge=merged if isinstance(dataset, FileDataset) else None,
    )


def _length(iterable: Iterable[Any]) -> int | None:
    if not isinstance(iterable, Sized):
        return None
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):  # torch and TensorFlow raise these if the length is unknown
        return None


@runtime_checkable
class _SupportsArray(Protocol):
    """Arrays, tensors and tables of any library. They are also iterable over their rows."""

    def __array__(self) -> Any: ...


def _refuse_what_is_no_dataset(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, _SupportsArray):
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
