"""Hugging Face datasets."""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

import jax
import numpy as np

from replicax._src.input.arrays import InconsistentRowsError, UnsupportedElementError
from replicax._src.input.description import Description
from replicax._src.input.elements import (
    Elements,
    NumberedIterator,
    Pass,
    UnsupportedSourceError,
    as_arrays,
)

log = logging.getLogger("replicax")

_SHUFFLED: Final = (
    "The position of a Hugging Face IterableDataset that is shuffled cannot be saved or restored: the rows in its "
    "shuffle buffer would be lost. Shuffle a datasets.Dataset (without streaming), or use rx.data.from_parquet(...)."
)


def describe_hugging_face(dataset: Any) -> Description | None:
    """Describes a ``datasets.Dataset`` or ``datasets.IterableDataset`` batched with ``.batch(n)``; returns None for
    other values.

    Columns are read as NumPy arrays, whatever the dataset's format. A ``with_transform`` is applied. A state that was
    loaded into an IterableDataset before is ignored; use ``set_state``.

    The elements are batches. Rows of lists (``{"input_ids": [...]}``) look like batches of numbers, and are detected by
    their lengths: if every column is one list per element, all elements but the last need the same length. Rows of
    integers with one common length cannot be detected, so a log line warns of them.

    Raises:
      UnsupportedSourceError: The value is a DatasetDict. Pass one of its splits.
    """
    # Programs may have a module of the same name, so this checks for one of the library's files.
    if "datasets.arrow_dataset" not in sys.modules:
        return None
    datasets = sys.modules["datasets"]
    if isinstance(dataset, datasets.Dataset):
        return Description(_text_of_table(dataset), lambda: _table(dataset))
    if isinstance(dataset, datasets.IterableDataset):
        return Description(
            _text_of_stream(dataset),
            lambda: _stream(dataset),
            lambda part: _stream(
                dataset.shard(num_shards=part.num_shards, index=part.index, contiguous=False)
            ),
            count_files=lambda: dataset.num_shards,
        )
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise UnsupportedSourceError(
            f"Got a {type(dataset).__name__} with the splits {list(dataset)}, not a dataset. Pass one split: "
            f"dataset[{next(iter(dataset), 'train')!r}].batch(n)."
        )
    return None


def _text_of_table(dataset: Any) -> str:
    return f"a Hugging Face Dataset of {_count(len(dataset), 'element')}"


def _text_of_stream(dataset: Any) -> str:
    return f"a Hugging Face IterableDataset of {_count(dataset.num_shards, 'shard')}"


def _table(dataset: Any) -> Elements:
    """Returns the elements of a ``datasets.Dataset``, which are read by index."""
    num_elements = len(dataset)
    has_transform = dataset.format["type"] == "custom"
    view = dataset
    if not has_transform:
        columns, others_too = dataset.format["columns"], dataset.format["output_all_columns"]
        view = dataset.with_format("numpy", columns=columns, output_all_columns=others_too)
    description = _text_of_table(dataset)
    new_check = _checks_of(description)

    def start() -> NumberedIterator:
        check = new_check()
        return NumberedIterator(lambda index: check.checked(_as_arrays(view[index])), num_elements)

    return Elements(
        description,
        start,
        count=lambda: num_elements,
        peek=lambda: (_as_arrays(view[index]) for index in range(min(num_elements, 1))),
        fingerprint=lambda: {"length": num_elements},
        are_arrays=True,
        is_immutable=not has_transform,
    )


def _stream(dataset: Any) -> Elements:
    """Returns the elements of a ``datasets.IterableDataset``. Its shards, which often are files, can be distributed
    over workers.
    """
    description = _text_of_stream(dataset)
    new_check = _checks_of(description)
    return Elements(
        description,
        lambda: _StreamIterator(_view(dataset), new_check),
        peek=lambda: map(_as_arrays, _view(dataset)),
        fingerprint=lambda: _fingerprint(dataset),
        not_resumable=_SHUFFLED if _has_shuffle_buffer(dataset) else None,
        are_arrays=True,
    )


def _view(dataset: Any) -> Any:
    # Iterators of one dataset share its position, and shallow copies share their sources.
    view = copy.deepcopy(dataset).with_format("numpy")
    view.set_epoch(dataset.epoch)
    return view


