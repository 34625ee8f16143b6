"""grain datasets."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np

from replicax._src.input.elements import Elements
from replicax._src.input.specs import INFINITE, ArraySpec, Cardinality


def open_grain(dataset: Any) -> Elements | None:
    """Opens a ``grain.MapDataset`` or ``grain.IterDataset``; returns None for any other value.

    A MapDataset is read in order, in the calling thread. Grain's own default, 16 threads, costs ten times as much for
    elements that are cheap to make. To read with threads, pass ``dataset.to_iter_dataset(grain.ReadOptions(...))``.
    """
    grain = sys.modules.get("grain")
    if grain is None:
        return None
    ordered, length, cardinality = dataset, None, None
    if isinstance(dataset, grain.MapDataset):
        kind = "grain.MapDataset"
        ordered = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0))
        length = None if len(dataset) == sys.maxsize else len(dataset)  # repeat() without a count
        cardinality: Cardinality | None = INFINITE if length is None else length
    elif isinstance(dataset, grain.IterDataset):
        kind = "grain.IterDataset"
    else:
        return None
    return Elements(
        f"a {kind}",
        ordered.__iter__,
        count=lambda: cardinality,
        is_count_promised=True,
        declared_spec=lambda: _declared_spec(dataset),
        fingerprint=lambda: {
            "kind": kind,
            "length": length,
            "transformations": _transformations(dataset),
        },
    )


def _declared_spec(dataset: Any) -> Any:
    try:
        specs = sys.modules["grain"].experimental.get_element_spec(dataset)
    except (ValueError, NotImplementedError):  # a map function does not tell its shapes
        return None
    return jax.tree.map(lambda spec: ArraySpec(tuple(spec.shape), np.dtype(spec.dtype)), specs)


# --- what a dataset is made of ------------------------------------------------------------------------

_WITH_NUMBERS: Final = ("Batch", "Interleave", "Limit", "Mixed", "Range", "Rebatch", "Repeat", "Slice")
"""Transformations whose text has their sizes in it. Those of others have addresses, line numbers or thread counts."""
_MAX_TEXT: Final = 1_000


def _transformations(dataset: Any) -> str:
    """Returns a dataset's transformations as text: the last one first, with lengths where they are known.

    Functions are left out, so a program whose functions were edited resumes with the saved position.
    """
    text = " < ".join(_texts(dataset))
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"


def _texts(dataset: Any) -> Iterator[str]:
    text = name = type(dataset).__name__
    if name.startswith(_WITH_NUMBERS):
        text = str(dataset)
    elif "Shuffle" in name:
        text = f"{name}(seed={vars(dataset).get('_seed')})"
    is_map = isinstance(dataset, sys.modules["grain"].MapDataset)
    yield f"{text} of {len(dataset)}" if is_map else text
    for parent in dataset.parents:
        yield from _texts(parent)
