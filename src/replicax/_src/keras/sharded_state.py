"""Keras variables that are sharded over replicas: how they are made, read in a step, and updated by optimizers.

A step of ``fit`` is one program over the global batch, which the partitioner splits (``lowering/global_view.py``). The
partitioner alone could split layers as well as batches. So a step first gathers the variables that it reads. The
gradients, and the variables that an optimizer updates, are cut into the shards of the optimizer's state. Then each
update works on shards, whatever the optimizer computes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import keras
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.keras import internals
from replicax._src.keras.overriding import overridden
from replicax._src.scope import context
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.optimizer_slots import note_optimizer_slot
from replicax._src.variables.layouts import VariableLayouts, note_of_optimizer, sharded

_Init = Callable[..., None]
_Apply = Callable[[Any, Any, Any], tuple[Any, Any]]
_Step = Callable[[Any, Any], tuple[Any, Any]]


# --- how variables are made ----------------------------------------------------------------------------


class _Making(threading.local):
    """The purpose of the variables that this thread makes.

    Attributes:
      is_alone: True if the other processes do not make them.
      is_for_optimizer: True if an optimizer keeps them.
      reference: The variable of the model that they belong to; None without one.
      has_parts: True if each replica keeps its own part of them.
    """

    has_parts = False
    is_alone = False
    is_for_optimizer = False
    reference: Any = None


making = _Making()


def made_alone(is_alone: bool) -> contextlib.AbstractContextManager[None]:
    """Marks, if ``is_alone``, that the other processes do not make the variables that this thread makes."""
    return overridden(making, is_alone=making.is_alone or is_alone)


def mark_optimizer_variables(
    reference: Any = None, *, has_parts: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Marks new variables as those of an optimizer. With a ``reference`` they belong to that variable of the model."""
    reference = making.reference if reference is None else reference
    has_parts = has_parts or making.has_parts
    return overridden(making, is_for_optimizer=True, reference=reference, has_parts=has_parts)


def note_purpose(variable: Any) -> None:
    """Records that an optimizer keeps a new variable, and which variable of the model it belongs to."""
    variable.has_parts = making.has_parts
    if making.is_for_optimizer:
        note_of_optimizer(variable)
        if isinstance(making.reference, keras.Variable):
            note_optimizer_slot(variable, making.reference)


