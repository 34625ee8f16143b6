"""``for_model``: a layout map for a Keras model, from the rules of ``variables/layer_layouts.py``.

Importing this module does not import Keras.
"""

from __future__ import annotations

import inspect
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import jax.numpy as jnp
import numpy as np

from replicax._src.keras.backend import check_keras
from replicax._src.variables.layer_layouts import (
    DENSE,
    LayerVariable,
    ModelLayer,
    choose_layouts,
    excess_of_device,
    layout_map_of,
)
from replicax._src.variables.layout_map import LayoutMap
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import whole_number

if TYPE_CHECKING:
    import keras

log = logging.getLogger("replicax")

_LARGEST_SHARE: Final = 1.06
"""Users are told if a device would hold more than this, relative to an even part of the variables."""

_LARGEST_EXCESS: Final = 2**20
"""Users are not told if the bytes beyond an even part are fewer."""

_MAX_SHOWN: Final = 5


def for_model(model: keras.Model | keras.Layer | Callable[[], Any], *, devices_per_replica: int) -> LayoutMap:
    """Returns a layout map for a Keras model, so that nobody has to write one.

    Rules decide it from the kinds of the layers and the shapes of their variables, as in Megatron-LM: attention is
    sharded by heads, the first dense layer of a pair by columns and the second by rows, an embedding by its vocabulary.
    They know the attention, dense, einsum and embedding layers of Keras and keras_hub. Layers that they do not know,
    and dims and heads that do not divide, stay replicated: ``layout_map.replicated`` tells which and why. A warning
    names them if a device would hold more than 1.06 times its even part of the variables, and 1 MiB more.

    Call it before the strategy is made, in any process; it does not communicate. Names that Keras numbers
    (``dense_1``) match with other numbers too, unless such layers have different layouts.

    Args:
      model: A function without arguments that returns the model, which is called once and allocates no memory. Or a
        built model; the model that you make in the scope of the strategy must be like it.
      devices_per_replica: The number of logical devices of each replica.

    Returns:
      The layout map, for the argument ``layout_map`` of a strategy.

    Raises:
      InvalidArgumentError: ``model`` is neither, or has no variables yet; ``devices_per_replica`` is not a positive
        integer.
      MissingExtraError: Keras is not installed.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.

    >>> import keras, replicax as rx
    >>> def make_model():
    ...     inputs = keras.Input((8,))
    ...     hidden = keras.layers.Dense(64, "relu", use_bias=False, name="up")(inputs)
    ...     return keras.Model(inputs, keras.layers.Dense(8, name="down")(hidden))
    >>> layout_map = rx.experimental.layouts.for_model(make_model, devices_per_replica=2)
    >>> layout_map
    LayoutMap({'up/kernel': (None, 'logical'), 'down/kernel': ('logical', None)})
    >>> layout_map.replicated
    {'down/bias': '32 B: it is added after the sum over the devices'}
    """
    check_keras("rx.experimental.layouts.for_model")
    import keras

    from replicax._src.keras import internals

    devices_per_replica = whole_number("devices_per_replica", devices_per_replica, least=1)
    if isinstance(model, keras.Layer):
        built = model
    else:
        if inspect.isclass(model) or not callable(model):
            raise InvalidArgumentError(
                f"for_model takes a Keras model, or a function without arguments that makes one; got {model!r}."
            )
        try:
            inspect.signature(model).bind()
        except TypeError as error:
            raise InvalidArgumentError(
                f"for_model calls the function that makes the model without arguments, and {model!r} takes some ({error}). Give "
                "them to it: for_model(lambda: make_model(...), ...)."
            ) from None
        with _deferred():
            built = model()
        if not isinstance(built, keras.Layer):
            raise InvalidArgumentError(
                f"The function {model!r} must return the Keras model that it makes; it returned {built!r}."
            )
    layers = list(_layers_of(built))
    if not layers:
        raise InvalidArgumentError(
            f"The model {built.name!r} has no variables yet, so their shapes are unknown. Build it first: give it a "
            "keras.Input, or call model.build(input_shape) in the function that makes it."
        )
    unbuilt = sorted(
        {
            layer.path or layer.name
            for layer in internals.layers_of(built, include_self=False)
            if not layer.built
        }
    )
    if unbuilt:
        log.warning(
            "Some layers of %r have no variables yet, so their variables will be replicated: %s. Call the whole model before "
            "for_model sees it, in the function that makes it.",
            built.name,
            ", ".join(unbuilt[:_MAX_SHOWN]) + (", …" if len(unbuilt) > _MAX_SHOWN else ""),
        )
    if devices_per_replica == 1:
        return LayoutMap()
    choices = choose_layouts(layers, devices_per_replica)
    layout_map = layout_map_of(choices, _automatic_names(built))
    share, excess = excess_of_device(choices, devices_per_replica)
    if share > _LARGEST_SHARE and excess > _LARGEST_EXCESS:
        shown = [f"\n  {pattern}: {why}" for pattern, why in layout_map.replicated.items()][:_MAX_SHOWN]
        log.warning(
            "With the layouts for %r a device holds %.2f times its even part of the variables, because some stay replicated "
            'over the %d devices of a replica:%s\nThe others are in layout_map.replicated. shard_state="all" shards them over '
            "replicas.",
            built.name,
            share,
            devices_per_replica,
            "".join(shown),
        )
    return layout_map


@contextmanager
def _deferred() -> Iterator[None]:
    """Builds models without values. Names of later layers and later random numbers are as if nothing had been built.

    Keras would give the variables their first values at the end of any later ``StatelessScope``.
    """
    import keras

    from replicax._src.keras import internals

    states = random.getstate(), np.random.get_state()
    try:
        with internals.building_undone(), keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _layers_of(model: keras.Layer) -> Iterator[ModelLayer]:
    """Yields the layers with variables of their own, in the order of ``model.variables``."""
    import keras

    from replicax._src.keras import internals

    layer_of = {
        id(variable): layer
        for layer in internals.layers_of(model)
        for variable in internals.own_variables(layer)
    }
    owned: dict[int, tuple[Any, dict[str, LayerVariable]]] = {}
    for variable in model.variables:
        layer = layer_of.get(id(variable))
        if layer is not None:  # else of a generator of seeds
            shape, itemsize = tuple(variable.shape), jnp.dtype(variable.dtype).itemsize
            _, variables = owned.setdefault(id(layer), (layer, {}))
            variables[variable.name] = LayerVariable(variable.path, shape, math.prod(shape) * itemsize)
    for layer, variables in owned.values():
        equation = DENSE if isinstance(layer, keras.layers.Dense) else None
        if isinstance(layer, keras.layers.EinsumDense):
            equation = layer.equation
        is_embedding = isinstance(layer, keras.layers.Embedding)
        yield ModelLayer(type(layer).__name__, variables, equation, is_embedding)


def _automatic_names(model: keras.Layer) -> set[str]:
    """Returns the names that Keras gives to layers of the classes in a model, without numbers."""
    from replicax._src.keras import internals

    return {internals.to_snake_case(type(layer).__name__) for layer in internals.layers_of(model)}
