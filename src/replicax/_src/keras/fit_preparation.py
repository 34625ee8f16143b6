"""The one pass that prepares a call of ``fit``, ``evaluate``, ``predict`` or a sister, before Keras gets it.

Each decision about the user's data is made here, once: which values Keras takes, how wide their numbers are, who reads
a dataset, which strategy runs the steps, and that all processes do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import keras
import numpy as np

from replicax._src.cluster.peers import Peers
from replicax._src.input.arrays import check_numbers
from replicax._src.keras import internals
from replicax._src.keras.chief_progress import ChiefProgress
from replicax._src.keras.dataset_adapters import as_keras_input, check_not_per_replica
from replicax._src.keras.fit_arguments import check_arguments
from replicax._src.keras.fit_call import FitCall
from replicax._src.keras.keras_placement import placement_of
from replicax._src.keras.workers import start_together
from replicax._src.scope import context
from replicax._src.strategies.strategy import Strategy
from replicax._src.values.narrowing import narrowed

_ARRAYS: Final = ("sample_weight", "validation_data", "x", "y")


@final
@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call that Keras can run.

    Attributes:
      call: The call, with adapters in place of the datasets of replicax.
      strategy: The strategy that runs the steps; None if Keras runs them.
      inputs: The adapters, each ``in_use`` while the call runs.
    """

    call: FitCall
    strategy: Strategy | None
    inputs: Sequence[Any]


def prepare(call: FitCall, strategy: Strategy | None) -> PreparedCall:
    """Prepares a call. Its strategy's scope has been entered.

    Args:
      call: The call as the user wrote it.
      strategy: The model's strategy; None for a model that was made outside of every scope.

    Raises:
      InvalidArgumentError: An argument is invalid, or conflicts with another one.
      EmptyDatasetError: An argument has no batch.
      WorkersDifferError: The processes were given different arguments.
    """
    for argument in ("x", "y", "sample_weight"):
        check_not_per_replica(call, argument)
    if strategy is not None:
        call = _with_narrow_arrays(call)
    call, inputs = _with_adapters(call, context.get_strategy())
    if strategy is None and inputs:
        strategy = context.get_strategy()  # Keras's own steps would miss the end of the data
    if strategy is not None and call.is_loop:
        call = _agreed(call, strategy.topology.peers)
        check_arguments(call)
    return PreparedCall(call, strategy, inputs)


def _with_narrow_arrays(call: FitCall) -> FitCall:
    """Converts 64-bit arrays in memory as JAX does, or raises an error. Keras also casts floats, without a check.

    Memory-mapped files are read batch by batch.
    """
    narrow = {}
    for argument in _ARRAYS:
        if argument in call.arguments:
            data = call.arguments[argument]
            check_numbers(data, argument)
            narrow[argument] = _narrowed(data, argument)
    return call.with_arguments(**narrow)


def _narrowed(data: Any, argument: str) -> Any:
    leaves, tree = jax.tree.flatten(data, is_leaf=lambda value: not isinstance(value, (tuple, list, dict)))
    arrays = [None if isinstance(leaf, np.memmap) else leaf for leaf in leaves]
    new = {
        id(old): new
        for old, new in zip(arrays, narrowed(arrays, tree, argument), strict=True)
        if old is not new
    }
    return keras.tree.map_structure(lambda leaf: new.get(id(leaf), leaf), data) if new else data


def _with_adapters(call: FitCall, strategy: Strategy) -> tuple[FitCall, list[Any]]:
    """Replaces replicax's datasets by adapters for Keras. Returns the adapters too."""
    adapters = {}
    for argument in call.datasets:
        data = call.arguments.get(argument)
        adapter = placement_of(strategy).as_input(data, call, argument, strategy)
        adapter = as_keras_input(adapter, call, argument, strategy)
        if adapter is not data:
            adapters[argument] = adapter
            if call.method == "predict" and all(layer.built for layer in internals.layers_of(call.model)):
                adapter.on_epoch_end()  # predict takes no batch early, unlike fit and evaluate
    return call.with_arguments(**adapters), list(adapters.values())


def _agreed(call: FitCall, peers: Peers | None) -> FitCall:
    """Checks that all processes give equal arguments. With ``verbose="auto"`` only the first live process shows
    progress.
    """
    if peers is None:
        return call
    if call.verbose == "auto":
        call = _with_progress_of_chief(call, peers)
    start_together(peers, call)
    return call


def _with_progress_of_chief(call: FitCall, peers: Peers) -> FitCall:
    """Returns the call without the progress bar in all processes but the first; or with one that follows the chief."""
    callbacks = call.callbacks
    is_ordered = isinstance(callbacks, keras.callbacks.CallbackList)
    listed = [] if is_ordered else keras.tree.flatten(callbacks or [])
    has_own = is_ordered or any(isinstance(each, keras.callbacks.ProgbarLogger) for each in listed)
    if peers.tolerates_failures and not has_own:
        return call.with_arguments(callbacks=[*listed, ChiefProgress(lambda: peers.is_leader)])
    return call if peers.is_leader else call.with_arguments(verbose=0)
