"""Runs one step as a pure function of the state, on all replicas or on one. It assigns no variable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices.topology import Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.spmd import BindingGroup
from replicax._src.scope import context
from replicax._src.scope.any_strategy import StrategyParts, StrategyView
from replicax._src.strategies.cross_replica_code import on_mesh
from replicax._src.strategies.running import ReplicaRunner
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing import key
from replicax._src.tracing.bindings import (
    Binding,
    BindingTable,
    SyncPolicy,
    check_no_tracer,
    is_stored_as_parts,
    state_lock,
)
from replicax._src.tracing.cache import array_leaf
from replicax._src.tracing.equations import equations
from replicax._src.tracing.labels import watching_labels
from replicax._src.tracing.passes import trace_cross_replica
from replicax._src.tracing.program import Variant
from replicax._src.values.framework import is_variable
from replicax._src.variables.placement import VariablePlacement
from replicax._src.variables.variable import Variable
from replicax._src.vocabulary.options import VariableAggregation
from replicax._testing.observation import ObservedRunner, on_host

_NO_ITERATION = (
    "A distributed dataset was iterated in the function that check_against_one_device runs, so that both runs would see other "
    "rows. Give the function that takes one batch, and the batch."
)
_RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})


@dataclass(frozen=True)
class State:
    """A variable before and after the step, as one device sees it; ``new`` is None if it has no single value."""

    variable: Any
    name: str
    old: np.ndarray
    new: np.ndarray | None


@dataclass(frozen=True)
class StepOutcome:
    """The result of one run of the step, on the host.

    Attributes:
      result: The result of the function. Arrays are NumPy arrays, typed keys are KeyWords; PerReplica values stay
        PerReplica.
      gradients: The gradients of all calls of ``strategy.run``: the name, the value as applied, and the weighted value.
      states: The variables that the step assigned, by ``id``. per_replica_state, num_hidden, reduced_at: See
        ``ObservedRunner``.
      has_randomness: True if the step drew random numbers.
      dtypes: The floating dtypes of the computation.
      remarks: The mistakes of ``LabelWatch``.
    """

    result: Any
    gradients: list[tuple[str, np.ndarray, np.ndarray]]
    states: dict[int, State]
    per_replica_state: tuple[str, ...]
    num_hidden: int
    reduced_at: str
    has_randomness: bool
    dtypes: frozenset[Any]
    remarks: tuple[str, ...]


class Side:
    """One of the two ways to run a step. It provides the strategy's parts during the run, and loads the state."""

    def __init__(
        self,
        strategy: Strategy,
        parts: StrategyParts,
        num_rows: int,
        load: Callable[[list[Binding]], list[Any]],
    ):
        assert isinstance(parts.runner, ReplicaRunner)
        self.observed = ObservedRunner(parts.runner, num_rows, parts.topology.num_replicas)
        self.parts = StrategyParts(parts.topology, parts.variable_placement, parts.bindings, self.observed)
        self._strategy = strategy
        self._own_bindings = strategy.bindings
        self._has_run = False
        self._load = load

    @classmethod
    def on_replicas(cls, strategy: Strategy, num_rows: int) -> Side:
        """Returns the side that runs on all replicas of the strategy."""
        parts = strategy.parts

        def load(bindings: list[Binding]) -> list[Any]:
            group = BindingGroup(bindings, parts.variable_placement)
            with state_lock:
                BindingGroup.update_bindings()
                values = dict(zip(map(id, group.bindings), group.load(for_donation=False), strict=True))
            return [values[id(binding)] for binding in bindings]

        return cls(strategy, parts, num_rows, load)

    @classmethod
    def on_one_device(cls, strategy: Strategy, num_rows: int) -> Side:
        """Returns the side that runs on one replica, on the strategy's first device."""
        own = strategy.parts
        topology = Topology.of(own.topology.devices[:1])
        parts = StrategyParts(
            topology, VariablePlacement(topology), BindingTable(1), ReplicaRunner(strategy, topology)
        )

        def load(bindings: list[Binding]) -> list[Any]:
            loaded = []
            for binding in bindings:
                value = _held(own.bindings.binding_of(binding.variable))
                value = topology.put_whole(value)
                loaded.append(value[None] if binding.sync_policy.is_per_replica else value)
            return loaded

        return cls(strategy, parts, num_rows, load)

    @property
    def has_run(self) -> bool:
        """True if the step called ``strategy.run``."""
        return self._has_run or self.observed.num_runs > 0

    def run(self, step: Callable[..., Any], arguments: Any) -> StepOutcome:
        """Traces ``step(*arguments)``, cross-replica code, and runs it on copies of the state."""
        with (
            context.Scope(self._strategy, view=StrategyView(self._strategy, self.parts)),
            context.no_iteration(_NO_ITERATION),
            watching_labels() as labels,
        ):
            variant, arrays = self._trace(step, arguments)
            bindings = [entry.binding for entry in variant.entries]
            olds = {id(s): on_host(_held(self._own_bindings.binding_of(s.variable))) for s in bindings}
            results, writes = _evaluate(variant, self._load(bindings), arrays, self.parts.topology)
        names = list(self.observed.names)
        result, values, weighed = jax.tree_util.tree_unflatten(variant.tree, results)
        states = {
            id(entry.binding.variable): State(
                entry.binding.variable,
                entry.binding.name,
                olds[id(entry.binding)],
                _as_one_device(entry.binding, new),
            )
            for entry, new in zip(variant.written, writes, strict=True)
        }
        return StepOutcome(
            result,
            list(zip(names, map(np.asarray, values), map(np.asarray, weighed), strict=True)),
            states,
            tuple(self.observed.per_replica_state),
            self.observed.num_hidden,
            self.observed.reduced_at,
            any(eqn.primitive.name in _RANDOM for eqn in equations(variant.jaxpr)),
            _dtypes(variant.jaxpr),
            tuple(labels.taken()),
        )

    def _trace(self, step: Callable[..., Any], arguments: Any) -> tuple[Variant, list[Any]]:
        leaves, tree = jax.tree_util.tree_flatten(arguments, is_leaf=is_variable)
        is_array = list(map(key.is_array, leaves))
        arrays = [leaf for leaf, known in zip(leaves, is_array, strict=True) if known]

        def call(tracers: list[Any]) -> Any:
            self.observed.restart()
            self._has_run = False
            remaining = iter(tracers)
            given = [next(remaining) if known else leaf for leaf, known in zip(leaves, is_array, strict=True)]
            result = step(*jax.tree_util.tree_unflatten(tree, given))
            return result, self.observed.values, self.observed.weighed

        variant = trace_cross_replica(
            call,
            [array_leaf(a).aval() for a in arrays],
            self.parts.bindings.binding_of,
            on_strategy=self._note_run,
        )
        variant.check_no_leaks()
        return variant, arrays

    def _note_run(self, strategy: object) -> None:
        del strategy  # in its scope no other can run
        self._has_run = True


