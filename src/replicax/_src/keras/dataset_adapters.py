"""Adapters that pass distributed datasets to Keras as ``x``. They give Keras's loops full batches on the host."""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import jax
import numpy as np

from replicax._src.devices.topology import Topology
from replicax._src.input.agreed_steps import AgreedParts
from replicax._src.input.dataset import DistributedDataset, DistributedIterator
from replicax._src.input.element_specs import INFINITE, Cardinality
from replicax._src.input.elements import EmptyDatasetError, NotResumableError, Pass
from replicax._src.input.pipeline import Dataset
from replicax._src.input.reading import Reader
from replicax._src.input.sources import LocalRows
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.internals import DataAdapter, class_weight_to_sample_weights
from replicax._src.lowering.batch import WorkerRows
from replicax._src.strategies.data_placement import distribute
from replicax._src.strategies.strategy import Strategy
from replicax._src.values.distributed import DistributedValues
from replicax._src.values.narrowing import narrowed, narrowed_pytree
from replicax._src.vocabulary.errors import InvalidArgumentError, KerasScopeError, MixedStrategiesError

_MOST_LOOKED_AT: Final = 4
_NUM_POSITIONS: Final = 4
"""Keras may have taken a batch or two that its loop has not come to."""


def check_not_per_replica(call: FitCall, argument: str) -> None:
    """Raises if an argument that Keras would take as arrays is a per-replica value.

    Raises:
      InvalidArgumentError: The value is or contains a PerReplica.
    """
    value = call.arguments.get(argument)
    pytree = value if isinstance(value, (tuple, list, dict)) else [value]
    if any(
        isinstance(leaf, DistributedValues)
        for leaf in (pytree.values() if isinstance(pytree, dict) else pytree)
    ):
        raise InvalidArgumentError(
            f"{call.method}(): `{argument}` is a per-replica value, an element of a distributed dataset, and Keras takes "
            "full batches. Pass the DistributedDataset to fit, evaluate or predict, or pass the batch before it is "
            "distributed."
        )


def as_keras_input(data: Any, call: FitCall, argument: str, strategy: Strategy) -> Any:
    """Returns the adapter for a distributed dataset. Returns any other value unchanged.

    Args:
      data: The value of ``argument``.
      call: The call.
      argument: ``"x"`` or ``"validation_data"``.
      strategy: The model's strategy.

    Raises:
      MixedStrategiesError: Another strategy distributed the dataset.
      KerasScopeError: The dataset is distributed, and the model was made outside of every scope.
      InvalidArgumentError: ``data`` is an iterator or never ends, or an argument conflicts with it.
      EmptyDatasetError: The dataset has no batch.
    """
    if isinstance(data, (tuple, list)) and len(data) == 1:
        return as_keras_input(data[0], call, argument, strategy) if _is_ours(data[0]) else data
    if not _is_ours(data):
        return data
    name = type(data).__name__
    if isinstance(data, DistributedIterator):
        raise InvalidArgumentError(
            f"Keras reads its data once per epoch, and `{argument}` is a DistributedIterator, which ends. Pass the "
            "DistributedDataset that it was made from."
        )
    if not isinstance(data, DistributedDataset):
        data = distribute(strategy.topology, data, None, None)
    elif data.placer.topology is not strategy.topology:
        raise _of_another_strategy(strategy, argument)
    if argument == "x":
        call.check_alone(name)
    cardinality = _agreed_cardinality(data)
    if cardinality == 0:
        raise _empty()
    num_steps = call.num_steps(argument)
    if cardinality == INFINITE and num_steps is None:
        raise InvalidArgumentError(
            f"`{argument}` is an infinite {name}, so Keras would never stop. Give the number of batches as "
            f"`{call.steps_name(argument)}`, or leave `repeat` out."
        )
    class_weight = call.class_weight if argument == "x" else None
    return DistributedInput(data, cardinality, class_weight, ends_by_itself=num_steps is None)


def _agreed_cardinality(data: DistributedDataset) -> Cardinality | None:
    """Returns the number of steps that all processes take: that of the process with the most."""
    here, peers = data.cardinality, data.placer.topology.peers
    if peers is None:
        return here
    of_all = peers.gather("keras steps", here, "to compare the lengths of datasets")
    if INFINITE in of_all:
        return INFINITE
    return None if None in of_all else max(of_all)


