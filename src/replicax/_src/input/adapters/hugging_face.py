"""Hugging Face datasets."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

import jax
import numpy as np

from replicax._src.input.arrays import InconsistentRowsError, UnsupportedElementError
from replicax._src.input.elements import (
    Elements,
    IndexedPass,
    NotResumableError,
    Pass,
    StreamPass,
    Traits,
    UnsupportedSourceError,
    as_arrays,
    check_same_dataset,
    first_element,
)
from replicax._src.input.order import Cardinality

log = logging.getLogger("replicax")

_SHUFFLED: Final = (
    "The position of a Hugging Face IterableDataset that is shuffled cannot be saved or restored: the rows in its "
    "shuffle buffer would be lost. Shuffle a datasets.Dataset (without streaming), or use rx.data.from_parquet(...)."
)


def open_hugging_face(dataset: Any) -> Elements | None:
    """Opens a ``datasets.Dataset`` or ``datasets.IterableDataset`` batched with ``.batch(n)``; None if it is neither.

    Columns are read as NumPy arrays, whatever the dataset's format; a ``with_transform`` is applied. A state that
    was loaded into an IterableDataset before is not used: give ours to ``set_state``.

    The elements are batches. Rows of lists (``{"input_ids": [...]}``) look like batches of numbers; they are told
    by their lengths: where all columns are one list per element, all elements but the last need the same length.
    Rows of integers that all have one length are not told, and warned of.

    Raises:
      UnsupportedSourceError: It is a DatasetDict; one of its splits is a dataset.
    """
    # The library's name is one that programs give to modules of their own, so one of its files is asked for.
    if "datasets.arrow_dataset" not in sys.modules:
        return None
    datasets = sys.modules["datasets"]
    if isinstance(dataset, datasets.Dataset):
        return TableElements(dataset)
    if isinstance(dataset, datasets.IterableDataset):
        return StreamElements(dataset)
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise UnsupportedSourceError(
            f"Got a {type(dataset).__name__} with the splits {list(dataset)}, which is no dataset. Pass one of them: "
            f"dataset[{next(iter(dataset), 'train')!r}].batch(n)."
        )
    return None


@final
class TableElements(Elements):
    """The elements of a ``datasets.Dataset``, which are read by their numbers."""

    def __init__(self, dataset: Any):
        self._has_transform = dataset.format["type"] == "custom"
        self._num_elements = len(dataset)
        self._name = _Name(f"a Hugging Face Dataset of {_count(self._num_elements, 'element')}")
        self._dataset = dataset
        if not self._has_transform:
            columns, others_too = dataset.format["columns"], dataset.format["output_all_columns"]
            self._dataset = dataset.with_format("numpy", columns=columns, output_all_columns=others_too)

    @property
    def traits(self) -> Traits:
        return Traits(self._name.description, is_immutable=not self._has_transform)

    @property
    def cardinality(self) -> Cardinality | None:
        return self._num_elements

    def iterate(self) -> Pass:
        check = _BatchCheck(self._name)
        return IndexedPass(lambda index: check.checked(self._at(index)), self._num_elements)

    def declared_spec(self) -> Any:
        return None

    def first(self) -> Any:
        return first_element(self._at(index) for index in range(min(self._num_elements, 1)))

    def _at(self, index: int) -> Any:
        return _as_arrays(self._dataset[index])


@final
class StreamElements(Elements):
    """The elements of a ``datasets.IterableDataset``. Its shards, which often are files, can be dealt out."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._name = _Name(f"a Hugging Face IterableDataset of {_count(dataset.num_shards, 'shard')}")

    @property
    def traits(self) -> Traits:
        return Traits(self._name.description, num_files=self._dataset.num_shards, of_files=self._of_files)

    @property
    def cardinality(self) -> Cardinality | None:
        return None

    def iterate(self) -> Pass:
        view = self._view()
        if _has_shuffle_buffer(view):
            return StreamPass(_BatchCheck(self._name).map(view), _SHUFFLED)
        return _IterableDatasetPass(view, self._name)

    def declared_spec(self) -> Any:
        return None

    def first(self) -> Any:
        return first_element(map(_as_arrays, self._view()))

    def _view(self) -> Any:
        # Iterators of one dataset share the position that it knows, and copies share their sources.
        view = copy.deepcopy(self._dataset).with_format("numpy")
        view.set_epoch(self._dataset.epoch)
        return view

    def _of_files(self, num_shards: int, index: int) -> Elements:
        return StreamElements(self._dataset.shard(num_shards=num_shards, index=index, contiguous=False))


