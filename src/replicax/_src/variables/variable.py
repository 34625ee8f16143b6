"""``rx.Variable``: a mutable array that strategies keep in sync, or keep one component of per replica."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.collectives import in_replica
from replicax._src.collectives.in_replica import Communicator, IndexedSlices
from replicax._src.devices.named_devices import device_name
from replicax._src.drawing import html
from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.scope.any_placement import Placement
from replicax._src.tracing.bindings import Binding, LateValues, Stored, SyncPolicy, state_lock
from replicax._src.tracing.capture import current_capture, note_created
from replicax._src.user.listening import listener
from replicax._src.user.user_code import user_line
from replicax._src.values.array_types import ConvertibleToArray
from replicax._src.values.distributed import (
    ArrayLike,
    DistributedValues,
    PerReplica,
    on_host_or_keys,
    shown_value,
)
from replicax._src.values.dtypes import as_dtype
from replicax._src.values.framework import Framework, use
from replicax._src.values.narrowing import narrowed_pytree
from replicax._src.variables.caching import cached_read
from replicax._src.vocabulary.errors import ReplicaxError, TraceError, UnsupportedError, VariableError
from replicax._src.vocabulary.options import ReduceOp, VariableAggregation, VariableSynchronization

_SUMMED_ASSIGN_ADD = (
    "SyncOnReadVariable does not support `{method}` in cross-replica context when aggregation is set to "
    "`tf.VariableAggregation.SUM`: variable {name!r} has one component per replica, and it is not clear which "
    "of them should change. Use assign, or {method} inside strategy.run."
)

Combine = Callable[[jax.Array, jax.Array], jax.Array]
"""Returns the new value of a variable, given the old one and what is assigned."""
_ArgumentsOfCopy = tuple[
    np.ndarray | jax.Array, bool, str, np.dtype, VariableSynchronization, VariableAggregation
]
"""The arguments that make a copy of a variable."""


@final
class Variable(ArrayLike):
    """A mutable array. The strategy in whose scope it is made places it.

    Under a strategy with R > 1 replicas a variable is *mirrored* (every device holds the same value) or, with
    ``synchronization=ON_READ``, has one component per replica. In ``Strategy.run`` an assignment to a mirrored variable
    is combined over replicas by ``aggregation``. With NONE the value must be the same on all replicas, which the trace
    of the function proves. If a variable was made outside of every scope, several replicas may read it, but not assign
    it. It acts as an array in every context.

    Args:
      initial_value: An array, a number, or a function of no arguments that returns one. It is evaluated once.
      trainable: True if gradient tapes watch the variable when it is read. The default is True, except for ON_READ.
      name: The name in messages and checkpoints.
      dtype: The dtype; by default JAX's dtype of ``initial_value``.
      synchronization: AUTO (as ON_WRITE), ON_WRITE or ON_READ.
      aggregation: NONE, SUM, MEAN or ONLY_FIRST_REPLICA.

    Raises:
      VariableError: The synchronization is NONE, the aggregation is MEAN for integers, or the initial value is traced.
      MixedStrategiesError: Scopes of two strategies are open.

    Source: TensorFlow, ``tf.Variable`` and ``tf.distribute.DistributedVariable``.

    >>> import replicax as rx
    >>> v = rx.Variable(1.0)
    >>> v.assign_add(2.0)
    Variable('Variable', shape=(), dtype=float32, value=3.0)
    """

    if not TYPE_CHECKING:  # __new__ may return a ShardedVariable, which has the same methods

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            variable = super().__new__(cls)
            placement = context.strategy_for_new_variable().variable_placement
            if placement.partitioner is None:
                return variable
            variable.__init__(*args, **kwargs)
            return placement.in_shards(variable)

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ):
        if "name" in vars(self):  # __new__ has initialised it, without shards
            return
        self.name = name if name is not None else "Variable"
        self.synchronization = VariableSynchronization.parse(synchronization)
        if self.synchronization is VariableSynchronization.AUTO:
            self.synchronization = VariableSynchronization.ON_WRITE
        is_written = self.synchronization is VariableSynchronization.ON_WRITE
        self.trainable = is_written if trainable is None else bool(trainable)
        self.aggregation = VariableAggregation.parse(aggregation)
        if self.synchronization is VariableSynchronization.NONE:
            raise VariableError(
                "`NONE` variable synchronization mode is not supported with tf.distribute strategy: leave "
                "synchronization out (ON_WRITE), or use ON_READ for one component per replica."
            )
        value = _first_value(initial_value, dtype, self.name)
        if self.aggregation is VariableAggregation.MEAN and not jnp.issubdtype(value.dtype, jnp.inexact):
            raise VariableError(
                f"creating variable {self.name!r} with aggregation=MEAN and a non-floating dtype {value.dtype} is "
                f"not supported: the mean of integers is not an integer. Use a floating dtype, or SUM."
            )
        self._strategy = context.strategy_for_new_variable()
        self._placement: Placement = self._strategy.variable_placement
        self.shape = tuple(value.shape)
        self.dtype = value.dtype
        self._has_components = (
            self.synchronization is VariableSynchronization.ON_READ and self._placement.num_replicas > 1
        )
        # One value on parameter servers, of which a worker's replicas have components while they run.
        self._is_summed = (
            self.synchronization is VariableSynchronization.ON_READ
            and self.aggregation is VariableAggregation.SUM
            and not self._has_components
            and self._placement.topology.num_replicas > 1
        )
        # A separate object, because the variable's ``__getattr__`` makes attributes slow. The binding, which has the
        # layout, refers to it.
        self._stored = Stored(None)
        with jax_compat.outside_traces():
            parts = self._initial_components(value) if self._has_components else None
            layout = self._strategy.bindings.layout_of(self)
            self._stored.array = self._placement.place_initial(value, parts, self.name, layout)
        note_created(self.name)

    @property
    def _value(self) -> Any:
        LateValues.settle()
        return self._stored.array

    @_value.setter
    def _value(self, value: Any) -> None:
        LateValues.settle()
        self._stored.array = value

    # --- reading --------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            # Python calls this for an unknown name, or after a property raised an AttributeError. It only raises.
            if name.startswith("_") or name in dir(type(self)):
                return object.__getattribute__(self, name)
            if getattr(jax.Array, name, None) is None:
                advice = listener().missing_attribute(self, name, "variable")
                if advice is None:
                    return object.__getattribute__(self, name)
                raise AttributeError(
                    f"A {type(self).__name__} has no attribute {name!r}. {advice}", name=name
                )
            raise AttributeError(
                f"A {type(self).__name__} has no attribute {name!r}. Its value is an array and has it: variable.value.{name}. "
                "Functions of jax.numpy take the variable itself: jnp.sum(variable).",
                name=name,
            )

    @property
    def value(self) -> jax.Array:
        """The value: this replica's in a replica function, and aggregated over replicas elsewhere.

        With several processes, a read of an ON_READ variable outside of ``run`` communicates and blocks. All processes
        must make it, in the same order relative to programs.

        Raises:
          VariableError: An ON_READ variable with aggregation NONE is read outside a replica function.
          MixedStrategiesError: It is read under another strategy.
          ProgramMismatchError: Only some processes read it.
        """
        return self.read_value()

    def read_value(self) -> jax.Array:
        """Returns ``value``."""
        raw = cached_read(self, self._raw, current_capture())
        if not self._has_components or context.in_replica_function() or context.in_update():
            return raw
        return self._aggregate(raw)

    def as_array(self) -> jax.Array:
        return self.read_value()

    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array (a copy). Blocks until it is computed."""
        return np.array(self.read_value())

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """Copies of the components on the devices of this process's replicas, in replica order."""
        raw = self._raw()
        communicator = _communicator() or context.merge_communicator()
        if communicator is not None:  # in a replica function the raw value is this replica's own
            return tuple(communicator.components(raw))
        if isinstance(raw, jax_compat.Tracer):
            return tuple(raw) if self._has_components else (raw,) * self._placement.num_replicas
        return self._placement.components(self._value, self._has_components)

    @property
    def has_components(self) -> bool:
        """True if each replica has its own value (ON_READ, with several replicas)."""
        return self._has_components

    @property
    def components_array(self) -> jax.Array:
        """The array [R, ...] of the components, of which each process has its own rows."""
        return self._raw()

    # --- copying ----------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Returns a new variable of the same strategy, with the same value."""
        arguments = self._arguments_of_copy()
        with self._strategy.scope():
            copied = memo[id(self)] = Variable(*arguments)
        return copied

    def __copy__(self) -> Variable:
        return self.__deepcopy__({})

    def __reduce__(self) -> tuple[type[Variable], _ArgumentsOfCopy]:
        """Pickles the value and the options. Loading makes a new variable in the scope that is open then."""
        return Variable, self._arguments_of_copy()

    def _arguments_of_copy(self) -> _ArgumentsOfCopy:
        if current_capture() is not None:
            raise VariableError(
                f"Variable {self.name!r} was copied or pickled in a function that is being traced, and every call would make a "
                "new variable. Copy it outside, or compute with its value: variable.value."
            )
        if self._has_components or self._is_summed or self._placement.partitioner is not None:
            what = (
                "in shards" if self._placement.partitioner is not None else "one value per replica (ON_READ)"
            )
            raise UnsupportedError(
                f"Variable {self.name!r} is {what}, which copy and pickle do not keep. To keep its state use "
                "rx.Checkpoint(v=variable); for a new variable with the value that it reads write "
                "rx.Variable(variable.numpy()) in the scope."
            )
        value = on_host_or_keys(self.read_value())
        return (value, self.trainable, self.name, self.dtype, self.synchronization, self.aggregation)

    @property
    def path(self) -> str:
        """The ``name``, which the patterns of a ``LayoutMap`` match."""
        return self.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope the variable was made."""
        return self._strategy

    def _repr_html_(self) -> str:
        stored = self._value
        is_array = isinstance(stored, jax.Array)
        about: dict[str, object] = {
            "name": self.name,
            "array": f"{self.dtype}{list(self.shape)}",
            "trainable": self.trainable,
            "synchronization": self.synchronization.name,
            "aggregation": self.aggregation.name,
            "strategy": self._strategy,
            "lies": self._lies(stored) if is_array else stored,
            "value": None if self._has_components or not is_array else shown_value(stored),
        }
        return html.page("Variable", html.facts(about))

    def _lies(self, stored: jax.Array) -> str:
        count = len(stored.sharding.device_set)
        if self._has_components:
            return f"one component on each of {self._placement.num_replicas} replicas"
        if count == 1:
            (device,) = stored.sharding.device_set
            return f"on {device_name(device)}"
        if stored.is_fully_replicated:
            return f"whole on each of {count} devices"
        return f"in shards of {list(stored.sharding.shard_shape(stored.shape))} on {count} devices"

    def __repr__(self) -> str:
        head = f"Variable({self.name!r}, shape={self.shape}, dtype={self.dtype}"
        if current_capture() is None and self._is_far():
            return f"{head})"  # reading the value would communicate
        try:
            shown = self.read_value()
        except (VariableError, RuntimeError) as error:
            return f"{head}, value=<{type(error).__name__}>)"
        return f"{head}, value={shown if isinstance(shown, jax_compat.Tracer) else on_host_or_keys(shown)})"

    def _is_far(self) -> bool:
        """Returns True if a read needs other processes."""
        if not isinstance(self._value, jax.Array):
            return True
        is_combined = self._has_components and self._placement.topology.peers is not None
        return is_combined or not (self._value.is_fully_addressable or self._value.is_fully_replicated)

    def _raw(self) -> jax.Array:
        """The stored value: one array, this replica's component, or in cross-replica code all components [R, ...]."""
        context.check_strategy_of(self._strategy, f"variable {self.name!r}")
        capture = current_capture()
        if capture is not None:
            return capture.read(self)
        with state_lock:  # otherwise another thread's step might donate it
            stored = self._value
        return self._placement.current(stored)

    def _aggregate(self, raw: jax.Array) -> jax.Array:
        op = self._aggregation_op("read")
        communicator = context.merge_communicator()
        if communicator is not None:  # in merge_call the program sees its own component
            if op is None:
                return in_replica.first_replicas(communicator, [raw])[0]
            return in_replica.all_reduce(communicator, op, raw)
        topology = self._placement.topology
        if not isinstance(raw, jax_compat.Tracer) and topology.peers is not None:
            with jax_compat.outside_traces():
                return self._aggregation_of_processes(raw)
        total = _aggregated(raw, op)
        if not isinstance(total, jax_compat.Tracer) and topology.is_cpu:
            total.block_until_ready()  # too many collectives in flight would abort the process
        return total

    @functools.cached_property
    def _aggregation_of_processes(self) -> Callable[[jax.Array], jax.Array]:
        """The program of a read that needs all processes."""
        topology = self._placement.topology
        aggregated = functools.partial(_aggregated, op=self._aggregation_op("read"))
        name = f"reading variable {self.name!r}"
        return topology.compile(aggregated, name, is_read=True, out_shardings=topology.replicated)

    def _aggregation_op(self, what: str) -> ReduceOp | None:
        """Returns the reduction of the aggregation; None for the first replica's value."""
        if self.aggregation is VariableAggregation.NONE:
            raise VariableError(
                f"Could not convert from `tf.VariableAggregation` {self.aggregation} to `tf.distribute.ReduceOp` "
                f"type: variable {self.name!r} has one component per replica and aggregation NONE, so it has no "
                f"single value to {what} outside strategy.run. Make it with aggregation SUM, MEAN or "
                f"ONLY_FIRST_REPLICA, or take strategy.experimental_local_results(variable)."
            )
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return None
        return ReduceOp[self.aggregation.name]

    # --- assigning ------------------------------------------------------------------------------------

    def assign(self, value: Any, read_value: bool = True) -> Any:
        """Replaces the value.

        In a replica function with R replicas and x_r the value of replica r, a mirrored variable becomes
        Σ x_r (SUM), Σ x_r / R (MEAN), x_0 (ONLY_FIRST_REPLICA), or x (NONE, if x is proven to be the same on all
        replicas). Replica r's component of an ON_READ variable becomes x_r. Outside, a mirrored variable becomes
        ``value``. Every component of an ON_READ variable becomes ``value``, or ``value`` / R if reads sum the
        components.

        Args:
          value: An array [...] of the variable's shape.
          read_value: Accepted for compatibility with TensorFlow.

        Returns:
          The new value in a replica function; the variable elsewhere.

        Raises:
          VariableError: The value has another shape or is a per-replica value outside ``run``; or several replicas
            assign a variable that was made outside of every scope.
        """
        del read_value
        return self._update("assign", value, lambda old, new: new)

    def assign_add(self, delta: Any, read_value: bool = True) -> Any:
        """Adds ``delta``, combined over replicas as in ``assign``."""
        del read_value
        return self._update("assign_add", delta, lambda old, new: old + new)

    def assign_sub(self, delta: Any, read_value: bool = True) -> Any:
        """Subtracts ``delta``, combined over replicas as in ``assign``."""
        del read_value
        return self._update("assign_sub", delta, lambda old, new: old - new)

    def _update(self, method: str, value: ConvertibleToArray, combine: Combine) -> Any:
        if current_capture() is None and self._placement.update(_ON_SERVERS[method], self, value):
            return self
        self._check_is_of_scope(method)
        raw = self._raw()
        value = self._incoming(method, value)
        if context.in_replica_function():
            communicator = _communicator()
            is_own = self._has_components or self._is_summed
            if not is_own and communicator is not None:
                value = self._combine_replicas(communicator, method, value)
            return self._write(combine(raw, value))
        if self._has_components and not context.in_update():
            self._write_components(method, raw, value, combine)
        else:
            self._write(combine(raw, value))
        return self

    def _check_is_of_scope(self, method: str) -> None:
        """Raises if several replicas assign a variable that was made outside of every scope."""
        communicator = _communicator() if self._strategy.is_default else None
        if communicator is None or communicator.num_replicas == 1:
            return
        raise VariableError(
            f"Variable {self.name!r} was made outside of every scope, and {method} at {user_line()} runs on "
            f"{communicator.num_replicas} replicas. TensorFlow would assign it {communicator.num_replicas} times, one after "
            "another. Make it in `with strategy.scope():`. There an assignment counts once if its value is the same on all "
            "replicas, and with aggregation=rx.VariableAggregation.SUM the values of all replicas are added. Or assign it "
            "outside of strategy.run: replicas may read it."
        )

    def _incoming(self, method: str, value: ConvertibleToArray) -> jax.Array:
        if isinstance(value, PerReplica) and not value.is_equal:
            raise VariableError(
                f"{method} of variable {self.name!r} in cross-replica context got a PerReplica value: which of "
                f"its {value.num_replicas} components is meant? Reduce it first: "
                f"strategy.reduce(rx.ReduceOp.SUM or MEAN, value, axis=None)."
            )
        local = getattr(value, "local", value) if isinstance(value, DistributedValues) else value
        array = as_array(local, f"The value for {method} of variable {self.name!r}", self.dtype)
        if array.dtype != self.dtype:
            if jnp.issubdtype(array.dtype, jnp.inexact) and not jnp.issubdtype(self.dtype, jnp.inexact):
                raise VariableError(
                    f"{method} of variable {self.name!r}, whose dtype is {self.dtype}, got {array.dtype}: the "
                    f"fraction would be lost. Round and convert it first, with value.astype({self.dtype})."
                )
            array = array.astype(self.dtype)
        if array.shape != self.shape:
            if method == "assign" or not _broadcasts(array.shape, self.shape):
                raise VariableError(
                    f"{method} of variable {self.name!r}: its shape is {self.shape}, and a value of shape "
                    f"{array.shape} was given. Shapes cannot change."
                )
            array = jnp.broadcast_to(array, self.shape)
        return array if current_capture() is not None else self._placement.beside(array, self._has_components)

    def _combine_replicas(self, communicator: Communicator, method: str, value: jax.Array) -> jax.Array:
        if self.aggregation is VariableAggregation.NONE or communicator.num_replicas == 1:
            return value
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return in_replica.first_replicas(communicator, [value])[0]
        op = ReduceOp[self.aggregation.name]
        if op is ReduceOp.MEAN and not jnp.issubdtype(value.dtype, jnp.inexact):
            raise VariableError(f"Cannot update non-float variables with aggregation=MEAN ({method}).")
        return context.get_strategy().reduce_in_replica(communicator, op, value, None)

    def _write(self, raw: jax.Array) -> jax.Array:
        capture = current_capture()
        if capture is None:
            if isinstance(raw, jax_compat.Tracer):
                raise TraceError(
                    f"Variable {self.name!r} was assigned at {user_line()} in a function that JAX traces without "
                    f"replicax (jax.jit, jax.grad, …), and the value cannot leave it. Assign it in strategy.run, "
                    f"rx.function or plain Python."
                )
            components = raw if self._has_components else None
            self._value = self._placement.replaced(self._value, raw, components)
        else:
            capture.write(self, raw)
            raw = capture.read(self)
        return raw

    def _write_components(self, method: str, raw: jax.Array, value: jax.Array, combine: Combine) -> None:
        """Assigns an ON_READ variable in cross-replica code."""
        is_sum = self.aggregation is VariableAggregation.SUM
        if is_sum and method != "assign":
            raise VariableError(_SUMMED_ASSIGN_ADD.format(method=method, name=self.name))
        if is_sum:
            value = in_replica.mean_of_sum(value, self._placement.num_replicas).astype(self.dtype)
        topology = self._placement.topology
        is_traced = isinstance(value, jax_compat.Tracer)
        if current_capture() is None and topology.peers is not None and not is_traced:
            here = np.asarray(value)  # no process needs the components of another one
            self._write(topology.map_rows(lambda row: combine(row, jnp.broadcast_to(here, row.shape)), raw))
            return
        if context.merge_communicator() is None:
            value = jnp.broadcast_to(value, (self._placement.num_replicas, *self.shape))
        self._write(combine(raw, value))

    def _initial_components(self, value: jax.Array | np.ndarray) -> jax.Array:
        """Returns the components at creation, where each replica starts from the initial value."""
        return jnp.broadcast_to(value, (self._placement.num_replicas, *self.shape))

    # --- rows -----------------------------------------------------------------------------------------

    def scatter_add(self, sparse_delta: IndexedSlices) -> Any:
        """Adds rows: ``variable[indices[i]] += values[i]``. In ``run``, combines the rows of all replicas by
        aggregation.
        """
        return self._scatter("scatter_add", sparse_delta, lambda at, v: at.add(v))

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Any:
        """Subtracts rows, as in ``scatter_add``."""
        return self._scatter("scatter_sub", sparse_delta, lambda at, v: at.add(-v))

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Any:
        """Multiplies rows, as in ``scatter_add``."""
        return self._scatter("scatter_mul", sparse_delta, lambda at, v: at.multiply(v))

    def scatter_div(self, sparse_delta: IndexedSlices) -> Any:
        """Divides rows, as in ``scatter_add``."""
        return self._scatter("scatter_div", sparse_delta, lambda at, v: at.divide(v))

    def scatter_min(self, sparse_delta: IndexedSlices) -> Any:
        """Takes the elementwise minimum of rows. The aggregation must be NONE or ONLY_FIRST_REPLICA."""
        return self._scatter("scatter_min", sparse_delta, lambda at, v: at.min(v), is_idempotent=True)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Any:
        """Takes the elementwise maximum of rows. The aggregation must be NONE or ONLY_FIRST_REPLICA."""
        return self._scatter("scatter_max", sparse_delta, lambda at, v: at.max(v), is_idempotent=True)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Any:
        """Replaces rows. The aggregation must be NONE or ONLY_FIRST_REPLICA."""
        return self._scatter("scatter_update", sparse_delta, lambda at, v: at.set(v), is_idempotent=True)

    def _scatter(
        self,
        method: str,
        delta: IndexedSlices,
        apply: Callable[[Any, jax.Array], jax.Array],
        is_idempotent: bool = False,
    ) -> Any:
        if not isinstance(delta, IndexedSlices):
            raise VariableError(
                f"{method} takes rx.IndexedSlices(values, indices), got {type(delta).__name__}."
            )
        if self._has_components or self._is_summed:
            raise UnsupportedError(f"{method} is not supported for variable {self.name!r}: it is ON_READ.")
        allowed = (VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA)
        if current_capture() is None and self._placement.update(_ON_SERVERS[method], self, delta):
            return self
        self._check_is_of_scope(method)
        raw = self._raw()
        communicator = _communicator() if context.in_replica_function() else None
        if communicator is not None and communicator.num_replicas > 1:
            if is_idempotent and self.aggregation not in allowed:
                raise UnsupportedError(
                    f"{method} is only supported for mirrored variable (variable created within certain "
                    f"`tf.distribute.Strategy` scope) with NONE or `ONLY_FIRST_REPLICA` aggregation, got: "
                    f"{self.aggregation}."
                )
            delta = self._combine_slices(communicator, delta)
        of = f"of {method} of variable {self.name!r}"
        values = as_array(delta.values, f"The values {of}", self.dtype).astype(self.dtype)
        indices = as_array(delta.indices, f"The indices {of}")
        if current_capture() is None:
            values, indices = (self._placement.beside(x, self._has_components) for x in (values, indices))
        raw = self._write(apply(raw.at[indices], values))
        return raw if context.in_replica_function() else self

    def _combine_slices(self, communicator: Communicator, delta: IndexedSlices) -> IndexedSlices:
        if self.aggregation is VariableAggregation.NONE:
            return delta
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            values, indices = in_replica.first_replicas(communicator, [delta.values, delta.indices])
            return IndexedSlices(values, indices, delta.dense_shape)
        return in_replica.all_reduce(communicator, ReduceOp[self.aggregation.name], delta)


