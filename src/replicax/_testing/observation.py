"""``ObservedRunner``: observes which gradients replica functions apply, and which state is per replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.strategies.running import DEFAULT_OPTIONS, ReplicaRunner
from replicax._src.tracing import key
from replicax._src.tracing.bindings import SyncPolicy
from replicax._src.tracing.capture import Capture, current_capture
from replicax._src.values.distributed import DistributedValues, Mirrored, PerReplica, is_value
from replicax._src.values.framework import open_modules
from replicax._src.vocabulary.errors import UnsupportedError
from replicax._src.vocabulary.options import RunOptions

_PER_REPLICA = (SyncPolicy.AVERAGED, SyncPolicy.FIRST)


@final
class ObservedRunner:
    """A runner that also collects the gradients that its replica functions apply.

    Args:
      runner: The runner to wrap. It works only inside a trace.
      num_rows: The number of rows of the global batch.
      num_replicas: The number of replicas of ``runner``.

    Attributes:
      names: The names of the gradients that optimizers got since ``restart``: the variable's name, or the path in a
        pytree.
      values: These gradients as applied, as values of the trace around the runs.
      weighed: Each gradient as the sum of the replicas' shares, weighted by their fractions of the rows. It is one
        device's gradient if the shares are means.
      per_replica_state: The variables that became equal on all replicas only because they were averaged, or copied from
        the first replica.
      reduced_at: The line that reduces a loss in a differentiated function; "" if there is none.
      num_hidden: The number of gradients that were applied inside a scan or condition, where they cannot be observed.
    """

    def __init__(self, runner: ReplicaRunner, num_rows: int, num_replicas: int):
        self._runner = runner
        self._num_replicas = num_replicas
        self._num_rows = num_rows
        self.restart()

    def restart(self) -> None:
        """Clears the observations, because the function around the runs is traced again."""
        self.names: list[str] = []
        self.values: list[Any] = []
        self.weighed: list[Any] = []
        self.per_replica_state: list[str] = []
        self.reduced_at = ""
        self.num_hidden = 0
        self.num_runs = 0

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: RunOptions
    ) -> Any:
        """Runs ``fn`` once per replica, and records the gradients that it applies."""
        del options  # memory and compiler options do not change results
        self.num_runs += 1
        fn = key.unwrap(fn)
        cells = key.lifted_cells(fn)
        if open_modules((tuple(args), dict(kwargs), cells))[1] is not None:
            raise UnsupportedError(
                "check_against_one_device got an nnx module, whose arrays it could not put back. Pass the module's state "
                "as arrays: nnx.split outside, nnx.merge in the function."
            )
        pytree = (tuple(args), dict(kwargs), cells)
        if self._num_replicas == 1:
            pytree = on_one_device(pytree)
        names: list[str] = []
        hidden: list[int] = []

        def observed(args: Any, kwargs: Any, cells: Any) -> Any:
            names.clear()
            hidden.clear()
            notes = _Notes(self._num_rows, names, hidden)
            result = key.with_cells(fn, cells)(*args, **kwargs)
            return result, notes.values, notes.weighed

        result, values, weighed = self._runner.run(observed, pytree, {}, DEFAULT_OPTIONS)
        self.names += names
        self.values += map(_whole, values)
        self.weighed += map(_whole, weighed)
        self.num_hidden += sum(hidden)
        program = self._runner.last_launcher.program
        self.reduced_at = self.reduced_at or program.reduced_at
        for index, is_same in zip(program.written, program.same_writes, strict=True):
            binding = program.bindings[index]
            if (
                not is_same
                and binding.sync_policy in _PER_REPLICA
                and program.bindings[index].num_replicas > 1
            ):
                self.per_replica_state.append(binding.name)
        return result

    def owned(self, array: Any) -> Any:
        """Calls ``owned`` of the runner."""
        return self._runner.owned(array)

    def check_eager(self) -> None:
        """Calls ``check_eager`` of the runner."""
        self._runner.check_eager()

    def check_steps(self) -> None:
        """Calls ``check_steps`` of the runner."""
        self._runner.check_steps()


def _whole(value: Any) -> Any:
    """Returns the common value of a value that is equal on all replicas."""
    if isinstance(value, PerReplica):
        return value.array if value.is_equal else value.array[0]
    return value.as_array() if isinstance(value, DistributedValues) else value


def on_one_device(pytree: Any) -> Any:
    """Returns arguments for a single replica: values that are replicated become plain arrays."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, Mirrored) or (isinstance(leaf, PerReplica) and leaf.is_equal):
            stored = leaf.stored
            if isinstance(stored, jax_compat.Tracer):
                return stored
            return stored.addressable_data(0) if jax_compat.is_typed_key(stored.dtype) else on_host(stored)
        return leaf

    return jax.tree_util.tree_map(plain, pytree, is_leaf=is_value)


class KeyWords(np.ndarray):
    """The words of typed random keys, [..., words]. They may be compared, but not added."""


def on_host(value: Any) -> np.ndarray:
    """Returns an array as a NumPy array, and typed random keys as their words."""
    if jax_compat.is_typed_key(value.dtype):
        return np.asarray(jax.random.key_data(value)).view(KeyWords)
    return np.asarray(value)


class _Notes:
    """Records the gradients that one replica function applies while it is traced."""

    def __init__(self, num_rows: int, names: list[str], hidden: list[int]):
        capture = current_capture()
        replica = context.get_replica_context()
        assert capture is not None
        assert replica is not None
        self._capture: Capture = capture
        self._communicator: Any = replica.communicator
        rows = capture.uneven.rows if capture.uneven is not None else num_rows / (capture.num_replicas or 1)
        self._part = rows / num_rows
        self._names, self._hidden = names, hidden
        self.values: list[Any] = []
        self.weighed: list[Any] = []
        capture.on_aggregate = self._note

    def _note(self, names: Sequence[str], gradients: Sequence[Any], applied: Sequence[Any]) -> None:
        if jax_compat.current_trace() is not self._capture.trace:
            self._hidden.append(len(applied))
            return
        self._names += names
        self.values += applied
        if gradients:
            self.weighed += self._communicator.sum([self._share(g) for g in gradients])

    def _share(self, gradient: Any) -> Any:
        if self._part:
            return gradient * jnp.asarray(self._part, gradient.dtype)
        return jnp.where(jnp.isfinite(gradient), gradient * 0, 0)  # a replica without rows may have nan
