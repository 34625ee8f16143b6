"""Datasets over the rows of arrays or files: a source of rows and the steps that the methods have added."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, final

import jax
import numpy as np

from replicax._src.devices.autoshard import check_shard
from replicax._src.input.arrays import (
    UnsupportedElementError,
    as_array,
    common_num_rows,
    converted,
    describe_shapes,
)
from replicax._src.input.chunks import ArrayRows, Chunk, elements_of
from replicax._src.input.element_specs import INFINITE, ArraySpec, Cardinality
from replicax._src.input.elements import NotResumableError, Pass
from replicax._src.input.files.paths import shorten
from replicax._src.input.stream_operations import (
    Batch,
    Cursor,
    Filter,
    Map,
    Opener,
    Path,
    Repeat,
    RowOperation,
    Shuffle,
    Take,
    TakeShard,
    description_of,
)
from replicax._src.user.listening import listener
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import whole_number

SHARD_HINT: Final = -1
"""Given to ``Dataset.shard``: the policy HINT says how many shards there are, and which is whose."""


@final
@dataclass(frozen=True, eq=False)
class RowSource:
    """The source of the rows of a dataset, before any step.

    Attributes:
      description: The display text.
      open: Opens the source at its first row.
      length: Returns the number of rows, or None if only a read of the files could tell.
      row_spec: Returns a pytree of ArraySpecs, or None if it is not known.
      fingerprint: Returns JSON that tells the source from others.
      has_arrays: True if rows are numbers and arrays; False if they are text or bytes.
      row_bytes: The size of one row if all of them are in memory; otherwise None.
      files: The paths of its files, in order; empty for arrays.
      with_files: Returns the same source over other files; None for arrays.
    """

    description: str
    open: Callable[[], Cursor]
    length: Callable[[], int | None]
    row_spec: Callable[[], Any]
    fingerprint: Callable[[], dict[str, Any]]
    has_arrays: bool = True
    row_bytes: int | None = None
    files: tuple[str, ...] = ()
    with_files: Callable[[tuple[str, ...]], RowSource] | None = None

    def __str__(self) -> str:
        return f"{self.description}: {shorten(self.files)}" if self.files else self.description


@dataclass
class PassCounter:
    """Numbers the passes over a dataset, which several callers may iterate."""

    num_begun: int = 0

    def begin(self) -> int:
        """Returns the number of the pass that starts now."""
        self.num_begun += 1
        return self.num_begun - 1


class _NamesOfDataset(abc.ABCMeta):
    """The metaclass of datasets, for the error of a constructor that only TensorFlow has."""

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(cls, name: str) -> Any:
            raise _no_such_attribute(cls, name)


def _no_such_attribute(cls: type, name: str) -> AttributeError:
    text = f"{cls.__name__} has no attribute {name!r}."
    if name.startswith("_"):  # Python and tools look for these
        return AttributeError(text, name=name, obj=cls)
    advice = listener().missing_attribute(cls, name, "dataset")
    text = text if advice is None else f"{text} {advice}"
    return AttributeError(
        f"{text} Datasets of replicax have batch, filter, map, prefetch, repeat, shard, shuffle and take. A strategy "
        "also distributes iterables of batches and the datasets of grain and tf.data, which have more methods.",
        name=name,
        obj=cls,  # Python adds the most similar name
    )


class Dataset(metaclass=_NamesOfDataset):
    """A dataset over the rows of arrays in memory, or of files.

    Every method returns a new dataset and does not change this one. The steps apply in the order of the calls, as in
    tf.data. ``shuffle().batch(n)`` shuffles rows, ``batch(n).shuffle()`` shuffles batches. With ``repeat().batch(n)`` a
    batch can span two epochs; with ``batch(n).repeat()`` each epoch ends with its partial batch.
    """

    def __init__(
        self, source: RowSource, steps: Sequence[RowOperation] = (), passes: PassCounter | None = None
    ):
        """Private. Use ``from_arrays``, ``from_parquet`` and similar functions."""
        self.source, self.steps, self.passes = source, tuple(steps), passes or PassCounter()

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            # Python calls this for an unknown name, or after a property raised an AttributeError. It only raises.
            if name.startswith("_") or name in dir(type(self)):
                return object.__getattribute__(self, name)
            raise _no_such_attribute(type(self), name)

    @staticmethod
    def from_tensor_slices(tensors: Any) -> ArrayDataset:
        """TensorFlow's name for ``from_arrays``. A list becomes one array, as in tf.data.

        >>> [batch.tolist() for batch in Dataset.from_tensor_slices([1, 2, 3]).batch(2)]
        [[1, 2], [3]]
        """
        return from_arrays(jax.tree.map(_joined_list, tensors, is_leaf=lambda value: isinstance(value, list)))

    @property
    def is_batched(self) -> bool:
        """True if the elements are batches, False if they are rows."""
        return self.has(Batch)

    @functools.cached_property
    def cardinality(self) -> Cardinality | None:
        """The number of elements (rows, or batches after ``batch``); ``math.inf`` if it never ends, None if only a read
        can tell.
        """
        length: Cardinality | None = self.source.length()
        for step in self.steps:
            length = step.length(length)
        return length

    @functools.cached_property
    def element_spec(self) -> Any:
        """A pytree of ArraySpecs (``shape``, ``dtype``). The batch size is None if the last batch may differ.

        It is None if it is not known, as for records and after ``map``.
        """
        if self.has(Map):
            return None
        dims = [s.batch_size if s.drop_remainder else None for s in self.steps if isinstance(s, Batch)]
        return jax.tree.map(lambda spec: ArraySpec((*dims, *spec.shape), spec.dtype), self.source.row_spec())

    def map(self, function: Callable[..., Any], num_parallel_calls: int | None = None) -> Self:
        """Replaces every element by ``function(element)``, or by ``function(*element)`` for a tuple, as in tf.data.

        Before ``batch`` an element is one row, and the function returns a pytree of arrays or numbers with the same
        shapes and dtypes for every row. After ``batch`` it is a full batch, which is much faster for arrays and
        columns. The prefetching thread calls the function. It must return new arrays and not change its arguments.

        >>> dataset = from_arrays((np.arange(4), np.arange(4) ** 2)).batch(2)
        >>> [total.tolist() for total in dataset.map(lambda x, y: x + y)]
        [[0, 2], [6, 12]]

        Args:
          function: Called once for each element in each pass. A row is ``bytes`` or ``str`` in a file of records, and
            ``{column: value}`` in a file of columns.
          num_parallel_calls: Accepted as in tf.data, and ignored: one thread calls the function.
        """
        del num_parallel_calls
        return self._with(Map(function))

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Keeps the elements for which ``predicate(element)`` is true. It gets the same arguments as the function of
        ``map``.
        """
        return self._with(Filter(predicate))

    def prefetch(self, buffer_size: int | None = None) -> Self:
        """Does nothing; it exists because tf.data has it. A distributed dataset, or one given to ``fit``, is always
        prefetched.
        """
        del buffer_size
        return self._with()

    @abc.abstractmethod
    def shuffle(
        self, buffer_size: Any, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Self:
        """Puts the elements in random order."""

    def repeat(self, count: int | None = None) -> Self:
        """Repeats the elements ``count`` times, or without end if ``count`` is None or -1."""
        if count is not None:
            count = whole_number("count", count, least=-1, meaning="-1 or None is for ever")
        return self._with(Repeat(None if count == -1 else count))

    def take(self, count: int) -> Self:
        """Keeps the first ``count`` elements (rows, or batches after ``batch``), or all of them if ``count`` is -1."""
        count = whole_number("count", count, least=-1, meaning="-1 is all")
        return self._with() if count == -1 else self._with(Take(count))

    def shard(self, num_shards: int, index: int) -> Self:
        """Keeps every ``num_shards``-th element, starting with the element ``index``: rows, or batches after ``batch``.

        ``dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(n)`` gives each worker its own
        rows. Shuffle with a seed, or after ``shard``; otherwise the shards overlap. Every worker reads all files; the
        policy FILE distributes files over workers instead.

        Args:
          num_shards: The number of shards. For the policy HINT pass ``SHARD_HINT`` for both arguments.
          index: The index of the shard to keep, from 0.

        Raises:
          InvalidArgumentError: ``index`` is not less than ``num_shards``, or negative.
        """
        if num_shards == index == SHARD_HINT:
            return self._with(TakeShard(None, None))
        return self._with(TakeShard(*check_shard(num_shards, index)))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Self:
        """Joins every ``batch_size`` rows into one element, also across files.

        Args:
          batch_size: The number of rows per batch; for a distributed dataset, the global batch size.
          drop_remainder: True drops a last batch with fewer rows. By default all rows are kept.

        Raises:
          InvalidArgumentError: ``batch_size`` is less than 1, or the dataset has been batched.
        """
        batch_size = whole_number("batch_size", batch_size, least=1)
        if self.is_batched:
            raise InvalidArgumentError(
                f"This {type(self).__name__} has been batched; call batch once, on its rows."
            )
        return self._with(Batch(batch_size, drop_remainder))

    def __iter__(self) -> DatasetIterator:
        """Restarts from the first element."""
        return DatasetIterator(self)

    def __len__(self) -> int:
        if self.cardinality == INFINITE:
            raise TypeError(f"This {type(self).__name__} is infinite and has no len(); use take(n).")
        if self.cardinality is None:
            raise TypeError(
                f"This {type(self).__name__} has no len(), because its length is unknown before it is read."
            )
        return int(self.cardinality)

    def __bool__(self) -> bool:
        return True  # a dataset is true for every len(), also if that raises

    def __repr__(self) -> str:
        steps = "".join(f".{description_of(step)}" for step in self.steps)
        return f"<{type(self).__name__} of {self.source}>{steps}"

    # --- for distributed datasets ---------------------------------------------------------------------

    def open(self, path: Path) -> Cursor:
        """Opens the stream of its elements; see ``Opener``."""
        opener: Opener = lambda path: self.source.open()  # noqa: E731 because every pass has the same order
        for step in self.steps:
            opener = functools.partial(step.open, opener)
        return opener(path)

    def has(self, *kinds: type[RowOperation]) -> bool:
        """True if one of its steps has one of these types."""
        return any(isinstance(step, kinds) for step in self.steps)

    @property
    def is_mapped_in_batches(self) -> bool:
        """True if the user's function returns batches; False if ``batch`` joins rows."""
        kinds = [type(step) for step in self.steps]
        return Map in (kinds[kinds.index(Batch) :] if Batch in kinds else kinds)

    @property
    def batch_size(self) -> int | None:
        """The number of rows per batch; None before ``batch``."""
        return next((step.batch_size for step in self.steps if isinstance(step, Batch)), None)

    @property
    def seeds(self) -> list[int]:
        """The seeds of all shuffles."""
        return [step.seed for step in self.steps if isinstance(step, Shuffle)]

    @property
    def has_order_of_its_own(self) -> bool:
        """True if a shuffle has no seed, so that other processes read other orders."""
        return any(isinstance(step, Shuffle) and step.is_seed_drawn for step in self.steps)

    @property
    def has_hint(self) -> bool:
        """True if it has a ``shard(SHARD_HINT, SHARD_HINT)``."""
        return any(isinstance(step, TakeShard) and step.index is None for step in self.steps)

    def with_hint(self, num_shards: int, index: int) -> Self:
        """Returns the dataset with ``shard(num_shards, index)`` for each ``shard(SHARD_HINT, SHARD_HINT)``."""
        given = TakeShard(num_shards, index)
        steps = [given if isinstance(step, TakeShard) and step.index is None else step for step in self.steps]
        return type(self)(self.source, steps, self.passes)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON that tells the dataset from those with other rows or steps."""
        return {"steps": [description_of(step) for step in self.steps], **self.source.fingerprint()}

    def first(self) -> Iterator[Any]:
        """Yields the first element, if there is one, without using an order of its shuffles."""
        return iter(elements_of(self.open((self.passes.num_begun,)).read(1)))

    def _with(self, *steps: RowOperation) -> Self:
        return type(self)(self.source, (*self.steps, *steps))

    def _shuffled(self, buffer_size: int | None, seed: int | None, reshuffle: bool) -> Self:
        is_drawn = seed is None
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        return self._with(Shuffle(buffer_size, whole_number("seed", seed, least=0), reshuffle, is_drawn))


class _Arrays:
    """Arrays by their identity, which are not kept alive. A WeakValueDictionary does the same, and takes a microsecond
    for each array.

    Attributes:
      references: By ``id``; those of deleted arrays go when there are many.
    """

    def __init__(self) -> None:
        self.references: dict[int, weakref.ref[np.ndarray]] = {}
        self._most = 10_000

    def note(self, arrays: Sequence[np.ndarray]) -> None:
        self.references.update(zip(map(id, arrays), map(weakref.ref, arrays), strict=True))
        if len(self.references) > self._most:
            alive = {key: each for key, each in list(self.references.items()) if each() is not None}
            self.references, self._most = alive, max(10_000, 2 * len(alive))

    def __contains__(self, array: object) -> bool:
        reference = self.references.get(id(array))
        return reference is not None and reference() is array


_yielded = _Arrays()


def is_of_dataset(value: Any) -> bool:
    """Returns True if a dataset yielded this array as a part of a batch to the user's loop."""
    return value in _yielded


def _note_yielded(element: Any) -> None:
    """Notes the arrays of a batch, without keeping them."""
    leaves = jax.tree_util.tree_leaves(element)
    _yielded.note([leaf for leaf in leaves if isinstance(leaf, np.ndarray)])


@final
class DatasetIterator(Pass):
    """A single pass through a dataset. The pass starts when the first element or the position is requested.

    Its position is (pass, cursor), with the number of started passes and the seeds, so that later passes are equal too.

    Args:
      is_of_user: True if the user's loop gets the elements; False if they are distributed.
    """

    def __init__(self, dataset: Dataset, *, is_of_user: bool = True):
        self._dataset = dataset
        self._is_noted = is_of_user and dataset.is_batched
        self._cursor: Cursor | None = None
        self._constant: dict[str, Any] = {}

    def __next__(self) -> Any:
        chunk = (self._cursor or self._begin()).read(1)
        if not len(chunk):
            raise StopIteration
        element = elements_of(chunk)[0]
        if self._is_noted:
            _note_yielded(element)
        return element

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last returned element as JSON."""
        cursor = self._cursor or self._begin()
        return {"passes": self._dataset.passes.num_begun, **self._constant, "cursor": cursor.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position in an equal dataset. Later passes continue as those of that dataset."""
        dataset, steps, before = self._dataset, self._dataset.steps, (self._cursor, self._constant)
        try:
            dataset.steps = with_seeds(dataset.steps, state["seeds"])
            self._begin(int(state["pass"])).set_state(state["cursor"])
            dataset.passes.num_begun = int(state["passes"])
        except Exception as error:
            dataset.steps, (self._cursor, self._constant) = steps, before
            if isinstance(error, NotResumableError):
                raise
            raise NotResumableError(
                f"This position does not belong to {dataset!r}: {error}. Use it with a dataset of the same data and "
                "steps."
            ) from error

    def _begin(self, number: int | None = None) -> Cursor:
        dataset = self._dataset
        number = dataset.passes.begin() if number is None else number
        self._constant = {"pass": number, "seeds": dataset.seeds}
        self._cursor = dataset.open((number,))
        return self._cursor


def with_seeds(steps: Sequence[RowOperation], seeds: Sequence[int]) -> tuple[RowOperation, ...]:
    """Returns the steps with the seeds of a position."""
    num_shuffles = sum(isinstance(step, Shuffle) for step in steps)
    if len(seeds) != num_shuffles:
        raise ValueError(f"it has {len(seeds)} shuffles, but the dataset has {num_shuffles}")
    left = iter(seeds)
    return tuple(
        dataclasses.replace(step, seed=next(left)) if isinstance(step, Shuffle) else step for step in steps
    )


# --- arrays in memory ---------------------------------------------------------------------------------


def from_arrays(arrays: Any) -> ArrayDataset:
    """Makes a dataset whose elements are the rows of arrays. Call ``batch`` on it to get batches.

    The arrays are not copied, so do not change them while the dataset is used. JAX arrays on accelerators are copied to
    the host once.

    >>> dataset = from_arrays((np.arange(5), np.arange(5) ** 2)).batch(2)
    >>> [labels.tolist() for features, labels in dataset]
    [[0, 1], [4, 9], [16]]

    Args:
      arrays: ``[num_rows, ...]``, or a pytree (tuples, lists, dicts) of such with equal ``num_rows``.

    Raises:
      InconsistentRowsError: The numbers of rows differ.
      UnsupportedElementError: A leaf is not an array, has no rows, or has a dtype that no device can hold.
    """
    hosted = converted(arrays, lambda leaf: np.asarray(as_array(leaf)))
    if any(array.ndim == 0 for array in jax.tree.leaves(hosted)):
        raise UnsupportedElementError(
            f"from_arrays needs arrays [num_rows, ...], got a number: {describe_shapes(hosted)}. A Python "
            "list is a pytree here; convert it with np.asarray(...)."
        )
    return ArrayDataset(_source_of(hosted, common_num_rows(hosted)))


def _source_of(arrays: Any, num_rows: int) -> RowSource:
    leaves = jax.tree.leaves(arrays)
    shapes = [[str(array.dtype), *array.shape[1:]] for array in leaves]
    return RowSource(
        f"arrays of {num_rows} rows",
        functools.partial(_open_arrays, arrays),
        length=functools.partial(_given, num_rows),
        row_spec=functools.partial(
            _given, jax.tree.map(lambda array: ArraySpec(array.shape[1:], array.dtype), arrays)
        ),
        fingerprint=functools.partial(_given, {"num_rows": num_rows, "arrays": shapes}),
        row_bytes=sum(array.itemsize * math.prod(array.shape[1:]) for array in leaves),
    )


# Functions with names, so that datasets can be pickled and sent to workers.


def _open_arrays(arrays: Any) -> Cursor:
    return ChunkCursor(ArrayRows.all_of(arrays))


def _given(value: Any) -> Any:
    return value


@final
class ArrayDataset(Dataset):
    """A dataset over arrays in memory. Make one with ``from_arrays``. Batches are slices of the arrays."""

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> ArrayDataset:
        """Puts all elements in a random order. Any part of it is computed when it is read, so neither time nor memory
        grows with the rows.

        Args:
          buffer_size: Accepted as in tf.data, and ignored: all elements are shuffled.
          seed: Equal seeds give equal orders. None draws a random seed. In a cluster whose processes all hold the full
            data, pass a seed, so that all use the same order.
          reshuffle_each_iteration: Take a new order each time the dataset is iterated or repeated.

        Raises:
          InvalidArgumentError: The dataset never ends, the seed is negative, or the buffer size is less than 1.
        """
        if buffer_size is not None:
            meaning = "all elements are shuffled for every value. Call shuffle(), or shuffle(seed=0) for equal orders"
            whole_number("buffer_size", buffer_size, least=1, meaning=meaning)
        if self.cardinality == INFINITE:
            raise InvalidArgumentError(
                "A dataset that never ends cannot be shuffled; call shuffle before repeat."
            )
        return self._shuffled(None, seed, reshuffle_each_iteration)


@final
class ChunkCursor(Cursor):
    """A cursor over rows in memory, in their stored order."""

    def __init__(self, rows: Chunk):
        self._rows, self._next = rows, 0

    def read(self, num_rows: int) -> Chunk:
        start, self._next = self._next, min(self._next + num_rows, len(self._rows))
        return self._rows[start : self._next]

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = int(state)


def _joined_list(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, list) else leaf
