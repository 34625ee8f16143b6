"""Distributed datasets as what Keras takes for ``x``: adapters that give its loops whole batches, on the host."""

from __future__ import annotations

import collections
import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import jax
import numpy as np

# Keras takes an adapter that is not its own for ``x``, but no public name is that of its class (Keras 3.12 to 3.15).
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from replicax._src.errors import InvalidArgumentError, KerasScopeError, MixedStrategiesError
from replicax._src.input.agreed import AgreedParts
from replicax._src.input.dataset import DistributedDataset, DistributedIterator
from replicax._src.input.elements import EmptyDatasetError, NotResumableError, Pass
from replicax._src.input.pipeline import Dataset
from replicax._src.input.reading import Reader
from replicax._src.input.sources import LocalRows
from replicax._src.input.specs import INFINITE, Cardinality
from replicax._src.lowering.batch import WorkerRows
from replicax._src.narrowing import narrowed, narrowed_pytree
from replicax._src.strategies.datasets import distribute
from replicax._src.values import DistributedValues

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

_MOST_LOOKED_AT: Final = 4
_NUM_POSITIONS: Final = 4
"""Keras may have taken a batch or two that its loop has not come to."""


def check_not_per_replica(method: str, argument: str, value: Any) -> None:
    """Raises if what Keras is to take as arrays has parts for replicas.

    Raises:
      InvalidArgumentError: It is, or has in it, a PerReplica.
    """
    pytree = value if isinstance(value, (tuple, list, dict)) else [value]
    if any(
        isinstance(leaf, DistributedValues)
        for leaf in (pytree.values() if isinstance(pytree, dict) else pytree)
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
    class_weight = given.get("class_weight") if argument == "x" else None
    return DistributedInput(data, cardinality, class_weight, ends_by_itself=given.get(steps) is None)


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
class RowsOfWorker:
    """A batch of the rows of one process, which Keras passes on as it is.

    Keras puts what it takes ahead on a device (3.15: on GPUs and TPUs), where rows would lose the sizes of all
    replicas. JAX puts nothing there of an object without arrays.

    Attributes:
      batch: The arrays.
    """

    def __init__(self, batch: Any):
        self.batch = batch


jax.tree_util.register_pytree_node(RowsOfWorker, lambda rows: ((), rows), lambda rows, _: rows)


@final
class DistributedInput(DataAdapter):
    """The batches of a DistributedDataset, whole; a thread reads them ahead.

    Keras may take the first ones beforehand, to build the model: then, and always before the first epoch of ``fit`` and
    ``evaluate``, it calls ``on_epoch_end``. What it has taken belongs to the first epoch: the dataset is not started
    again for it.
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
        self._ends_by_itself = ends_by_itself  # nobody asked for a number of batches
        self._reader: Reader | None = None
        self._looked_at: list[Any] | None = []  # until the first epoch begins
        self._again: list[Any] = []
        self._is_begun = False  # what Keras takes next continues a pass
        self._num_taken = 0  # in this pass
        self._positions: collections.deque[tuple[int, Any]] = collections.deque(maxlen=_NUM_POSITIONS)

    @property
    def num_batches(self) -> int | None:
        """None for a dataset without end, and for one whose end is not known."""
        return None if self._cardinality in (None, INFINITE) else int(self._cardinality)

    def get_jax_iterator(self) -> Iterator[Any]:
        """The batches of a pass. Keras makes iterators that it does not use: a pass begins with the first batch.

        Raises:
          EmptyDatasetError: There is none at all.
        """
        if not self._is_begun:
            self._read(self._dataset.start(), 0)
        reader, again = self._reader, self._again
        self._is_begun, self._again = False, []
        yield from map(self._for_loop, again)
        assert reader is not None
        while True:
            try:
                batch = _whole_batch(reader.take_on_host())
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
            yield self._for_loop(batch)

    def _for_loop(self, batch: Any) -> Any:
        """What a step takes. To build a model Keras looks into it."""
        is_looked_at = self._looked_at is not None or self._dataset.placer.topology.peers is None
        return batch if is_looked_at else RowsOfWorker(batch)

    def position(self, num_batches: int | None) -> Any:
        """What can be written as JSON: where the pass is after so many of its batches (None: all); None if it cannot be
        continued.
        """
        states = [state for taken, state in self._positions if num_batches is None or taken <= num_batches]
        return states[-1] if states else None

    def resume(self, position: Any, num_batches: int) -> bool:
        """Goes to a position, maybe of another process.

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
        self._again, self._looked_at, self._is_begun = [], None, num_batches > 0
        if num_batches:
            self._read(elements, num_batches)
        return True

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
        """Before the first epoch: what was looked at will be asked for again."""
        if self._looked_at:
            self._again, self._is_begun = self._looked_at, True
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
    """The rows of all replicas of this process together: a pytree of arrays ``[num_rows, ...]``, a tuple or dict.

    Of several processes each has its own rows, as ``WorkerRows``.
    """
    if isinstance(step, LocalRows):
        arrays = narrowed(step.arrays, step.tree, "batch")  # Keras puts it on a device as it is
        batch, sizes = step.tree.unflatten(arrays), step.all_sizes
    else:
        batch = narrowed_pytree(jax.tree_util.tree_map(_joined, *step), "batch")
        sizes = _agreed_sizes(step) if isinstance(step, AgreedParts) else None
    if sizes is not None:
        batch = jax.tree_util.tree_map(lambda rows: WorkerRows.of(rows, sizes), batch)
    if isinstance(batch, (tuple, dict)):
        return batch
    return tuple(batch) if isinstance(batch, list) else (batch,)


def _weighted(batch: Any, class_weight: Mapping[int, float]) -> Any:
    """A batch with the weights of its rows, as Keras makes them of the weights of classes."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise InvalidArgumentError(
            "`class_weight` was given beside a dataset whose elements are not (x, y). Let them be (x, y, sample_weight), "
            "and leave class_weight out."
        )
    return (*batch, class_weight_to_sample_weights(batch[1], class_weight))


def _agreed_sizes(step: AgreedParts) -> tuple[int, ...]:
    """The rows of each replica; an element that is a number is a row."""
    return tuple(shape[0] if shape else 1 for shape in step.shapes[0])


def _joined(*parts: Any) -> np.ndarray:
    arrays = [np.asarray(part) for part in parts]
    return np.concatenate(arrays) if arrays[0].ndim else np.stack(arrays)
