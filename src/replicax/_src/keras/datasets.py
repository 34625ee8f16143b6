"""Distributed datasets as what Keras takes for ``x``: a ``PyDataset`` of whole batches, on the host."""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import jax
import keras
import numpy as np

from replicax._src.errors import InvalidArgumentError, KerasScopeError, MixedStrategiesError
from replicax._src.input.agreed import AgreedParts
from replicax._src.input.dataset import DistributedDataset, DistributedIterator
from replicax._src.input.elements import EmptyDatasetError, NotResumableError, Pass
from replicax._src.input.pipeline import Dataset
from replicax._src.input.reading import Reader
from replicax._src.input.sources import LocalRows
from replicax._src.input.specs import INFINITE, Cardinality
from replicax._src.lowering.batch import WorkerRows
from replicax._src.narrowing import narrowed, narrowed_nest
from replicax._src.strategies.datasets import distribute
from replicax._src.values import DistributedValues

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

_END_OF_DATA: Final = np.zeros((0,) * 7, bool)
"""In place of a batch, where a dataset whose length is not known has ended. Nothing else looks like it."""
_MOST_LOOKED_AT: Final = 4
_NUM_POSITIONS: Final = 4
"""Keras may have taken a batch or two that its loop has not come to."""


def is_end(batch: Any) -> bool:
    """Whether there is no further batch. (Keras may have put what it was given on a device.)"""
    if not isinstance(batch, tuple) or len(batch) != 1:
        return False
    (leaf,) = batch
    return (
        isinstance(leaf, (np.ndarray, jax.Array)) and leaf.shape == _END_OF_DATA.shape and leaf.dtype == bool
    )


def check_not_per_replica(method: str, argument: str, value: Any) -> None:
    """Raises if what Keras is to take as arrays has parts for replicas.

    Raises:
      InvalidArgumentError: It is, or has in it, a PerReplica.
    """
    nest = value if isinstance(value, (tuple, list, dict)) else [value]
    if any(
        isinstance(leaf, DistributedValues) for leaf in (nest.values() if isinstance(nest, dict) else nest)
    ):
        raise InvalidArgumentError(
            f"{method}(): `{argument}` is a per-replica value, an element of a distributed dataset, and Keras takes whole "
            f"batches. Pass the DistributedDataset to fit, evaluate or predict; or the batch before it is distributed."
        )


def as_keras_input(data: Any, strategy: Strategy, argument: str, given: Mapping[str, Any], steps: str) -> Any:
    """What Keras understands in place of a dataset of ours; anything else as it is.

    Args:
      data: What was given for ``argument``.
      strategy: Of the model.
      argument: ``"x"`` or ``"validation_data"``.
      given: All arguments, by name.
      steps: The name of the one that says how many batches to take.

    Raises:
      MixedStrategiesError: It was distributed by another strategy.
      KerasScopeError: It was distributed, and the model was made outside of every scope.
      InvalidArgumentError: It is an iterator, or never ends, or arguments are given that it leaves no room for.
      EmptyDatasetError: It has no batch.
    """
    if isinstance(data, (tuple, list)) and len(data) == 1:
        return as_keras_input(data[0], strategy, argument, given, steps) if _is_ours(data[0]) else data
    if not _is_ours(data):
        return data
    name = type(data).__name__
    if isinstance(data, DistributedIterator):
        raise InvalidArgumentError(
            f"Keras goes through its data once per epoch, and `{argument}` is a DistributedIterator, which ends. Pass the "
            "DistributedDataset that it was made from."
        )
    if not isinstance(data, DistributedDataset):
        data = distribute(strategy.topology, data, None, None)
    elif data.placer.topology is not strategy.topology:
        raise _of_another_strategy(strategy, argument)
    if argument == "x":
        check_alone(name, given)
    cardinality = _agreed_cardinality(data)
    if cardinality == 0:
        raise _empty()
    if cardinality == INFINITE and given.get(steps) is None:
        raise InvalidArgumentError(
            f"`{argument}` is a {name} without end, and Keras would go on for ever: say how many batches to take, with "
            f"`{steps}`, or leave `repeat` out."
        )
    return DistributedInput(data, cardinality, ends_by_itself=given.get(steps) is None)


def _agreed_cardinality(data: DistributedDataset) -> Cardinality | None:
    """How many steps all processes take: as many as the one with the most."""
    here, peers = data.cardinality, data.placer.topology.peers
    if peers is None:
        return here
    of_all = peers.gather("keras steps", here, "to compare the lengths of datasets")
    if INFINITE in of_all:
        return INFINITE
    return None if None in of_all else max(of_all)


def _is_ours(data: Any) -> bool:
    return isinstance(data, (Dataset, DistributedDataset, DistributedIterator))


def check_alone(name: str, given: Mapping[str, Any]) -> None:
    """Raises if rows are given beside a dataset, which holds everything."""
    for other in ("y", "sample_weight"):
        if given.get(other) is not None:
            raise InvalidArgumentError(
                f"`{other}` was given beside a {name}, whose elements hold everything: (x,), (x, y) or "
                f"(x, y, sample_weight). Leave `{other}` out."
            )
    if given.get("validation_split"):
        raise InvalidArgumentError(
            f"`validation_split` was given beside a {name}; Keras can split arrays only. Make two datasets (take and skip), "
            "and give the second as `validation_data`."
        )


def _of_another_strategy(strategy: Strategy, argument: str) -> Exception:
    if strategy.is_default:
        return KerasScopeError(
            f"The dataset `{argument}` was distributed by a strategy, and the model was made outside of every scope, so it would be "
            "trained on one device. Make the model inside `with strategy.scope():`."
        )
    return MixedStrategiesError(
        f"Mixing different tf.distribute.Strategy objects: the dataset `{argument}` was distributed by another strategy than "
        f"{strategy!r}, in whose scope the model was made. Distribute it with that one."
    )


