"""``rx.Precision``: the dtypes of a functional loop in mixed precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._src.values.dtypes import as_dtype
from replicax._src.values.framework import is_variable
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError

_ALLOWED = ("bfloat16", "float32", "float64")


@final
@dataclass(frozen=True)
class Precision:
    """The dtypes of a training loop: ``Precision("bfloat16")`` computes in bfloat16 and keeps all else in float32.

    Call it with a function to get one that computes in the ``compute`` dtype: the floating arrays among the arguments
    are cast to it, and those among the results to ``output``. The casts are differentiated, so gradients by the
    original arguments have the dtype of the arguments, and sums of gradients over replicas are in that dtype, too.
    Integers, booleans, complex numbers, random keys and all other objects stay as they are. Arrays that the function
    closes over are not cast; call ``cast_to_compute`` on them. It may be used in any context, and does not communicate.

    Args:
      compute: The dtype of the computation: "bfloat16", "float32" or "float64", or a dtype.
      params: The dtype of parameters, for ``cast_to_params``.
      output: The dtype of results.

    Raises:
      InvalidArgumentError: A dtype is none of these.
      UnsupportedError: ``compute`` is "float16", whose gradients need a scaled loss.

    Source: the policies of jmp and of Keras (``mixed_bfloat16``).

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> precision = rx.Precision("bfloat16")
    >>> loss = precision(lambda w, x: jnp.sum(x @ w))
    >>> value, gradient = jax.value_and_grad(loss)(jnp.ones(3), jnp.ones((2, 3)))
    >>> print(value.dtype, gradient.dtype)
    float32 float32
    """

    compute: Any
    params: Any = "float32"
    output: Any = "float32"

    def __post_init__(self) -> None:
        for name in ("compute", "params", "output"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``fn`` with its floating arguments cast to ``compute``, and its floating results to ``output``."""

        @functools.wraps(fn)
        def computed(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.cast_to_compute((args, kwargs))
            return self.cast_to_output(fn(*args, **kwargs))

        return computed

    def cast_to_compute(self, tree: Any) -> Any:
        """Returns a pytree whose floating arrays have the ``compute`` dtype. Variables become their values."""
        return _cast(tree, self.compute)

    def cast_to_params(self, tree: Any) -> Any:
        """Returns a pytree whose floating arrays have the ``params`` dtype. Variables become their values."""
        return _cast(tree, self.params)

    def cast_to_output(self, tree: Any) -> Any:
        """Returns a pytree whose floating arrays have the ``output`` dtype. Variables become their values."""
        return _cast(tree, self.output)


def _checked(name: str, dtype: Any) -> Any:
    try:
        found = None if dtype is None else jnp.dtype(as_dtype(dtype))
    except TypeError:
        found = None
    if found == jnp.float16 and name == "compute":
        raise UnsupportedError(
            "Precision does not scale losses, and with compute='float16' small gradients become 0. Use "
            "rx.Precision('bfloat16'), which needs no scaling; or train a Keras model with "
            "keras.optimizers.LossScaleOptimizer and the policy 'mixed_float16'."
        )
    if found is None or found.name not in _ALLOWED:
        raise InvalidArgumentError(f"{name} of Precision is {dtype!r}; use one of {', '.join(_ALLOWED)}.")
    return found


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(leaf: Any) -> Any:
        value = leaf.value if is_variable(leaf) else leaf
        kind = getattr(value, "dtype", None)
        is_floating = kind is not None and jnp.issubdtype(kind, jnp.floating)
        return jnp.asarray(value).astype(dtype) if is_floating else value

    return jax.tree_util.tree_map(cast, tree, is_leaf=is_variable)