def make(original: _Init, variable: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Initialises a variable, as shards where the current strategy shards it."""
    has_strategy = context.has_strategy() and not making.is_alone
    strategy = context.strategy_for_new_variable() if has_strategy else None
    initializer = args[0] if args else kwargs.get("initializer")
    if making.is_for_optimizer and strategy is not None and strategy.variable_placement.layouts is not None:
        # Keras gives a slot the layout in which its variable is stored.
        kwargs = {key: value for key, value in kwargs.items() if key != "layout"}
    with laid_out(strategy, initializer) as agreed:
        if args:
            original(variable, agreed, *args[1:], **kwargs)
        else:
            original(variable, **{**kwargs, "initializer": agreed})
    stay_as_assigned(strategy, variable)


def stay_as_assigned(strategy: Strategy | None, variable: Any) -> None:
    """Lets a variable of several processes keep the value that each process assigns, until the next program compares
    and shards it.
    """
    layouts = None if strategy is None else strategy.variable_placement.layouts
    if layouts is not None and layouts.topology.peers is not None:
        internals.forget_layout(variable)


@contextlib.contextmanager
def laid_out(strategy: Strategy | None, initializer: Any) -> Iterator[Any]:
    """Makes Keras create first values in the layouts of a strategy. Keras's own loops do not see these layouts.

    Yields:
      The initializer. In several processes it is that of the first process, so that all make shards of the same value.
      For a value, or a function that cannot be sent, each makes it in full, and all take shards of the first process's.
    """
    layouts = None if strategy is None else strategy.variable_placement.layouts
    if strategy is None or layouts is None or not layouts.has_rule or layouts.topology.is_ahead:
        yield initializer
        return
    if layouts.topology.peers is not None:
        initializer, is_agreed = _agreed(layouts.topology.peers, initializer)
        if not is_agreed:
            yield initializer
            return
    keras_layouts = _Layouts(strategy)
    with keras_layouts.scope():
        is_shared = layouts.topology.peers is not None
        yield functools.partial(_in_layout, keras_layouts, initializer) if is_shared else initializer


def _in_layout(layouts: _Layouts, initializer: Any, shape: Any, dtype: Any = None) -> Any:
    """Returns a first value in the layout of its variable. Keras would call ``jax.device_put``, which compares the
    values of all processes by a collective; see ``jax_compat.put``.
    """
    value = initializer(shape, dtype=dtype)
    if layouts.newest is None or isinstance(value, jax_compat.Tracer):
        return value
    return jax_compat.put(value, layouts.newest)


def _agreed(peers: Any, initializer: Any) -> tuple[Any, bool]:
    initializer = keras.initializers.get(initializer) if isinstance(initializer, str) else initializer
    seed = getattr(initializer, "seed", None)
    here = None
    if isinstance(initializer, keras.Initializer) and (seed is None or isinstance(seed, int)):
        with contextlib.suppress(TypeError):  # the configuration lacks a seed that Keras chose
            here = json.loads(json.dumps([keras.saving.serialize_keras_object(initializer), seed]))
    of_all = peers.gather("making divided variables", here, "to make a divided variable")
    if any(theirs is None for theirs in of_all):
        return initializer, False
    if all(theirs == here for theirs in of_all):
        return initializer, True
    configuration, seed = of_all[0]
    agreed = keras.saving.deserialize_keras_object(configuration)
    if seed is not None:
        agreed.seed = seed
    return agreed, True


@final
class _Layouts(keras.distribution.DataParallel):
    """The object that Keras asks for the layout of a new variable.

    Attributes:
      newest: The layout of the variable that it was last asked for.
    """

    def __init__(self, strategy: Strategy):
        devices = np.array(strategy.topology.devices)
        mesh = keras.distribution.DeviceMesh(devices.shape, ["replica"], devices)
        super().__init__(device_mesh=mesh, auto_shard_dataset=False)
        self._bindings = strategy.bindings
        self.newest: Any = None

    def get_variable_layout(self, variable: Any) -> Any:
        self.newest = self._bindings.layout_of(variable)
        return self.newest


# --- how steps read and update them -----------------------------------------------------------------------


@final
class ShardedRead:
    """The gathered trainable variables of a step, with their shards for the optimizer.

    Args:
      layouts: The layouts of the strategy.
      variables: The variables, in the order of ``shards`` and of an optimizer's gradients.
      shards: The values that the step gets.
    """

    def __init__(self, layouts: VariableLayouts, variables: Sequence[Any], shards: Sequence[Any]):
        self._layouts = layouts
        self._of_updates = list(map(layouts.update_layout, variables))
        self.values = [layouts.read(*pair) for pair in zip(shards, map(layouts.of, variables), strict=True)]
        """The full values, or values marked for a gather where they are needed."""
        self._shards = {id(value): shard for value, shard in zip(self.values, shards, strict=True)}

    def shard_of(self, value: Any) -> Any:
        """Returns the shard of one of ``values``. Returns any other value unchanged."""
        return self._shards.get(id(value), value)

    def for_update(self, gradients: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the gradients and the values of all variables, cut into the shards of the optimizer's state."""
        layouts = self._of_updates
        summed = [self._layouts.summed(*pair) for pair in zip(gradients, layouts, strict=True)]
        return summed, [sharded(self.shard_of(v), layout) for v, layout in zip(values, layouts, strict=True)]


_read: contextvars.ContextVar[ShardedRead | None] = contextvars.ContextVar(
    "replicax_sharded_read", default=None
)


@contextlib.contextmanager
def _reading(read: ShardedRead | None) -> Iterator[None]:
    token = _read.set(read)
    try:
        yield
    finally:
        _read.reset(token)


def with_sharded_state(
    step: _Step, read: ShardedRead, state: Sequence[Any], data: Any, optimizer: Any
) -> Any:
    """Calls a model's step with sharded state.

    Args:
      step: (state, batch) -> (outputs, new state).
      read: The gathered trainable variables.
      state: The lists of variables; the first one has the trainable variables.
      optimizer: The model's optimizer.
    """
    with _reading(read), _sharded(optimizer):
        outputs, new = step((read.values, *state[1:]), data)
    return outputs, (list(map(read.shard_of, new[0])), *new[1:])


def apply_to_shards(own: _Apply, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
    """Runs ``Optimizer.stateless_apply``, given as ``own``, on shards, in a step with sharded state."""
    read = _read.get()
    if read is None:
        return own(optimizer_variables, grads, trainable_variables)
    grads, shards = read.for_update(grads, trainable_variables)
    with _reading(None):  # an inner optimizer gets them unchanged
        return own(optimizer_variables, grads, shards)


@contextlib.contextmanager
def _sharded(optimizer: Any) -> Iterator[None]:
    """Makes a ``LossScaleOptimizer``, which has its own ``stateless_apply``, work on shards too. It returns its inputs
    if gradients are not finite.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield
        return
    own: Any = optimizer.stateless_apply
    with overridden(optimizer, stateless_apply=functools.partial(apply_to_shards, own)):
        yield