def _empty() -> EmptyDatasetError:
    return EmptyDatasetError("The dataset given to Keras has no batch.")


@final
class DistributedInput(keras.utils.PyDataset):
    """The batches of a DistributedDataset, whole; a thread reads them ahead.

    Keras asks for the batches 0, 1, ... of an epoch in order, and then calls ``on_epoch_end``. It may look at the first
    ones beforehand, to build the model: then, and always before the first epoch of ``fit`` and ``evaluate``, it calls
    ``on_epoch_end`` too. What it has looked at belongs to the first epoch: the dataset is not started again for it.
    """

    def __init__(self, dataset: DistributedDataset, cardinality: Cardinality | None, *, ends_by_itself: bool):
        super().__init__()
        self._dataset, self._cardinality = dataset, cardinality
        self._ends_by_itself = ends_by_itself  # nobody asked for a number of batches
        self._reader: Reader | None = None
        self._looked_at: list[Any] | None = []  # until the first epoch begins
        self._again: collections.deque[Any] = collections.deque()
        self._num_skipped = 0  # of the batches that Keras asks for next
        self._num_taken = 0  # in this pass
        self._positions: collections.deque[tuple[int, Any]] = collections.deque(maxlen=_NUM_POSITIONS)

    @property
    def num_batches(self) -> int | None:
        """Keras takes None for a dataset without end; one of unknown length says where it ends."""
        return None if self._cardinality in (None, INFINITE) else int(self._cardinality)

    def __getitem__(self, index: int) -> Any:
        """The next batch; index 0 starts again.

        Raises:
          EmptyDatasetError: There is none at all.
        """
        if self._num_skipped:
            self._num_skipped -= 1
            return (np.zeros((1,), np.float32),)
        if self._again:
            return self._again.popleft()
        if self._reader is None or index == 0:
            self.close()
            self._read(self._dataset.start(), 0)
        assert self._reader is not None
        try:
            batch = _whole_batch(self._reader.take_on_host())
        except StopIteration:
            if index == 0:
                raise _empty() from None
            batch = (_END_OF_DATA,)
        self._num_taken += 1
        self._note_position()
        if self._looked_at is not None:
            self._looked_at.append(batch)
            if len(self._looked_at) > _MOST_LOOKED_AT:
                self._looked_at = None
        return batch

    def position(self, num_batches: int | None) -> Any:
        """What can be written as JSON: where the pass is after so many of its batches (None: all); None if it cannot be
        continued.
        """
        states = [state for taken, state in self._positions if num_batches is None or taken <= num_batches]
        return states[-1] if states else None

    def resume(self, position: Any, num_batches: int) -> bool:
        """Goes to a position, maybe of another process.

        Keras will ask for the batches before it first, and gets nothing there.

        Args:
          position: As ``position`` gave it.
          num_batches: How many are before it; 0: what begins next is the pass after it.

        Returns:
          Whether it can; else it is to be read up to there.
        """
        if position is None:
            return False
        elements = self._dataset.start()
        elements.set_state(position)
        self.close()
        self._again.clear()
        self._looked_at = None
        self._num_skipped = num_batches
        if num_batches:
            self._read(elements, num_batches)
        return True

    def _read(self, elements: Pass, num_taken: int) -> None:
        self._reader = self._dataset.reader_of(elements, places_ahead=False)
        self._num_taken = num_taken
        self._positions.clear()
        self._note_position()

    def _note_position(self) -> None:
        assert self._reader is not None
        with contextlib.suppress(NotResumableError):
            self._positions.append((self._num_taken, self._reader.get_state()))

    def on_epoch_end(self) -> None:
        """Before the first epoch: what was looked at will be asked for again."""
        if self._looked_at:
            self._again.extend(self._looked_at)
        self._looked_at = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Around the call that takes the batches. Afterwards the thread that reads ahead has ended."""
        try:
            with warnings.catch_warnings():
                if self.num_batches is None and self._ends_by_itself:
                    # Keras takes the end for an interruption.
                    warnings.filterwarnings("ignore", message=r"\s*Your input ran out of data")
                yield
        finally:
            self.close()

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _whole_batch(step: LocalRows | Sequence[Any]) -> Any:
    """The rows of all replicas of this process together: a nest of arrays ``[num_rows, ...]``, a tuple or dict.

    Of several processes each has its own rows, as ``WorkerRows``.
    """
    if isinstance(step, LocalRows):
        arrays = narrowed(step.arrays, step.tree, "batch")  # Keras puts it on a device as it is
        batch, sizes = step.tree.unflatten(arrays), step.all_sizes
    else:
        batch = narrowed_nest(jax.tree_util.tree_map(_joined, *step), "batch")
        sizes = _agreed_sizes(step) if isinstance(step, AgreedParts) else None
    if sizes is not None:
        batch = jax.tree_util.tree_map(lambda rows: WorkerRows.of(rows, sizes), batch)
    if isinstance(batch, (tuple, dict)):
        return batch
    return tuple(batch) if isinstance(batch, list) else (batch,)


def _agreed_sizes(step: AgreedParts) -> tuple[int, ...]:
    """The rows of each replica; an element that is a number is a row."""
    return tuple(shape[0] if shape else 1 for shape in step.shapes[0])


def _joined(*parts: Any) -> np.ndarray:
    arrays = [np.asarray(part) for part in parts]
    return np.concatenate(arrays) if arrays[0].ndim else np.stack(arrays)
