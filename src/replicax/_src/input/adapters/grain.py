"""grain datasets."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import numpy as np

from replicax._src.input.description import Description
from replicax._src.input.element_specs import INFINITE, ArraySpec, Cardinality
from replicax._src.input.elements import Elements


def describe_grain(dataset: Any) -> Description | None:
    """Describes a ``grain.MapDataset`` or ``grain.IterDataset``; returns None for any other value.

    A MapDataset is read in order, in the calling thread. Grain's own default, 16 threads, costs ten times as much for
    elements that are cheap to make. To read with threads, pass ``dataset.to_iter_dataset(grain.ReadOptions(...))``.
    """
    grain = sys.modules.get("grain")
    if grain is None:
        return None
    if isinstance(dataset, grain.MapDataset):
        return Description("a grain.MapDataset", lambda: _of_map(dataset))
    if isinstance(dataset, grain.IterDataset):
        kind = "grain.IterDataset"
        return Description(f"a {kind}", lambda: _elements(dataset, kind, dataset.__iter__, None, None))
    return None


def _of_map(dataset: Any) -> Elements:
    ordered = dataset.to_iter_dataset(sys.modules["grain"].ReadOptions(num_threads=0))
    length = None if len(dataset) == sys.maxsize else len(dataset)  # repeat() without a count
    cardinality = INFINITE if length is None else length
    return _elements(dataset, "grain.MapDataset", ordered.__iter__, length, cardinality)


def _elements(
    dataset: Any,
    kind: str,
    start: Callable[[], Iterator[Any]],
    length: int | None,
    cardinality: Cardinality | None,
) -> Elements:
    return Elements(
        f"a {kind}",
        start,
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
