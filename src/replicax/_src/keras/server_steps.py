"""The steps of models whose variables are on parameter servers: each runs on whichever worker is free.

Keras keeps its loops. What it calls schedules a step and goes on: some steps are always in flight, and what Keras is
given for its logs is of a step that has ended. Where Keras asks for the model's state, all have ended.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._src.cluster.progress import compiling
from replicax._src.errors import InvalidArgumentError, UnsupportedError
from replicax._src.keras import metric_results
from replicax._src.keras.losses import in_replica_step, own_compute_loss_gathered
from replicax._src.keras.overriding import overridden
from replicax._src.keras.replica_steps import (
    is_replica_style,
    keras_step,
    of_all_rows,
    weighted_mean,
    without_nones,
)
from replicax._src.keras.steps import Phase, State, StepFunction, joined
from replicax._src.parameter_servers.coordinator.cluster_coordinator import ClusterCoordinator, coordinator_of
from replicax._src.parameter_servers.coordinator.per_worker import PerWorkerDataset, PerWorkerIterator
from replicax._src.parameter_servers.coordinator.remote_value import RemoteValue
from replicax._src.parameter_servers.programs.elements import cut_rows
from replicax._src.values import PerReplica, is_value

if TYPE_CHECKING:
    from replicax._src.parameter_servers.strategy.parameter_server import ParameterServerStrategy

_AHEAD_PER_WORKER = 4
"""How many steps are scheduled before the oldest has ended: enough that no worker waits, few enough for memory and
logs.
"""


@final
class ServerStepFunction(StepFunction):
    """Schedules a model's steps on the workers; those of ``run_eagerly=True`` run in this process, one by one.

    A step is the model's own in TensorFlow's style, or what Keras's is in terms of the variables.

    Raises:
      UnsupportedError: The model's own step is one of arrays, Keras's style on JAX, which has nothing to push.
    """

    def __init__(self, model: Any, phase: Phase, strategy: ParameterServerStrategy):
        super().__init__(model, phase, strategy)
        self._servers = strategy
        _check_style(model, phase)
        self._coordinator: ClusterCoordinator | None = None
        self._pending: deque[RemoteValue] = deque()
        self._logs: dict[str, Any] | None = None
        self._metrics_of_logs: dict[str, Any] = {}
        self._num_ahead = 0
        self._has_failed = False  # and what is raised says why
        self._has_started = False
        self._iterator: PerWorkerIterator | None = None
        name = self._name
        run = getattr(type(model), phase.step_name) if is_replica_style(model, phase) else keras_step(phase)

        def replica_step(data: Any) -> Any:
            data = without_nones(data)
            rows = next((leaf.shape[0] for leaf in jax.tree_util.tree_leaves(data) if leaf.ndim), 0)
            with in_replica_step(rows), metric_results.noting() as results:
                result = run(model, data)
            if phase.is_predict:
                return result
            if isinstance(result, dict):
                self._metrics_of_logs = metric_results.metrics_of(result, results)
                return result
            raise InvalidArgumentError(
                f"{name} returned {type(result).__name__}. It must return {phase.described_result}."
            )

        def step(data: Any) -> Any:
            if strategy.num_replicas_in_sync == 1:
                return strategy.run(replica_step, args=(data,))
            if not is_replica_style(model, phase):
                return strategy.run_as_one(replica_step, without_nones(data))
            rows = _in_rows(without_nones(data), strategy.num_replicas_in_sync)
            with own_compute_loss_gathered(model):
                result = strategy.run(replica_step, args=(rows,))
            return strategy.gather(result, axis=0) if phase.is_predict else _of_all_rows(result, rows)

        def step_of_worker(iterator: Any) -> Any:
            return step(next(iterator))

        self._step, self._step_of_worker = _named(step, name), _named(step_of_worker, name)

    # --- around a loop ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_loop(self, dataset: PerWorkerDataset | None, *, is_watched: bool) -> Iterator[None]:
        """Around one of Keras's loops.

        Args:
          dataset: Each worker takes its data from its own; None: batches come from Keras.
          is_watched: The outputs of each step are looked at before the next one is taken.
        """
        is_eager = self._model.run_eagerly
        if dataset is not None and is_eager:
            raise UnsupportedError(
                f"Model {self._model.name!r} was compiled with run_eagerly=True, which runs its steps in this process, and the "
                "elements of a per-worker dataset are on the workers. Pass arrays or a dataset, or leave run_eagerly out."
            )
        before = self._num_ahead, self._iterator
        num_workers = self._servers.session.num_workers
        self._num_ahead = 0 if is_watched else _AHEAD_PER_WORKER * num_workers
        self._iterator = None if dataset is None else iter(dataset)
        try:
            yield
        finally:
            self._num_ahead, self._iterator = before

    @contextlib.contextmanager
    def in_place_of_state(self) -> Iterator[None]:
        """Inside, Keras finds the model's state empty: it is on the servers; and asking for it waits for the steps."""

        def get_state(purge_model_variables: bool = False, **groups: bool) -> tuple[list[Any], ...]:
            del purge_model_variables
            return tuple([] for is_wanted in groups.values() if is_wanted)

        with overridden(self._model, _get_jax_state=get_state, jax_state_sync=self._sync):
            yield

    def finish(self) -> None:
        """The loop has ended, or failed: nothing that it has scheduled goes on."""
        if self._pending:
            with contextlib.suppress(Exception):  # another one is being raised
                self._join()
        self._logs = self._coordinator = None
        self._has_failed = False

    # --- steps -----------------------------------------------------------------------------------------

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        outputs = [self._start(data) for data in self._data(iterator)]
        if not outputs:
            raise StopIteration
        empty = tuple([] for _ in state)
        if not self._phase.is_predict:
            return self._logs, empty
        if self._num_ahead and all(isinstance(value, RemoteValue) for value in outputs):
            return _outputs_to_come(outputs), empty
        return joined([self._result(value) for value in outputs]), empty

    def _data(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in self._take(iterator, is_kept=True):
            yield self._iterator or batch.tree.unflatten(batch.leaves)

    def _standardised(self, data: Any) -> Any:
        return without_nones(data)

    def _start(self, data: Any) -> Any:
        """Has a worker run a step.

        Waits for older ones if there are many, and of the first one until it has compiled it.
        """
        if self._has_started or self._model.run_eagerly:
            return self._started(data)
        with compiling(self._name, self._strategy.num_replicas_in_sync):
            value = self._started(data)
        self._has_started = True
        return value

    def _started(self, data: Any) -> Any:
        if self._model.run_eagerly:
            result = self._servers.run_here(self._step, data)
            self._logs = None if self._phase.is_predict else dict(result)
            return result
        if self._coordinator is None:
            self._coordinator = coordinator_of(self._servers)
        function = self._step if data is not self._iterator else self._step_of_worker
        try:
            value = self._coordinator.schedule(function, args=(data,))
        except BaseException:  # of an older step, say
            self._has_failed = True
            raise
        self._pending.append(value)
        while len(self._pending) > self._num_ahead or (self._logs is None and not self._phase.is_predict):
            result = self._result(self._pending.popleft())
            if not self._phase.is_predict:
                self._logs = dict(result)
        return value

    def _result(self, value: Any) -> Any:
        """What a step has returned, or will have.

        Raises:
          Exception: What it raised; or what another one raised, if it was cancelled for that.
        """
        if not isinstance(value, RemoteValue):
            return value
        try:
            return value.fetch()
        except Exception:
            self._join()
            raise

    def _join(self) -> None:
        self._pending.clear()
        assert self._coordinator is not None
        self._coordinator.join()

    def _sync(self) -> None:
        """All steps end.

        The logs that Keras was given last are those of the last step then, and of metrics after all steps.
        """
        if not self._pending or self._has_failed:
            return
        last = self._pending[-1]
        self._join()
        if self._logs is not None:
            self._logs.update(last.fetch())
            self._logs.update((name, metric.result()) for name, metric in self._metrics_of_logs.items())
        self._logs = None


def _in_rows(data: Any, num_replicas: int) -> Any:
    """A batch as the replicas of a worker share it, if it is not what each of them has."""
    leaves = jax.tree_util.tree_leaves(data, is_leaf=is_value)
    return data if any(isinstance(leaf, PerReplica) for leaf in leaves) else cut_rows(data, num_replicas)


def _of_all_rows(logs: Any, rows: Any) -> Any:
    first = jax.tree_util.tree_leaves(rows, is_leaf=is_value)[0]
    sizes = [first.component_shape(replica)[0] for replica in range(first.num_replicas)]
    return of_all_rows(logs, jnp.asarray(sizes, jnp.float32), weighted_mean)


def _named(function: Any, name: str) -> Any:
    function.__name__ = function.__qualname__ = name
    # What another model's step is traced for is no reason to warn of this one.
    function.replicax_family = object()
    return function


def _check_style(model: Any, phase: Phase) -> None:
    own = getattr(type(model), phase.step_name)
    if own is getattr(keras.Model, phase.step_name) or is_replica_style(model, phase):
        return
    raise UnsupportedError(
        f"{type(model).__name__}.{phase.step_name}(self, state, data) computes new values of all variables, and with parameter "
        f"servers no worker has these: it sends what is to be done to them. Write it in TensorFlow's style, "
        f"{phase.step_name}(self, data): a rx.GradientTape, self.optimizer.apply_gradients, and metrics with update_state."
    )


# --- predictions ----------------------------------------------------------------------------------------


class _ToCome:
    """An array of rows that some steps will have computed; NumPy waits for it."""

    def __init__(self, values: Sequence[RemoteValue], position: int):
        self._values, self._position = values, position

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        parts = [value.array(self._position) for value in self._values]
        return np.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)


def _outputs_to_come(values: Sequence[RemoteValue]) -> Any:
    """The predictions of several steps together, in their order, as a nest."""
    return values[0].nest_of(lambda position: _ToCome(values, position))
