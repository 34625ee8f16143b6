"""Python's own iterators, sequences and other iterables of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from replicax._src.input.description import Description
from replicax._src.input.elements import Elements, NumberedIterator, OneShotIterator


def describe_iterable(dataset: Any) -> Description | None:
    """Describes an iterable of batches; returns None for any other value."""
    name = type(dataset).__name__
    if isinstance(dataset, Iterator):
        iterator, text = OneShotIterator(dataset), f"a one-shot {name}"
        reason = (
            f"The position of a one-shot {name} cannot be saved or restored: a generator goes through its "
            "elements once. Use rx.data.from_arrays(...), a grain dataset or a list of batches."
        )
        return Description(
            text, lambda: Elements(text, iterator.start, peek=iterator.peek, not_resumable=reason)
        )
    if isinstance(dataset, Sequence):
        text = f"a {name} of {len(dataset)} elements"
        return Description(text, lambda: _of_sequence(dataset, text))
    if isinstance(dataset, Iterable):
        text = f"a {name}"
        return Description(text, lambda: _of_iterable(dataset, text))
    return None


def _of_sequence(dataset: Sequence[Any], text: str) -> Elements:
    return Elements(
        text,
        lambda: NumberedIterator(dataset.__getitem__, len(dataset)),
        count=lambda: len(dataset),
        fingerprint=lambda: {"length": len(dataset)},
    )


def _of_iterable(dataset: Iterable[Any], text: str) -> Elements:
    reason = (
        f"The position of {text} cannot be saved or restored: nothing says that its __iter__ yields the same "
        "again. Use rx.data.from_arrays(...), a grain dataset, or a class with __getitem__ and __len__ that is "
        "registered as a collections.abc.Sequence."
    )
    return Elements(
        text,
        lambda: iter(dataset),
        count=lambda: _length(dataset),
        is_count_promised=True,
        not_resumable=reason,
    )


def _length(iterable: Iterable[Any]) -> int | None:
    if not isinstance(iterable, Sized):
        return None
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):  # torch and TensorFlow raise these if the length is unknown
        return None
