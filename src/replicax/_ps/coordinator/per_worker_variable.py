"""``PerWorkerVariable``: a variable with one value for each worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from replicax._ps.coordinator.cluster_coordinator import ClosureStrategy
from replicax._ps.coordinator.per_worker import experimental_get_current_worker_index
from replicax._ps.programs.iterator_inputs import current_elements
from replicax._src.program_kit.errors import VariableError
from replicax._src.program_kit.texts import as_dtype
from replicax._src.program_kit.variables import ArrayLike, Variable, strategy_for_new_variable


@final
class PerWorkerVariable(ArrayLike):
    """A variable with one value for each worker, such as a counter or a running mean of that worker's work.

    Make it in the scope of a ``ParameterServerStrategy``, in the coordinator. In scheduled functions it acts as the
    array of the worker that runs the function, and assignments change that array. The parameter servers hold its
    values as one variable ``[num_workers, ...]``, so a worker that reconnects after a failure finds its own value,
    and each update counts once. It is not trained.

    Args:
      initial_value: The initial value of each worker: an array, a number, or a function without arguments that
        returns one. It is evaluated once.
      name: A name for messages and checkpoints.
      dtype: The dtype; by default JAX's dtype of ``initial_value``.

    Attributes:
      name: The name that was given.
      shape: The shape of one worker's value.

    Raises:
      VariableError: It is made in another scope, or read outside of a scheduled function.

    Source: TensorFlow, ``tf.Variable(..., per_worker_variable=True)``.
    """

    def __init__(self, initial_value: Any, name: str | None = None, dtype: Any = None):
        strategy = strategy_for_new_variable()
        if not isinstance(strategy, ClosureStrategy):
            raise _needs_workers(strategy)
        strategy.form.check_coordinates(lambda: _needs_workers(strategy))
        value = initial_value() if callable(initial_value) else initial_value
        value = np.asarray(jnp.asarray(value, None if dtype is None else as_dtype(dtype)))
        self.name = name if name is not None else "PerWorkerVariable"
        self.shape = value.shape
        # It has one row, so that no partitioner splits it.
        all_values = np.broadcast_to(value, (1, strategy.session.num_workers, *value.shape))
        self._all = Variable(all_values, trainable=False, name=self.name)

    @property
    def dtype(self) -> Any:
        return self._all.dtype

    def __repr__(self) -> str:
        return (
            f"PerWorkerVariable({self.name!r}, shape={self.shape}, dtype={jnp.dtype(self.dtype).name}, "
            f"num_workers={self._all.shape[1]})"
        )

    @property
    def value(self) -> Any:
        """The value of the worker that runs the scheduled function."""
        return self.as_array()

    def read_value(self) -> Any:
        """Returns the same as ``value``."""
        return self.as_array()

    def as_array(self) -> Any:
        if current_elements() is None:
            raise VariableError(
                f"{self!r} has one value for each worker and was read outside of a scheduled function. Call read_all() "
                "for a list of all values."
            )
        return self._all[0, experimental_get_current_worker_index()]

    def read_all(self) -> list[Any]:
        """Returns the values of all workers, by index. It communicates and blocks."""
        return list(self._all[0])

    def assign(self, value: Any, read_value: bool = True) -> PerWorkerVariable:
        """Replaces the worker's value. Outside of scheduled functions it replaces the value of every worker."""
        return self._update(self._all.assign, value, lambda at, x: at.set(x))

    def assign_add(self, delta: Any, read_value: bool = True) -> PerWorkerVariable:
        """Adds to the worker's value. Outside of scheduled functions it adds to the value of every worker."""
        return self._update(self._all.assign_add, delta, lambda at, x: at.add(x))

    def assign_sub(self, delta: Any, read_value: bool = True) -> PerWorkerVariable:
        """Subtracts from the worker's value. Outside of scheduled functions it subtracts from the value of every
        worker.
        """
        return self._update(self._all.assign_sub, delta, lambda at, x: at.subtract(x))

    def _update(
        self, of_all: Callable[[Any], Any], value: Any, put: Callable[[Any, Any], Any]
    ) -> PerWorkerVariable:
        if not _broadcasts(np.shape(value), self.shape):
            raise VariableError(
                f"{self!r} was assigned a value of shape {np.shape(value)}, but shapes cannot change."
            )
        if current_elements() is None:
            of_all(np.broadcast_to(np.asarray(value, self.dtype), self._all.shape))
        else:
            at = self._all.read_value().at[0, experimental_get_current_worker_index()]
            self._all.assign(put(at, jnp.asarray(value, self.dtype)))
        return self


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _needs_workers(strategy: object) -> VariableError:
    return VariableError(
        "A PerWorkerVariable needs the scope of a ParameterServerStrategy that has workers, got "
        f"{strategy!r}. Elsewhere use rx.Variable; ON_READ variables have a value on each replica."
    )