def _evaluate(
    variant: Variant, state: list[Any], args: list[Any], topology: Topology
) -> tuple[list[Any], list[Any]]:
    """Returns the leaves of the function's result on the host, and the new values of the written variables."""
    consts = topology.put_whole(variant.consts)
    program = jax.jit(lambda *inputs: jax_compat.eval_jaxpr(variant.jaxpr, inputs))
    jax.block_until_ready(state)
    arrays = jax.block_until_ready(program(*consts, *state, *on_mesh(args, topology)))
    remaining = iter(map(on_host, arrays[: variant.num_arrays]))
    results = [next(remaining) if output.is_array else output.value for output in variant.outputs]
    return results, arrays[variant.num_arrays :]


def _held(binding: Binding) -> Any:
    """Returns a copy of the variable's value as one device would hold it."""
    with state_lock:
        value = binding.value
        check_no_tracer(binding, value)
        if binding.sync_policy is SyncPolicy.COMPONENTS:
            value = _aggregate(binding.variable, on_host(value))[0]
        elif binding.sync_policy is SyncPolicy.PARTS and is_stored_as_parts(value, binding.shape):
            value = on_host(value).sum(axis=0, dtype=value.dtype)
        return jnp.copy(value)


def _as_one_device(binding: Binding, new: Any) -> np.ndarray | None:
    """Returns the new value of a variable as one device would have it; None if that is not defined."""
    value = on_host(new)
    if binding.sync_policy.is_sum:
        return value.sum(axis=0, dtype=value.dtype)
    if binding.sync_policy is SyncPolicy.COMPONENTS:
        aggregated, is_defined = _aggregate(binding.variable, value)
        return aggregated if is_defined else None
    return value


def _aggregate(variable: Variable, components: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns one value for components [R, ...], and True if the variable's aggregation defines it."""
    if variable.aggregation is VariableAggregation.SUM:
        return components.sum(axis=0, dtype=components.dtype), True
    if variable.aggregation is VariableAggregation.MEAN:
        return components.mean(axis=0, dtype=np.float64).astype(components.dtype), True
    is_defined = variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA or len(components) == 1
    return components[0], is_defined


def _dtypes(jaxpr: Any) -> frozenset[Any]:
    found = {getattr(var.aval, "dtype", None) for eqn in equations(jaxpr) for var in eqn.outvars}
    return frozenset(
        d
        for d in found
        if d is not None and not jax_compat.is_typed_key(d) and jnp.issubdtype(d, jnp.inexact)
    )