def _on_servers(method: str) -> Callable[[Variable, ConvertibleToArray | IndexedSlices], None]:
    """Returns a function that assigns a variable on its servers."""

    def assign(variable: Variable, value: ConvertibleToArray | IndexedSlices) -> None:
        getattr(variable, method)(value)

    assign.replicax_family = method  # type: ignore[attr-defined]
    return assign


_ASSIGNING = ("assign", "assign_add", "assign_sub")
_SCATTERING = ("add", "sub", "mul", "div", "min", "max", "update")
_ON_SERVERS = {
    name: _on_servers(name) for name in (*_ASSIGNING, *(f"scatter_{what}" for what in _SCATTERING))
}


# The dtypes of NumPy that devices have, perhaps after narrowing. NumPy regards dtypes of another byte order as unequal.
_ON_DEVICES = {np.dtype(char) for char in "?bBhHiIqQlLefdFD"}


def _first_value(
    initial_value: ConvertibleToArray | Callable[[], ConvertibleToArray],
    dtype: jax.typing.DTypeLike | None,
    name: str,
) -> jax.Array | np.ndarray:
    """Returns the value of a new variable, or the caller's NumPy array if no device needs to convert it: a variable in
    shards may be larger than the memory of one device.
    """
    with jax_compat.outside_traces():
        value = initial_value() if callable(initial_value) else initial_value
        dtype = None if dtype is None else as_dtype(dtype)
        what = f"The initial value of variable {name!r}"
        if type(value) is np.ndarray and value.dtype in _ON_DEVICES and dtype in (None, value.dtype):
            return narrowed_pytree(value, what)
        array = as_array(value, what, dtype)
        if isinstance(array, jax_compat.Tracer):
            raise VariableError(
                f"The initial value of variable {name!r} is computed in a function that is being traced. A variable "
                f"is made once, before the program runs: compute its initial value outside, or give a function "
                f"of no arguments that computes it from constants."
            )
        return array if dtype is None else jnp.asarray(array, dtype=dtype)


