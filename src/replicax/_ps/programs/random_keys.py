"""Typed random keys as they are sent: their uint32 data, in a node of a pytree that knows their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np


@final
class KeyData:
    """Replaces typed random keys in a pytree whose leaves are sent. Rebuilding the pytree with arrays restores the
    keys.

    Attributes:
      data: ``[*shape of the keys, ...]``, uint32.
      impl: The result of ``jax.random.key_impl``.
    """

    def __init__(self, data: Any, impl: Any):
        self.data, self.impl = data, impl


def _rebuilt(impl: Any, children: tuple[Any]) -> Any:
    (data,) = children
    if isinstance(data, jax.Array | np.ndarray):
        return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    return KeyData(data, impl)  # a structure without its arrays


jax.tree_util.register_pytree_node(KeyData, lambda keys: ((keys.data,), keys.impl), _rebuilt)


def _is_of_keys(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_key(leaf: Any) -> bool:
    """True if a leaf is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and _is_of_keys(leaf.dtype)


def as_data(leaf: Any) -> Any:
    """Returns a leaf in the form in which it is sent."""
    return KeyData(jax.random.key_data(leaf), jax.random.key_impl(leaf)) if is_key(leaf) else leaf


def taking_data(
    fn: Callable[..., Any], avals: Sequence[Any]
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Converts a function of arrays and keys into one of the keys' data. Also returns its new shapes and dtypes."""
    given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    given = [jax.eval_shape(as_data, aval) if _is_of_keys(aval.dtype) else aval for aval in given]
    leaves, tree = jax.tree_util.tree_flatten(given)
    return lambda *arrays: fn(*tree.unflatten(arrays)), leaves