@final
class _IterableDatasetPass(Pass):
    """A pass through an IterableDataset of its own; its state is that dataset's, and the fingerprint."""

    def __init__(self, dataset: Any, name: _Name):
        self._dataset, self._name = dataset, name
        self._fingerprint = _fingerprint(dataset)
        self._rest = _BatchCheck(name).map(dataset)
        self._num_elements = 0

    def __next__(self) -> Any:
        element = next(self._rest)
        self._num_elements += 1
        return element

    def get_state(self) -> Any:
        mine = {"position": self._num_elements, "epoch": self._dataset.epoch, **self._fingerprint}
        return {**mine, "hugging_face": self._dataset.state_dict() if self._num_elements else None}

    def set_state(self, state: Any) -> None:
        check_same_dataset(state, self._fingerprint)
        position, epoch, theirs = state["position"], state.get("epoch"), state.get("hugging_face")
        is_theirs = isinstance(theirs, dict) and isinstance(theirs.get("examples_iterable"), dict)
        if position < 0 or not isinstance(epoch, int) or is_theirs != (position > 0):
            raise NotResumableError(
                f"The state is not one that get_state returned for an IterableDataset: position {position!r}, epoch "
                f"{epoch!r}, hugging_face {theirs!r:.200}."
            )
        self._num_elements = position
        self._dataset.set_epoch(epoch)
        if position:
            self._dataset.load_state_dict(theirs)
        self._rest = _BatchCheck(self._name).map(self._dataset)


def _fingerprint(dataset: Any) -> dict[str, Any]:
    """Returns what tells a stream from another. How many rows there are is not known."""
    features = dataset.features
    return {
        "kind": "Hugging Face IterableDataset",
        "split": None if dataset.split is None else str(dataset.split),
        "num_shards": dataset.num_shards,
        "columns": None if features is None else list(features),
        "steps": " < ".join(_step_text(step) for step in _steps(dataset)),
    }


def _steps(dataset: Any) -> Iterator[Any]:
    """Yields the iterables that a dataset is made of, the last one first; none if it does not say."""
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
    """Whether it shuffles in a buffer, whose rows its state lacks. True as well if that cannot be found out."""
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
        value = value.astype(str)  # so that the message speaks of text
    try:
        return as_arrays(value)
    except UnsupportedElementError as error:
        raise UnsupportedElementError(
            f"The column {name!r}: {error} Or leave it out: dataset.remove_columns({name!r})."
        ) from None


@final
class _Name:
    """What a dataset is called in messages, and whether it was warned of."""

    def __init__(self, description: str):
        self.description = description
        self._has_warned = False

    def warn(self, num_rows: int) -> None:
        """Says, once, that each element might be a row."""
        if not self._has_warned:
            self._has_warned = True
            # (Not a warning: a batch that .batch(n) made of plain numbers looks the same.)
            log.info(
                "Input: an element of %s, which has one list of integers per column, is taken as a batch of %d rows. "
                "If it is one row (the tokens of a text), call .batch(n) on the dataset.",
                self.description,
                num_rows,
            )


@final
class _BatchCheck:
    """Tells batches of numbers from rows of lists: only elements all of whose arrays have one dim can be either.

    What ``.batch(n)`` makes has n rows, and the last at most n. Tokenized texts each have a length of their own.
    """

    def __init__(self, name: _Name):
        self._name = name
        self._num_rows: int | None = None
        self._had_fewer = False

    def checked(self, element: Any) -> Any:
        """Returns an element.

        Raises:
          InconsistentRowsError: It and those before it are rows.
        """
        arrays = jax.tree.leaves(element)
        if not arrays or any(array.ndim != 1 for array in arrays):
            return element
        num_rows = len(arrays[0])
        if self._num_rows is None:
            self._num_rows = num_rows
            if all(array.dtype.kind in "iu" for array in arrays):
                self._name.warn(num_rows)
        if self._had_fewer or num_rows > self._num_rows:
            raise InconsistentRowsError(
                f"The elements of {self._name.description} have lists of different lengths, so they seem to be rows, not "
                "batches: call .batch(n) on it, with the global batch size n, after padding the lists to one length."
            )
        self._had_fewer = num_rows < self._num_rows
        return element

    def map(self, elements: Iterable[Any]) -> Iterator[Any]:
        """Yields elements as arrays, all of them checked."""
        return (self.checked(_as_arrays(element)) for element in elements)
