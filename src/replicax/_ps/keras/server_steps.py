"""The steps of models whose variables are on parameter servers. Each step runs on any free worker.

Keras keeps its loops. The step function that Keras calls schedules a step and returns at once, so several steps are
always in flight. The logs that Keras gets are those of a completed step. When Keras asks for the model's state, it
waits for all steps.
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

from replicax._ps.coordinator.cluster_coordinator import ClusterCoordinator, coordinator_of
from replicax._ps.coordinator.per_worker import PerWorkerIterator
from replicax._ps.coordinator.remote_value import RemoteValue
from replicax._ps.keras.worker_datasets import WorkerInput
from replicax._ps.programs.iterator_inputs import cut_rows
from replicax._src.program_kit.errors import UnsupportedError
from replicax._src.program_kit.keras_variables import (
    DatasetBatch,
    FitCall,
    Phase,
    ReplicaStep,
    ReplicaStyleFunction,
    joined,
    state_elsewhere,
)
from replicax._src.program_kit.own_process import compiling
from replicax._src.program_kit.variables import PerReplica, is_value

if TYPE_CHECKING:
    from replicax._ps.strategy.parameter_server import ParameterServerStrategy

_AHEAD_PER_WORKER = 4
"""How many steps are scheduled before the oldest has ended: enough that no worker waits, few enough for memory and
logs.
"""


@final
class WorkerSteps:
    """Schedules a model's steps on the workers. With ``run_eagerly=True`` steps run in this process, one after another.

    Raises:
      UnsupportedError: The model's own step works on arrays, in Keras's style on JAX, so it has no gradients to push.
    """

    def __init__(self, step: ReplicaStep, strategy: ParameterServerStrategy):
        self._model, self._phase, self._name = step.model, step.phase, step.name
        self._servers, self._replica_step = strategy, step
        _check_style(step)
        self._coordinator: ClusterCoordinator | None = None
        self._pending: deque[RemoteValue] = deque()
        self._logs: dict[str, Any] | None = None
        self._num_ahead = 0
        self._has_failed = False  # and the raised error has the reason
        self._has_started = False
        self._iterator: PerWorkerIterator | None = None
        self._step = step.named(lambda data: self._run_on_worker(data))
        self._step_of_worker = step.named(lambda iterator: self._run_on_worker(next(iterator)))

    def _run_on_worker(self, data: Any) -> Any:
        step, strategy = self._replica_step, self._servers
        if strategy.num_replicas_in_sync == 1:
            return strategy.run(step.function, args=(data,))
        if not step.is_own:
            return strategy.run_as_one(step.function, data)
        rows = _in_rows(data, strategy.num_replicas_in_sync)
        return step.run(rows, _sizes_of(rows))

    # --- around a loop ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_call(self, call: FitCall) -> Iterator[None]:
        """Makes Keras find an empty state of the model, because the servers hold it. A request for the state waits for
        all steps.

        On exit no scheduled step is still running.
        """
        x, before = call.x, (self._num_ahead, self._iterator)
        if call.is_loop:
            # Callbacks read the predictions of a step before the next step is taken.
            is_watched = self._phase.is_predict and bool(call.callbacks)
            self._num_ahead = 0 if is_watched else _AHEAD_PER_WORKER * self._servers.session.num_workers
            self._iterator = self._iterator_of(x) if isinstance(x, WorkerInput) else None
        try:
            with state_elsewhere(self._model, self._sync):
                yield
        finally:
            self._num_ahead, self._iterator = before
            if self._pending:
                with contextlib.suppress(Exception):  # another error is being raised
                    self._join()
            self._logs = self._coordinator = None
            self._has_failed = False

    def _iterator_of(self, x: WorkerInput) -> PerWorkerIterator:
        """Returns the iterator with which each worker reads its own dataset."""
        if self._model.run_eagerly:
            raise UnsupportedError(
                f"Model {self._model.name!r} was compiled with run_eagerly=True, which runs its steps in this process, "
                "but the elements of a per-worker dataset are on the workers. Pass arrays or a dataset, or leave "
                "run_eagerly out."
            )
        return iter(x.dataset)

    # --- steps -----------------------------------------------------------------------------------------

    def run(self, batch: DatasetBatch) -> Any:
        """Returns the logs of a completed step, or the pending predictions of this step."""
        value = self._start(self._iterator or batch.tree.unflatten(batch.leaves))
        return value if self._phase.is_predict else self._logs

    def joined(self, outputs: Sequence[Any]) -> Any:
        """Returns the predictions of several steps as those for one batch."""
        if self._num_ahead and all(isinstance(value, RemoteValue) for value in outputs):
            return _outputs_to_come(outputs)
        return joined([self._result(value) for value in outputs])

    def _start(self, data: Any) -> Any:
        """Schedules a step on a worker.

        Waits for older steps if there are many, and waits for the first step until the worker has compiled it.
        """
        if self._has_started or self._model.run_eagerly:
            return self._started(data)
        with compiling(self._name, self._servers.num_replicas_in_sync):
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
        except BaseException:  # for example of an older step
            self._has_failed = True
            raise
        self._pending.append(value)
        while len(self._pending) > self._num_ahead or (self._logs is None and not self._phase.is_predict):
            result = self._result(self._pending.popleft())
            if not self._phase.is_predict:
                self._logs = dict(result)
        return value

    def _result(self, value: Any) -> Any:
        """Returns the result of a step, or its future.

        Raises:
          Exception: The error of this step, or the error of another step that cancelled it.
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
        """Waits for all steps.

        The logs that Keras got last then become those of the last step, and those of metrics the values after all
        steps.
        """
        if not self._pending or self._has_failed:
            return
        last = self._pending[-1]
        self._join()
        if self._logs is not None:
            self._logs.update(last.fetch())
            self._logs.update((name, metric.result()) for name, metric in self._replica_step.metrics.items())
        self._logs = None


