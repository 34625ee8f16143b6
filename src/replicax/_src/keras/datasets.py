"""Distributed datasets as what Keras takes for ``x``: a ``PyDataset`` of whole batches, on the host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, final

import jax
import keras
import numpy as np

from replicax._src.errors import InvalidArgumentError, MixedStrategiesError
from replicax._src.input.arrays import ArrayDataset
from replicax._src.input.dataset import DistributedDataset, DistributedIterator
from replicax._src.input.elements import EmptyDatasetError
from replicax._src.input.files.dataset import FileDataset
from replicax._src.input.order import INFINITE
from replicax._src.input.reading import Reader
from replicax._src.input.sources import LocalRows
from replicax._src.strategies.datasets import distribute

END_OF_DATA: Final = np.zeros(0, bool)
"""In place of a batch (the very object), where a dataset whose length is not known has ended."""


def is_end(batch: Any) -> bool:
    """Whether there is no further batch."""
    return isinstance(batch, tuple) and len(batch) == 1 and batch[0] is END_OF_DATA


def as_keras_input(x: Any, strategy: Any, others: dict[str, Any]) -> Any:
    """What Keras understands in place of a dataset of ours; anything else as it is.

    Args:
      x: The argument ``x`` of a Keras method, or its ``validation_data``.
      strategy: Of the model.
      others: Arguments that a dataset leaves no room for, by name.

    Raises:
      MixedStrategiesError: It was distributed by another strategy.
      InvalidArgumentError: It is an iterator, or one of the others is given too.
      EmptyDatasetError: It has no batch.
    """
    if isinstance(x, DistributedIterator):
        raise InvalidArgumentError(
            "Keras goes through its data once per epoch, and got a DistributedIterator, which ends. Pass the "
            "DistributedDataset that it was made from."
        )
    if isinstance(x, (ArrayDataset, FileDataset)):
        x = distribute(strategy.topology, x, None, None)
    if not isinstance(x, DistributedDataset):
        return x
    if x.placer.topology is not strategy.topology:
        raise MixedStrategiesError(
            f"Mixing different tf.distribute.Strategy objects: the dataset was distributed by another strategy than "
            f"{strategy!r}, in whose scope the model was made. Distribute it with that one."
        )
    for name, value in others.items():
        if value is not None:
            raise InvalidArgumentError(
                f"`{name}` was given beside a DistributedDataset, whose elements hold everything: (x,), (x, y) or "
                f"(x, y, sample_weight). Leave `{name}` out."
            )
    if x.cardinality == 0:
        raise _empty()
    return DistributedInput(x)


def _empty() -> EmptyDatasetError:
    return EmptyDatasetError("The dataset given to Keras has no batch.")


@final
class DistributedInput(keras.utils.PyDataset):
    """The batches of a DistributedDataset, whole; a thread reads them ahead."""

    def __init__(self, dataset: DistributedDataset):
        super().__init__()
        self._dataset = dataset
        self._reader: Reader | None = None
        self._next = 0
        self._has_begun = False  # or Keras may only have looked at the first batch, to build the model
        self._looked_at: Any = None

    @property
    def num_batches(self) -> int | None:
        """Keras takes None for a dataset without end; one of unknown length says where it ends."""
        cardinality = self._dataset.cardinality
        return None if cardinality in (None, INFINITE) else int(cardinality)

    def __getitem__(self, index: int) -> Any:
        """The next batch; Keras asks for them in order, and starts again from 0 for each epoch.

        Raises:
          EmptyDatasetError: There is none at all.
        """
        if index == 0 and self._looked_at is not None:
            batch, self._looked_at = self._looked_at, None
            return batch
        if self._reader is None or index == 0:
            self.close()
            elements = self._dataset.source.iterate()
            self._reader = self._dataset.reader_of(elements, _WholeBatches(self._dataset.placer.topology))
        try:
            batch = self._reader.take()
        except StopIteration:
            if index == 0:
                raise _empty() from None
            return (END_OF_DATA,)
        self._next = index + 1
        if not self._has_begun and index == 0:
            self._looked_at = batch
        return batch

    def on_epoch_end(self) -> None:
        """Keras also calls it before the first epoch: what it has read until then it will ask for again."""
        if self._has_begun or self._next != 1:
            self._looked_at = None
        self._has_begun = True

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._next = 0


@final
class _WholeBatches:
    """Leaves steps on the host, the rows of all replicas together."""

    def __init__(self, topology: Any):
        self._topology = topology

    @property
    def topology(self) -> Any:
        """The replicas' devices."""
        return self._topology

    def place(self, step: LocalRows | Sequence[Any]) -> Any:
        """The nest of arrays ``[num_rows, ...]``, a tuple or dict."""
        if isinstance(step, LocalRows):
            batch = step.tree.unflatten(step.arrays)
        else:
            batch = jax.tree_util.tree_map(_joined, *step)
        if isinstance(batch, (tuple, dict)):
            return batch
        return tuple(batch) if isinstance(batch, list) else (batch,)

    def stack(self, steps: Sequence[Any], capacity: int) -> Any:
        """Not needed: Keras takes one batch at a time."""
        raise NotImplementedError

    def signature(self, step: Any) -> Hashable:
        """Not needed either."""
        raise NotImplementedError


def _joined(*parts: Any) -> np.ndarray:
    arrays = [np.asarray(part) for part in parts]
    return np.concatenate(arrays) if arrays[0].ndim else np.stack(arrays)
