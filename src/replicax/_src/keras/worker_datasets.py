"""Datasets that each worker makes for itself, as what Keras takes for ``x``: it counts steps, and sees no element."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import jax
import keras
import numpy as np

from replicax._src.errors import InvalidArgumentError
from replicax._src.keras.datasets import DataAdapter, check_alone
from replicax._src.parameter_servers.coordinator.cluster_coordinator import coordinator_of
from replicax._src.parameter_servers.coordinator.per_worker import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
)
from replicax._src.parameter_servers.worker.unbuilt import UnbuiltDataset

if TYPE_CHECKING:
    from replicax._src.parameter_servers.strategy.parameter_server import ParameterServerStrategy


def as_worker_input(
    data: Any,
    strategy: ParameterServerStrategy,
    method: str,
    argument: str,
    given: Mapping[str, Any],
    steps: str,
) -> Any:
    """What Keras understands in place of a per-worker dataset, or of a function that makes one; anything else as it is.

    Args:
      data: What was given for ``argument``.
      strategy: Of the model, with parameter servers.
      method: Of Keras.
      argument: ``"x"`` or ``"validation_data"``.
      given: All arguments, by name.
      steps: The name of the one that says how many batches to take.

    Raises:
      InvalidArgumentError: It is an iterator, or no dataset; or nobody says how many batches to take; or arguments are
        given that it leaves no room for.
    """
    if isinstance(data, (PerWorkerIterator, PerWorkerValues)):
        raise InvalidArgumentError(
            f"{method}(): `{argument}` is a {type(data).__name__}. Pass the dataset that coordinator.create_per_worker_dataset() "
            "returns, or the function that it was given."
        )
    if not isinstance(data, PerWorkerDataset) and not _is_dataset_fn(data):
        return data
    if method == "predict":
        raise InvalidArgumentError(
            "predict(): `x` is a dataset that each worker makes for itself, whose rows have no order. Pass arrays, or a dataset."
        )
    if given.get(steps) is None:
        raise InvalidArgumentError(
            f"{method}(): `{argument}` is a dataset that each worker makes for itself, and nobody knows how many batches all "
            f"take together: say so with `{steps}`."
        )
    if argument == "x":
        check_alone("dataset of the workers", given)
        if given.get("class_weight"):
            raise InvalidArgumentError(
                "`class_weight` was given beside a dataset of the workers. Let its elements be (x, y, sample_weight)."
            )
    if not isinstance(data, PerWorkerDataset):
        data = coordinator_of(strategy).create_per_worker_dataset(data)
    return WorkerInput(data)


def _is_dataset_fn(data: Any) -> bool:
    if isinstance(data, UnbuiltDataset):  # what the strategy has distributed
        return True
    return callable(data) and not isinstance(data, (Iterable, keras.utils.PyDataset))


@final
class WorkerInput(DataAdapter):
    """Stands for the elements of a dataset of the workers: the first batch has their shapes, for a model that is not
    built. Later ones only count.

    Attributes:
      dataset: The dataset.
    """

    def __init__(self, dataset: PerWorkerDataset):
        self.dataset = dataset

    @property
    def num_batches(self) -> None:
        """It has no end."""
        return None

    def get_jax_iterator(self) -> Iterator[Any]:
        """Batches of zeros."""
        element = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.dataset.element_spec)
        yield tuple(element) if isinstance(element, list) else element
        yield from itertools.repeat((np.zeros((1,), np.float32),))

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Around the call that takes the batches."""
        return contextlib.nullcontext()
