"""Datasets that workers open: a description of the dataset that a strategy with parameter servers distributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, final

from replicax._src.program_kit.data import InputContext, InputOptions
from replicax._src.program_kit.errors import InvalidArgumentError, UnsupportedError

Cut = Literal["rows", "elements"]


@final
class UnbuiltDataset:
    """A dataset that ``ParameterServerStrategy`` distributes, for ``ClusterCoordinator.create_per_worker_dataset``.

    Each worker then opens a dataset of its own, and reads all of it. Nothing is read here.

    Attributes:
      cut: The way in which several replicas of a worker share it: each gets some of the "rows" of a batch, or an
        element
        ("elements").
    """

    def __init__(
        self, open_with: Callable[[InputContext], Any], options: InputOptions | None, cut: Cut | None
    ):
        if options is not None and not isinstance(options, InputOptions):
            raise InvalidArgumentError(f"options must be an rx.InputOptions, got {options!r}.")
        if options and options.is_per_replica:
            raise UnsupportedError(
                "ParameterServerStrategy does not support InputReplicationMode.PER_REPLICA, because each "
                "worker has a dataset of its own. Leave the mode out."
            )
        self._open_with = open_with
        self.cut: Cut | None = cut

    @classmethod
    def from_dataset(cls, dataset: Any, options: InputOptions | None, num_replicas: int) -> UnbuiltDataset:
        """Makes it from a dataset of batches, which is sent to the workers."""
        return cls(lambda input_context: dataset, options, "rows" if num_replicas > 1 else None)

    @classmethod
    def from_function(
        cls, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None, num_replicas: int
    ) -> UnbuiltDataset:
        """Makes it from a function of an ``InputContext``, which each worker calls."""
        if not callable(dataset_fn):
            raise InvalidArgumentError(
                f"distribute_datasets_from_function needs a function of an InputContext that returns a dataset, got "
                f"{dataset_fn!r}. Distribute a dataset with experimental_distribute_dataset."
            )
        return cls(dataset_fn, options, "elements" if num_replicas > 1 else None)

    def open(self, input_context: InputContext) -> Any:
        """Opens the dataset, on a worker."""
        return self._open_with(input_context)

    def __iter__(self) -> Iterator[Any]:
        # This is TensorFlow's message.
        raise InvalidArgumentError(
            "To use this dataset, you need to pass this dataset to ClusterCoordinator.create_per_worker_dataset."
        )


@final
class StrategyOnWorker:
    """The strategy as a dataset function sees it on a worker, which has no other part of the strategy.

    Attributes:
      num_replicas_in_sync: The strategy's number of replicas.
    """

    def __init__(self, num_replicas_in_sync: int):
        self.num_replicas_in_sync = num_replicas_in_sync

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None, *, distribute_options: Any = None
    ) -> UnbuiltDataset:
        """Returns the dataset. This worker reads all of it."""
        del distribute_options
        return UnbuiltDataset.from_dataset(dataset, options, self.num_replicas_in_sync)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> UnbuiltDataset:
        """Returns the dataset that ``dataset_fn`` makes for this worker."""
        return UnbuiltDataset.from_function(dataset_fn, options, self.num_replicas_in_sync)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function
