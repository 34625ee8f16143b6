"""Lowers the steps of ``fit`` and its sister methods for ``Strategy.lower``. Keras's loop runs up to its first batch,
and the step is lowered, not run.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from replicax._src.keras import internals
from replicax._src.keras.losses import own_compute_loss_gathered
from replicax._src.keras.overriding import muted, overridden
from replicax._src.keras.phases import Phase
from replicax._src.keras.replica_steps import ReplicaStepFunction, is_replica_style, without_nones
from replicax._src.keras.step_functions import GlobalStepFunction, State, StepFunction
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.scope import context
from replicax._src.scope.any_strategy import AnyStrategy, StrategyView
from replicax._src.strategies.lower_method import (
    NamedArray,
    Placer,
    StepProgram,
    StepToLower,
    place_replica_function,
)
from replicax._src.vocabulary.errors import InvalidArgumentError, KerasScopeError

_asked: contextvars.ContextVar[StepToLower] = contextvars.ContextVar("replicax_step_to_lower")


class _StepPlaced(BaseException):
    """Raised to leave a loop when its first step has been lowered. A BaseException, so that a user's ``except
    Exception`` does not swallow it.
    """

    def __init__(self, program: StepProgram):
        self.program = program


@contextlib.contextmanager
def placed_and_left(step: StepFunction) -> Iterator[None]:
    """Makes Keras's loop lower the step for its first batch, and then stop.

    Keras gets descriptions in place of the values of the model's variables. No variable is read or assigned, and
    variables without values stay without.
    """
    described = _described(step)

    def get_state(purge_model_variables: bool = False, **groups: bool) -> tuple[list[Any], ...]:
        del purge_model_variables, groups
        return tuple(map(list, described))

    def place(state: State, iterator: Iterator[Any]) -> None:
        del state
        raise _StepPlaced(_placed(step, step.first_batch(iterator)))

    model, optimizer = step.model, getattr(step.model, "optimizer", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            overridden(model, **{internals.GET_STATE: get_state, step.phase.function_name: place})
        )
        stack.enter_context(muted(model, "reset_metrics"))
        if optimizer is not None:
            # At its end, ``fit`` gives the model the averages of an optimizer that keeps them (``use_ema``).
            stack.enter_context(muted(optimizer, "finalize_variable_values"))
        yield


def _described(step: StepFunction) -> list[list[jax.ShapeDtypeStruct]]:
    """Returns the variables of a step by group, as shapes without values."""
    return [[_description(step, v) for v in group] for group in step.phase.variables_of(step.model)]


def _description(step: StepFunction, variable: Any) -> jax.ShapeDtypeStruct:
    if variable.has_parts:
        binding = step.strategy.bindings.binding_of(variable)
        return binding.described(step.strategy.topology)
    sharding = step.strategy.bindings.layout_of(variable) or step.strategy.topology.replicated
    dtype = jax.dtypes.canonicalize_dtype(variable.dtype)
    return jax.ShapeDtypeStruct(tuple(variable.shape), dtype, sharding=sharding)


def _placed(step: StepFunction, here: DatasetBatch) -> StepProgram:
    asked = _asked.get()
    if asked.global_batch is None:
        rows = math.ceil(here.num_rows / asked.num_replicas_here)
    else:
        rows = math.ceil(asked.global_batch / step.strategy.topology.num_replicas)
    if isinstance(step, ReplicaStepFunction):
        return _of_each_replica(step, here, rows)
    assert isinstance(step, GlobalStepFunction)
    return _of_all_replicas(step, here, rows)


def _of_each_replica(step: ReplicaStepFunction, here: DatasetBatch, rows: int) -> StepProgram:
    """Lowers a step in TensorFlow's style, as ``strategy.run`` runs it."""
    leaves = [_with_rows(leaf, here.num_rows, rows) for leaf in here.leaves]
    leaves = [jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves]
    data = without_nones(here.tree.unflatten(leaves))
    with own_compute_loss_gathered(step.model):
        return place_replica_function(step.strategy.parts, StepToLower(step.replica_step, (data,), {}))


def _of_all_replicas(step: GlobalStepFunction, here: DatasetBatch, rows: int) -> StepProgram:
    """Lowers the model's own step in the global view."""
    num_rows = rows * step.strategy.topology.num_replicas
    leaves = [_with_rows(leaf, here.num_rows, num_rows) for leaf in here.leaves]
    batch = DatasetBatch(here.tree.unflatten(leaves))
    compiled, operands, values, written = step.described(_described(step), batch)
    variables = itertools.chain.from_iterable(step.phase.variables_of(step.model))
    arrays = [
        NamedArray("variable", variable.path, value, i in written)
        for i, (variable, value) in enumerate(zip(variables, values, strict=True))
    ]
    arrays += [NamedArray("argument", f"batch[{i}]", leaf) for i, leaf in enumerate(operands[-1])]
    return StepProgram(step.name, compiled, operands, arrays, rows, is_split=True)


def _with_rows(leaf: Any, have: int, wanted: int) -> np.ndarray:
    """Returns an array with another number of rows, without memory for its elements."""
    shape = tuple(leaf.shape)
    if shape and shape[0] == have:
        shape = (wanted, *shape[1:])
    return np.broadcast_to(np.zeros((), leaf.dtype), shape)


def placer(phases: dict[str, Phase]) -> Callable[[Any], Placer | None]:
    """Returns a function that finds how to lower ``model.fit`` and its sister methods."""

    def find(fn: Any) -> Placer | None:
        model, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
        is_loop = isinstance(model, keras.Model) and name in phases
        return functools.partial(_place, model, name, phases[name]) if is_loop else None

    return find


def _place(model: Any, method: str, phase: Phase, view: StrategyView, step: StepToLower) -> StepProgram:
    _check_scope(model, method, phase, view.strategy)
    token = _asked.set(step)
    args, kwargs = jax.tree_util.tree_map(_standing_for, (tuple(step.args), dict(step.kwargs)))
    try:
        step.fn(*args, **kwargs)
    except _StepPlaced as placed:
        return placed.program
    finally:
        _asked.reset(token)
    raise InvalidArgumentError(f"{method}() of model {model.name!r} has no batch to lower a step for.")


def _check_scope(model: Any, method: str, phase: Phase, strategy: AnyStrategy) -> None:
    """Raises for a model whose loop would be Keras's own, because that loop would run and not be lowered."""
    if context.owner_of(model) is None and not is_replica_style(model, phase):
        raise KerasScopeError(
            f"Cannot lower a step of {method}() of model {model.name!r}, which was made outside the scope of "
            f"{strategy!r}: Keras trains it on one device. Make it inside:\n"
            f"    with strategy.scope():\n"
            f"        model = ...\n"
            f"        model.compile(...)"
        )


def _standing_for(leaf: Any) -> Any:
    """Returns an array without memory for its elements in place of a description."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf
