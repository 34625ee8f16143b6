"""Datasets of ``rx.data``, over the rows of arrays or files."""

from __future__ import annotations

import functools
from typing import Any

from replicax._src.devices.autoshard import AutoShardPolicy
from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.description import DatasetPart, Description
from replicax._src.input.elements import Elements
from replicax._src.input.files.file_dataset import FileDataset
from replicax._src.input.files.share import merged
from replicax._src.input.pipeline import Dataset, DatasetIterator
from replicax._src.input.stream_operations import Filter, Map


def describe_rows(dataset: Any) -> Description | None:
    """Describes a dataset of ``rx.data``; returns None for any other value.

    Raises:
      UnsupportedElementError: Its elements are text or bytes.
    """
    if not isinstance(dataset, Dataset):
        return None
    if not dataset.source.has_arrays and not dataset.has(Map):
        raise UnsupportedElementError(
            f"The elements of {dataset!r} are text or bytes, which devices cannot hold. Call .map(parse), where parse "
            "converts one record to a pytree of arrays, and then .batch(n)."
        )
    return Description(
        dataset.source.description,
        lambda: _elements(dataset),
        lambda part: _elements(_part_of(dataset, part)),
        is_batched=dataset.is_batched,
        has_order_of_its_own=dataset.has_order_of_its_own,
        has_hint=dataset.has_hint,
        count_files=lambda: len(dataset.source.files) or None,
    )


def _part_of(dataset: Dataset, part: DatasetPart) -> Dataset:
    if part.by is AutoShardPolicy.HINT:
        return dataset.with_hint(part.num_shards, part.index)
    assert isinstance(dataset, FileDataset)  # no other has files
    return dataset.shard_files(part.num_shards, part.index)


def _elements(dataset: Dataset) -> Elements:
    is_mapped, source = dataset.has(Map), dataset.source
    return Elements(
        source.description,
        functools.partial(DatasetIterator, dataset, is_of_user=False),
        count=lambda: dataset.cardinality,
        declared_spec=lambda: dataset.element_spec,
        peek=dataset.first,
        fingerprint=lambda: dataset.fingerprint,
        are_arrays=not is_mapped,
        batch_size=dataset.batch_size,
        row_bytes=None if dataset.has(Map, Filter) else source.row_bytes,
        is_immutable=not dataset.is_mapped_in_batches,
        merge=merged if isinstance(dataset, FileDataset) else None,
    )
