"""Typed random keys as they travel: their data, which is numbers, in a node of a pytree that knows their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src import jax_compat


@final
class KeyData:
    """Stands for typed random keys in a nest whose leaves travel. Rebuilding the nest with arrays gives keys again.

    Attributes:
      data: ``[*shape of the keys, ...]``, uint32.
      impl: As ``jax.random.key_impl`` says.
    """

    def __init__(self, data: Any, impl: Any):
        self.data, self.impl = data, impl


def _rebuilt(impl: Any, children: tuple[Any]) -> Any:
    (data,) = children
    if isinstance(data, jax.Array | np.ndarray):
        return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    return KeyData(data, impl)  # a structure without its arrays


jax.tree_util.register_pytree_node(KeyData, lambda keys: ((keys.data,), keys.impl), _rebuilt)


def is_key(leaf: Any) -> bool:
    """True if a leaf is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and jax_compat.is_typed_key(leaf.dtype)


def as_data(leaf: Any) -> Any:
    """A leaf as it travels."""
    return KeyData(jax.random.key_data(leaf), jax.random.key_impl(leaf)) if is_key(leaf) else leaf


def taking_data(
    fn: Callable[..., Any], avals: Sequence[Any]
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """A function of arrays and keys as one of the keys' data, with the shapes and dtypes that it takes then."""
    given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    given = [jax.eval_shape(as_data, aval) if jax_compat.is_typed_key(aval.dtype) else aval for aval in given]
    leaves, tree = jax.tree_util.tree_flatten(given)
    return lambda *arrays: fn(*tree.unflatten(arrays)), leaves