@final
class WorkerStepFunction(ReplicaStyleFunction):
    """Runs a model's steps on the workers."""

    def __init__(self, model: Any, phase: Phase, strategy: ParameterServerStrategy):
        super().__init__(model, phase, strategy)
        self._workers = WorkerSteps(self._step, strategy)

    def _run(self, batch: DatasetBatch) -> Any:
        return self._workers.run(batch)

    def _joined(self, outputs: Sequence[Any]) -> Any:
        return self._workers.joined(outputs)

    def _around(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        return self._workers.in_call(call)


def _in_rows(data: Any, num_replicas: int) -> Any:
    """Splits a batch over the replicas of a worker, unless it already has a part for each replica."""
    leaves = jax.tree_util.tree_leaves(data, is_leaf=is_value)
    return data if any(isinstance(leaf, PerReplica) for leaf in leaves) else cut_rows(data, num_replicas)


def _sizes_of(rows: Any) -> Any:
    first = jax.tree_util.tree_leaves(rows, is_leaf=is_value)[0]
    return jnp.asarray([first.component_shape(r)[0] for r in range(first.num_replicas)], jnp.float32)


def _check_style(step: ReplicaStep) -> None:
    kind, name = type(step.model), step.phase.step_name
    if step.is_own or getattr(kind, name) is getattr(keras.Model, name):
        return
    raise UnsupportedError(
        f"{step.name}(self, state, data) computes new values of all variables, but with parameter servers a worker "
        f"does not hold them; it sends updates. Write the step in TensorFlow's style, {name}(self, data), with an "
        "rx.GradientTape, "
        "self.optimizer.apply_gradients, and metrics with update_state."
    )


# --- predictions ----------------------------------------------------------------------------------------


class _ToCome:
    """An array of rows that pending steps compute. NumPy waits for it."""

    def __init__(self, values: Sequence[RemoteValue], position: int):
        self._values, self._position = values, position

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        parts = [value.array(self._position) for value in self._values]
        return np.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), dtype)


def _outputs_to_come(values: Sequence[RemoteValue]) -> Any:
    """Returns the pending predictions of several steps together, in order, as a pytree."""
    return values[0].pytree_of(lambda position: _ToCome(values, position))
