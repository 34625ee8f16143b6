"""Adapters that give Keras, as ``x``, datasets that each worker makes. Keras counts steps and sees no element."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, final

import jax
import keras
import numpy as np

from replicax._ps.coordinator.cluster_coordinator import coordinator_of
from replicax._ps.coordinator.per_worker import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
)
from replicax._ps.worker.unbuilt import UnbuiltDataset
from replicax._src.program_kit.errors import InvalidArgumentError
from replicax._src.program_kit.keras_variables import DataAdapter, FitCall

if TYPE_CHECKING:
    from replicax._ps.strategy.parameter_server import ParameterServerStrategy


def as_worker_input(data: Any, call: FitCall, argument: str, strategy: ParameterServerStrategy) -> Any:
    """Returns the adapter for a per-worker dataset, or for a function that makes one. Returns any other value
    unchanged.

    Args:
      data: The value of ``argument``.
      call: The call.
      argument: ``"x"`` or ``"validation_data"``.
      strategy: The model's strategy, with parameter servers.

    Raises:
      InvalidArgumentError: ``data`` is an iterator or not a dataset, or the number of batches is not given, or an
        argument conflicts with ``data``.
    """
    if isinstance(data, (PerWorkerIterator, PerWorkerValues)):
        raise InvalidArgumentError(
            f"{call.method}(): `{argument}` is a {type(data).__name__}. Pass the dataset that coordinator.create_per_worker_dataset() "
            "returns, or the function that it was given."
        )
    if not isinstance(data, PerWorkerDataset) and not _is_dataset_fn(data):
        return data
    if call.method == "predict":
        raise InvalidArgumentError(
            "predict(): `x` is a per-worker dataset, whose rows have no order. Pass arrays or another dataset."
        )
    if call.num_steps(argument) is None:
        raise InvalidArgumentError(
            f"{call.method}(): `{argument}` is a per-worker dataset, so the total number of batches is unknown. Give it as "
            f"`{call.steps_name(argument)}`."
        )
    if argument == "x":
        call.check_alone("dataset of the workers")
        if call.class_weight:
            raise InvalidArgumentError(
                "`class_weight` was given beside a per-worker dataset. Remove it, and make the elements (x, y, "
                "sample_weight)."
            )
    if not isinstance(data, PerWorkerDataset):
        data = coordinator_of(strategy).create_per_worker_dataset(data)
    return WorkerInput(data)


def _is_dataset_fn(data: Any) -> bool:
    if isinstance(data, UnbuiltDataset):  # the strategy has distributed it
        return True
    return callable(data) and not isinstance(data, (Iterable, keras.utils.PyDataset))


@final
class WorkerInput(DataAdapter):
    """Stands in for a per-worker dataset. Its first batch has the shapes of the elements, to build a model. Later
    batches only count.

    Attributes:
      dataset: The dataset.
    """

    def __init__(self, dataset: PerWorkerDataset):
        self.dataset = dataset

    @property
    def num_batches(self) -> None:
        """None, because it has no end."""
        return None

    def get_jax_iterator(self) -> Iterator[Any]:
        """Yields batches of zeros."""
        element = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.dataset.element_spec)
        yield tuple(element) if isinstance(element, list) else element
        yield from itertools.repeat((np.zeros((1,), np.float32),))

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds the call that takes the batches."""
        return contextlib.nullcontext()
