"""The methods of ``Strategy`` under TensorFlow 1's names and other older ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from replicax._src.devices.split import InputContext, InputOptions, InputReplicationMode
from replicax._src.input.dataset import DistributedDataset, DistributedIterator
from replicax._src.input.pipeline import ArrayDataset
from replicax._src.strategies import data_placement
from replicax._src.strategies.data_methods import DataMethods as _Members
from replicax._src.vocabulary.errors import UnsupportedError

_T = TypeVar("_T")

if not TYPE_CHECKING:  # users test isinstance, which a Protocol among the base classes makes slow
    _Members = object


class OlderMethods(_Members):
    """Older names, and methods that only TensorFlow 1 needs. The class has no state."""

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Calls ``distribute_datasets_from_function``, under its older name."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> ArrayDataset:
        """Returns a dataset over the rows of NumPy arrays (a pytree; a list is stacked). Call ``batch`` on it next."""
        del session
        return data_placement.from_numpy(numpy_input)

    def make_experimental_numpy_dataset(self, numpy_input: Any, session: Any = None) -> ArrayDataset:
        """Calls ``experimental_make_numpy_dataset``, under the name in the TensorFlow guide."""
        return self.experimental_make_numpy_dataset(numpy_input, session)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Calls ``experimental_local_results``, under its older name."""
        return self.experimental_local_results(value)

    def group(self, value: _T, name: str | None = None) -> _T:
        """Returns ``value``, which is computed anyway. In TensorFlow's graphs it made one operation of many."""
        del name
        return value

    def experimental_run(
        self, fn: Callable[..., _T], input_iterator: DistributedIterator | None = None
    ) -> _T:
        """Runs ``fn`` on the next element of an iterator (or without arguments). This is the older form of ``run``."""
        args = () if input_iterator is None else (input_iterator.get_next(),)
        return self.run(fn, args=args)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Returns an iterator over a distributed dataset. ``initialize()`` restarts it."""
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Returns an iterator over the dataset of ``input_fn``. ``initialize()`` restarts it."""
        options = InputOptions(experimental_replication_mode=replication_mode)
        return iter(self.distribute_datasets_from_function(input_fn, options))

    def colocate_vars_with(self, colocate_with_variable: Any) -> contextlib.AbstractContextManager:
        """See ``extended.colocate_vars_with``."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Raises, because only TensorFlow 1 sessions have this.

        Raises:
          UnsupportedError: It is always raised, and names the replacement.
        """
        del session_config, cluster_spec, task_type, task_id
        raise UnsupportedError(
            "strategy.configure set up TensorFlow 1 sessions, which do not exist here. Describe a cluster by TF_CONFIG "
            "or a cluster resolver when you make the strategy, and virtual devices by "
            "replicax.config.set_local_devices(n)."
        )

    def update_config_proto(self, config_proto: Any) -> None:
        """Raises, because only TensorFlow 1 sessions have this.

        Raises:
          UnsupportedError: It is always raised, and names the replacement.
        """
        del config_proto
        raise UnsupportedError(
            "strategy.update_config_proto changed the ConfigProto of TensorFlow 1 sessions, which do not exist here. "
            "Set JAX's options with jax.config.update(...), compiler options with "
            "rx.RunOptions(experimental_xla_options={...})."
        )