def _is_ours(data: Any) -> bool:
    return isinstance(data, (Dataset, DistributedDataset, DistributedIterator))


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
class DistributedInput(DataAdapter):
    """The full batches of a DistributedDataset, which a thread prefetches.

    Keras may take the first batches early, to build the model. After that, and always before the first epoch of ``fit``
    and ``evaluate``, it calls ``on_epoch_end``. The first epoch gets these batches again, without a restart of the
    dataset.
    """

    def __init__(
        self,
        dataset: DistributedDataset,
        cardinality: Cardinality | None,
        class_weight: Mapping[int, float] | None,
        *,
        ends_by_itself: bool,
    ):
        self._dataset, self._cardinality, self._class_weight = dataset, cardinality, class_weight
        self._ends_by_itself = ends_by_itself  # no number of batches was given
        self._reader: Reader | None = None
        self._looked_at: list[Any] | None = []  # until the first epoch begins
        self._again: list[Any] = []
        self._is_begun = False  # the next batch continues a pass
        self._num_taken = 0  # in this pass
        self._positions: collections.deque[tuple[int, Any]] = collections.deque(maxlen=_NUM_POSITIONS)

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None if the dataset is infinite or its length is unknown."""
        return None if self._cardinality in (None, INFINITE) else int(self._cardinality)

    def get_jax_iterator(self) -> Iterator[Any]:
        """Yields the batches of a pass. Keras makes iterators that it never uses, so a pass starts with its first
        batch.

        Raises:
          EmptyDatasetError: The dataset has no batch.
        """
        if not self._is_begun:
            self._read(self._dataset.start(), 0)
        reader, again = self._reader, self._again
        self._is_begun, self._again = False, []
        yield from again
        assert reader is not None
        while True:
            try:
                batch = _whole_batch(reader.take_on_host(), self._dataset.placer.topology)
            except StopIteration:
                if not self._num_taken:
                    raise _empty() from None
                return
            self._num_taken += 1
            self._note_position()
            batch = batch if self._class_weight is None else _weighted(batch, self._class_weight)
            if self._looked_at is not None:
                self._looked_at.append(batch)
                if len(self._looked_at) > _MOST_LOOKED_AT:
                    self._looked_at = None
            yield batch

    def position(self, num_batches: int | None) -> Any:
        """Returns the position after the given number of batches of the pass (None: all) as a JSON value; None if the
        pass cannot be resumed there.
        """
        states = [state for taken, state in self._positions if num_batches is None or taken <= num_batches]
        return states[-1] if states else None

    def resume(self, position: Any, num_batches: int) -> bool:
        """Moves to a position, which may come from another process.

        Args:
          position: The result of ``position``.
          num_batches: The number of batches before it. 0 means that the next pass starts there.

        Returns:
          True on success. Otherwise the caller must read the data up to that position.
        """
        if position is None:
            return False
        elements = self._dataset.start()
        elements.set_state(position)
        self.close()
        self._again, self._looked_at, self._is_begun = [], None, num_batches > 0
        if num_batches:
            self._read(elements, num_batches)
        return True

    def end_pass(self) -> None:
        """Makes the next batch the first one of another pass."""
        self._is_begun = False

    def _read(self, elements: Pass, num_taken: int) -> None:
        self.close()
        self._reader = self._dataset.reader_of(elements, places_ahead=False)
        self._num_taken = num_taken
        self._positions.clear()
        self._note_position()

    def _note_position(self) -> None:
        assert self._reader is not None
        with contextlib.suppress(NotResumableError):
            self._positions.append((self._num_taken, self._reader.get_state()))

    def on_epoch_end(self) -> None:
        """Makes the first epoch start with the batches that Keras has already looked at."""
        if self._looked_at:
            self._again, self._is_begun = self._looked_at, True
        self._looked_at = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Surrounds the call that takes the batches. On exit the prefetching thread has ended."""
        try:
            with warnings.catch_warnings():
                if self._ends_by_itself:
                    # Keras reports the normal end of the data as an interruption.
                    warnings.filterwarnings("ignore", message=r"\s*Your input ran out of data")
                yield
        finally:
            self.close()

    def close(self) -> None:
        """Ends the prefetching thread."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _whole_batch(step: LocalRows | Sequence[Any], topology: Topology) -> Any:
    """Returns the rows of all replicas of this process: a pytree of arrays ``[num_rows, ...]``, a tuple or dict.

    With several processes each has its own rows, as ``WorkerRows``; but survivors have all rows, as if from arrays.
    """
    if isinstance(step, LocalRows):
        arrays = narrowed(step.arrays, step.tree, "batch")
        batch, sizes = step.tree.unflatten(arrays), step.all_sizes
    else:
        batch = narrowed_pytree(jax.tree_util.tree_map(_joined, *step), "batch")
        sizes = _agreed_sizes(step) if isinstance(step, AgreedParts) else None
    if sizes is not None and topology.survivors is None:
        batch = jax.tree_util.tree_map(lambda rows: WorkerRows.of(rows, sizes), batch)
    if isinstance(batch, (tuple, dict)):
        return batch
    return tuple(batch) if isinstance(batch, list) else (batch,)


def _weighted(batch: Any, class_weight: Mapping[int, float]) -> Any:
    """Adds row weights to a batch, computed from the class weights as in Keras."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise InvalidArgumentError(
            "`class_weight` was given beside a dataset whose elements are not (x, y). Make them (x, y, sample_weight), "
            "and leave class_weight out."
        )
    return (*batch, class_weight_to_sample_weights(batch[1], class_weight))


def _agreed_sizes(step: AgreedParts) -> tuple[int, ...]:
    """Returns the number of rows of each replica. A scalar element counts as one row."""
    return tuple(shape[0] if shape else 1 for shape in step.shapes[0])


def _joined(*parts: Any) -> np.ndarray:
    arrays = [np.asarray(part) for part in parts]
    return np.concatenate(arrays) if arrays[0].ndim else np.stack(arrays)
