"""``rx.keras.callbacks.LocalUpdatesCallback``: ``fit`` trains in one of several groups; see ``training_group.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import keras

from replicax._ps.keras.server_steps import WorkerStepFunction
from replicax._ps.local_updates.training_group import LocalUpdates
from replicax._src.program_kit.errors import ContextError, InvalidArgumentError, UnsupportedError
from replicax._src.program_kit.keras_variables import SurroundingCallback, counting_rows


@final
class LocalUpdatesCallback(SurroundingCallback):
    """Trains a Keras model as one of the groups of a ``LocalUpdates``: all that ``fit`` needs.

    The model adopts the outer parameters when the first epoch begins, after what other callbacks restore from a
    checkpoint; its optimizer keeps its state. Each batch counts with its rows, on all replicas of the group. At the end
    of ``fit``, and when a callback stops it, ``groups.finish()`` gives all groups the outer parameters; after an
    exception it is not called, and ``groups`` stays open. ``groups.stop()`` in one group ends the ``fit`` of all.

    Keras calls it before the other callbacks. The model has the outer parameters during validation, in what
    ``ModelCheckpoint`` saves, and in what ``EarlyStopping(restore_best_weights=True)`` keeps. Everything else sees the
    values of the group: ``CheckpointCallback`` saves these, and a callback of one's own writes ``with groups.outer():``
    around what it evaluates or saves. In a group of several processes only some of them may have such callbacks, and
    ``ModelCheckpoint`` between two epochs. Metrics and ``EarlyStopping`` are those of the group, which then waits in
    ``finish`` for the others: a callback that calls ``groups.stop()`` stops all.

    A learning rate schedule follows the job: if the rounds that the group has adopted are ahead of its own steps, as in
    a slow group and in one that joins late, ``optimizer.iterations`` rises to ``groups.version * groups.every``. It
    stays as it is if the learning rate is a number, and with ``gradient_accumulation_steps``.

    A group that was killed and starts again logs after how many steps and rows its last push was. Its ``fit`` begins
    with the first row, or where ``CheckpointCallback`` resumes; a loop of one's own goes on there
    (``groups.attach(model, data=iterator)``).

    Without ``REPLICAX_GROUP`` the training is bit-identical to one without this callback.

    Args:
      groups: The ``rx.experimental.LocalUpdates``, to which nothing is attached; for one ``fit``.
      finish_timeout_s: The longest time in seconds that the end of ``fit`` waits for the other groups.

    Raises:
      InvalidArgumentError: It is not a ``LocalUpdates``. In ``fit``: the group has no batch; or the model's
        ``steps_per_execution`` has a boundary of groups between its steps; the error says which values have not.
      UnsupportedError: In ``fit``: the strategy keeps variables on parameter servers, or there is a ``SwapEMAWeights``.
      WaitTimeoutError: At the end of ``fit``: the other groups took longer.

    >>> import keras, numpy as np, replicax as rx
    >>> groups = rx.experimental.LocalUpdates(every=30, fragments=2)  # no REPLICAX_GROUP: one group
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> callbacks = [rx.keras.callbacks.LocalUpdatesCallback(groups)]
    >>> _ = model.fit(np.ones((20, 3)), np.ones((20, 1)), batch_size=8, verbose=0, callbacks=callbacks)
    >>> groups.statistics()
    {'steps': 3, 'tokens': 20, 'version': 0}
    """

    def __init__(self, groups: LocalUpdates, *, finish_timeout_s: float = 3600.0):
        super().__init__()
        if not isinstance(groups, LocalUpdates):
            raise InvalidArgumentError(
                f"LocalUpdatesCallback got {type(groups).__name__}. Write "
                "LocalUpdatesCallback(rx.experimental.LocalUpdates(every=30))."
            )
        self._groups, self._finish_timeout_s = groups, finish_timeout_s
        self._fit: contextlib.ExitStack | None = None  # closed when fit ends, with or without an error
        self._outer = contextlib.ExitStack()  # closed when a validation ends
        self._fitted: Any = None  # `self.model` would give Keras's variables their values in each step
        self._new: Callable[[], tuple[int, int]] | None = None
        self._iterations: keras.Variable | None = None  # that a learning rate schedule reads
        self._is_attached = self._has_finished = False
        self._version = 0

    @contextlib.contextmanager
    def around_fit(self, others: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
        """Surrounds a ``fit`` with these other callbacks. Private."""
        if self._fit is not None:
            raise ContextError("This LocalUpdatesCallback is used by a fit that has not ended.")
        if self._has_finished:
            raise ContextError(
                "This LocalUpdatesCallback was in a fit that has ended, so its groups have finished. Make another LocalUpdates "
                "and another callback for the next fit, or train all epochs in one fit."
            )
        if any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in others):
            raise UnsupportedError(
                "LocalUpdatesCallback with SwapEMAWeights: both replace the model's values during validation. Leave out one of "
                "them."
            )
        try:
            with contextlib.ExitStack() as self._fit:
                yield
        except StopIteration as error:  # Keras builds a model without a strategy from the first batch
            raise InvalidArgumentError(
                f"Group {self._groups.index} of {self._groups.num_groups} (from 0) has no batch to train on. Give each group "
                "at least one in its `fit`, or start fewer groups."
            ) from error
        finally:
            self._outer.close()
            self._fit = self._fitted = self._new = None

    def keeping_values(self) -> contextlib.AbstractContextManager[object]:
        """Surrounds what ``ModelCheckpoint`` saves, and what ``EarlyStopping`` keeps. Private."""
        return self._groups.outer() if self._is_attached else contextlib.nullcontext()

    # --- what Keras calls -----------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the model, and begins to count."""
        if self._fit is None:
            raise ContextError(
                "LocalUpdatesCallback works only as a callback passed to fit(). In your own loops call groups.attach, "
                "groups.step and groups.finish. In a fit: import keras before LocalUpdates is made."
            )
        model: Any = self.model
        self._fitted = model
        steps, allowed = max(1, int(model.steps_per_execution)), self._groups.allowed_steps
        if steps not in allowed:
            raise InvalidArgumentError(
                f"LocalUpdatesCallback: the model takes steps_per_execution={steps} steps at once, and groups exchange between "
                f"two of them. Allowed are {', '.join(map(str, allowed))}; or give LocalUpdates `every` and `fragments` so "
                f"that every / fragments is a multiple of {steps}."
            )
        if isinstance(model.train_function, WorkerStepFunction):
            raise UnsupportedError(
                "LocalUpdatesCallback in a fit whose strategy keeps variables on parameter servers. Use MirroredStrategy, "
                "MultiWorkerMirroredStrategy, OneDeviceStrategy or no strategy in each group."
            )
        self._iterations = _iterations_of_schedule(model.optimizer)
        self._new = self._fit.enter_context(counting_rows(model))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Adopts the outer parameters before the first epoch."""
        self._attach()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the steps, exchanges what is due, and adopts what has arrived."""
        assert self._new is not None
        num_steps, num_rows = self._new()
        groups = self._groups
        groups.step(tokens=num_rows)
        for _ in range(num_steps - 1):  # the data may end within an execution, so boundaries lie anywhere
            groups.step(tokens=0)
        if groups.version != self._version:
            self._follow_job()
        if groups.should_stop:
            self._fitted.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Gives the model the outer parameters for a validation."""
        if self._fit is not None and self._is_attached:
            self._outer.enter_context(self._groups.outer())

    def on_test_end(self, logs: Any = None) -> None:
        """Gives the model the values of the group."""
        self._outer.close()

    def on_train_end(self, logs: Any = None) -> None:
        """Exchanges the rest, and adopts the outer parameters of all groups."""
        self._attach()  # a fit may have no epoch left
        self._groups.finish(self._finish_timeout_s)
        self._has_finished = True

    def _attach(self) -> None:
        if self._is_attached:
            return
        self._groups.attach(self.model)
        self._is_attached = True
        self._follow_job()

    def _follow_job(self) -> None:
        """Raises ``iterations`` to the steps of the job."""
        self._version = self._groups.version
        if self._iterations is None:
            return
        self._fitted.jax_state_sync()
        clock = self._version * self._groups.every
        if int(self._iterations.value) < clock:
            self._iterations.assign(clock)


def _iterations_of_schedule(optimizer: Any) -> keras.Variable | None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    iterations = optimizer.iterations
    is_schedule = not isinstance(optimizer.learning_rate, keras.Variable)
    return iterations if is_schedule and isinstance(iterations, keras.Variable) else None
