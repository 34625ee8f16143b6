"""Takes the value of a summary at the call: a host value, or a copy on the device that is fetched later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.scope.context import in_replica_function
from replicax._src.tracing.capture import current_capture
from replicax._src.user.user_code import user_line
from replicax._src.values.distributed import ArrayLike
from replicax._src.values.framework import is_variable
from replicax._src.values.future_value import FutureValue
from replicax._src.vocabulary.errors import ContextError, InvalidArgumentError


def check_place(what: str, name: str) -> None:
    """Raises in functions that cannot write summaries: traced functions, and functions that every replica runs.

    Raises:
      ContextError: The caller is in a replica function, an ``rx.function``, a scheduled function, or one that JAX
        traces.
    """
    if in_replica_function() or current_capture() is not None or not jax_compat.is_evaluating():
        raise _misplaced(what, name)


def _misplaced(what: str, name: str) -> ContextError:
    return ContextError(
        f"The summary {what}({name!r}) at {user_line()} is in a function that is traced, or that every replica runs (in "
        "strategy.run, rx.function, schedule, jax.jit; a train_step). Return the value from that function, and write it in "
        "its caller: loss = strategy.reduce(rx.ReduceOp.SUM, strategy.run(step_fn, ...), axis=None); "
        f"writer.{what}({name!r}, loss, step). In `fit`, write from a keras.callbacks.Callback."
    )


def taken(value: Any, what: str, name: str) -> Any:
    """Returns ``value`` as a NumPy array, a JAX array, or a ``FutureValue``.

    It reads variables whose value is combined from the replicas, so all processes must call it.

    Raises:
      PerReplicaUseError: The value has one component per replica.
      InvalidArgumentError: Other processes hold parts of the value.
    """
    if is_variable(value):
        value = value.value
    if isinstance(value, ArrayLike):
        value = value.as_array()
    if isinstance(value, jax_compat.Tracer):
        raise _misplaced(what, name)
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        raise InvalidArgumentError(
            f"The summary {what}({name!r}) got an array with parts in other processes. Reduce or gather it first, in "
            "all processes: strategy.gather(value, axis=0)."
        )
    if isinstance(value, (jax.Array, FutureValue)):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{what}({name!r}) got something that is not an array: {value!r:.200}: {error}."
        ) from error


_copy = jax.jit(jnp.copy)  # without jit it takes 30 µs more (jax 0.10)


def fetching(value: Any) -> Callable[[], np.ndarray]:
    """Returns a function that fetches a ``taken`` value to the host later, on any thread.

    It copies arrays on their devices without waiting, because the next step may reuse their memory.
    """
    if isinstance(value, FutureValue):
        return lambda: np.asarray(value.fetch())
    if isinstance(value, jax.Array):
        copy = _copy(value.addressable_data(0) if value.is_fully_replicated else value)
        copy.copy_to_host_async()
        return lambda: np.asarray(copy)
    array = np.array(value)
    return lambda: array