def as_array(value: ConvertibleToArray, what: str, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Returns ``value`` as an array. Errors call it ``what``. The caller converts it to the variable's dtype.

    Raises:
      VariableError: It is not an array or a number.
      NarrowingError: It has 64 bits, and a number does not fit into 32.
    """
    if isinstance(value, ArrayLike):
        value = value.as_array()
    if isinstance(value, jax.Array):
        return value
    is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    if is_inexact and isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "iu":
        value = value.astype(dtype)  # the target dtype holds numbers that 32-bit integers do not
    try:
        array = narrowed_pytree(value, what)
        # JAX may adopt NumPy's memory or read it after this call, when the caller may change it (jax 0.10).
        return jnp.asarray(array.copy() if isinstance(array, np.ndarray) else array)
    except (TypeError, ValueError) as error:
        if isinstance(error, ReplicaxError):
            raise
        raise VariableError(
            f"{what} must be an array or a number (or, when it is made, a function that returns one); got "
            f"{type(value).__name__}."
        ) from error


def _aggregated(components: jax.Array, op: ReduceOp | None) -> jax.Array:
    """Returns the sum or mean of components [R, ...], or the first one if ``op`` is None."""
    if op is None:
        return components[0]
    total = jnp.sum(components, axis=0, dtype=components.dtype)
    return in_replica.from_sum(op, total, components.shape[0])


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Returns True if an array of ``shape`` can be broadcast to ``target``."""
    missing = len(target) - len(shape)
    return missing >= 0 and all(s in (1, t) for s, t in zip(shape, target[missing:], strict=True))


def _communicator() -> Communicator | None:
    replica = context.get_replica_context()
    return replica.communicator if replica is not None else None


# --- bindings: how programs see variables ----------------------------------------------------------------


class _VariableAccessor:
    """Reads and writes the stored values of variables."""

    def get(self, holders: Sequence[Stored]) -> list[Any]:
        LateValues.settle()
        return [stored.array for stored in holders]

    def set(self, holders: Sequence[Stored], values: Sequence[Any]) -> None:
        LateValues.settle()
        for stored, value in zip(holders, values, strict=True):
            stored.array = value

    def late(self, holders: Sequence[Stored]) -> LateValues:
        return LateValues(holders)


_accessor = _VariableAccessor()


def _make_binding(variable: Variable, num_replicas: int) -> Binding:
    sync_policy = SyncPolicy.COMPONENTS if variable._has_components else SyncPolicy.MIRRORED
    if variable._is_summed and num_replicas > 1:  # otherwise it is one value
        sync_policy = SyncPolicy.SUMMED
    return Binding(
        variable, _accessor, variable.name, variable.shape, variable.dtype, sync_policy, variable._stored
    )


use(Framework("replicax", variable_types=(Variable,), make_binding=_make_binding))

# In JAX functions a variable is its value.
_as_its_value: Any = lambda _, values: values[0]  # noqa: E731
jax.tree_util.register_pytree_node(Variable, lambda v: ((v.read_value(),), None), _as_its_value)