@final
class _StreamIterator(Pass):
    """A pass through its own copy of an IterableDataset. Its position is the epoch and the position of that copy."""

    def __init__(self, dataset: Any, new_check: Callable[[], _BatchCheck]):
        self._dataset, self._new_check = dataset, new_check
        self._rest = new_check().map(dataset)

    def __next__(self) -> Any:
        return next(self._rest)

    def get_state(self) -> dict[str, Any]:
        """Returns the position. The dataset's part is None before the first element."""
        return {"epoch": self._dataset.epoch, "hugging_face": self._dataset.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position."""
        epoch, theirs = state["epoch"], state["hugging_face"]
        if not isinstance(epoch, int) or not (
            theirs is None or isinstance(theirs["examples_iterable"], dict)
        ):
            raise ValueError(f"epoch {epoch!r}, hugging_face {theirs!r:.200}")
        self._dataset.set_epoch(epoch)
        if theirs is not None:
            self._dataset.load_state_dict(theirs)
        self._rest = self._new_check().map(self._dataset)


def _fingerprint(dataset: Any) -> dict[str, Any]:
    """Returns JSON that tells a stream from others. The number of rows is not known."""
    features = dataset.features
    return {
        "kind": "Hugging Face IterableDataset",
        "split": None if dataset.split is None else str(dataset.split),
        "num_shards": dataset.num_shards,
        "columns": None if features is None else list(features),
        "steps": " < ".join(_step_text(step) for step in _steps(dataset)),
    }


def _steps(dataset: Any) -> Iterator[Any]:
    """Yields the iterables that a dataset is made of, the last one first; none if they cannot be found."""
    pending = [vars(dataset).get("_ex_iterable")]
    while pending:
        part = pending.pop()
        if isinstance(part, list | tuple):
            pending.extend(part)
        elif type(part).__module__ == "datasets.iterable_dataset":
            yield part
            pending.extend(vars(part).values())


def _step_text(step: Any) -> str:
    sizes = {
        name: vars(step).get(name)
        for name in ("batched", "batch_size", "drop_last_batch", "n", "step", "offset")
    }
    text = ", ".join(f"{name}={size}" for name, size in sizes.items() if isinstance(size, int))
    return f"{type(step).__name__}({text})"


def _has_shuffle_buffer(dataset: Any) -> bool:
    """True if the dataset shuffles in a buffer, whose rows are not in its state, or if that cannot be found out."""
    names = [type(step).__name__ for step in _steps(dataset)]
    return not names or "BufferShuffledExamplesIterable" in names


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


# --- rows and batches ---------------------------------------------------------------------------------


def _as_arrays(element: Mapping[str, Any]) -> Any:
    return {name: _column(name, value) for name, value in element.items()}


def _column(name: str, value: Any) -> Any:
    if (
        isinstance(value, np.ndarray)
        and value.dtype == object
        and value.size
        and isinstance(value.flat[0], str)
    ):
        value = value.astype(str)  # so that the message names text
    try:
        return as_arrays(value)
    except UnsupportedElementError as error:
        raise UnsupportedElementError(
            f"The column {name!r}: {error} Or leave it out: dataset.remove_columns({name!r})."
        ) from None


def _checks_of(description: str) -> Callable[[], _BatchCheck]:
    """Returns a maker of checks, one for each pass over a dataset. All checks together log only once that rows look
    alike.
    """

    @functools.cache
    def note(num_rows: int) -> None:
        # (This is not a warning, because a batch of plain numbers made by .batch(n) looks the same.)
        log.info(
            "Input: an element of %s, which has one list of integers per column, is taken as a batch of %d rows. "
            "If it is one row (the tokens of a text), call .batch(n) on the dataset.",
            description,
            num_rows,
        )

    return lambda: _BatchCheck(description, note)


@final
class _BatchCheck:
    """Tells batches of numbers from rows of lists. Only elements whose arrays all have one dim are ambiguous.

    A batch made by ``.batch(n)`` has n rows, and the last one at most n. Tokenized texts differ in length.
    """

    def __init__(self, description: str, note: Callable[[int], None]):
        self._description, self._note = description, note
        self._num_rows: int | None = None
        self._had_fewer = False

    def checked(self, element: Any) -> Any:
        """Returns an element after the check.

        Raises:
          InconsistentRowsError: This element and the earlier ones are rows.
        """
        arrays = jax.tree.leaves(element)
        if not arrays or any(array.ndim != 1 for array in arrays):
            return element
        num_rows = len(arrays[0])
        if self._num_rows is None:
            self._num_rows = num_rows
            if all(array.dtype.kind in "iu" for array in arrays):
                self._note(num_rows)
        if self._had_fewer or num_rows > self._num_rows:
            raise InconsistentRowsError(
                f"The elements of {self._description} have lists of different lengths, so they seem to be rows, not "
                "batches: call .batch(n) on it, with the global batch size n, after padding the lists to one length."
            )
        self._had_fewer = num_rows < self._num_rows
        return element

    def map(self, elements: Iterable[Any]) -> Iterator[Any]:
        """Yields elements as arrays, after the check."""
        return (self.checked(_as_arrays(element)) for element in elements)
