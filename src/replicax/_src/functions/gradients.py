"""``rx.value_and_grad``: the value of a function and its gradients, by arguments or by variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src.functions.function import Function
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.tape import GradientTape


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    *,
    variables: Any = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Makes a function that returns the result of ``fn`` and the gradients.

    It is ``jax.value_and_grad`` for code with variables. In ``run`` the gradients are the replica's own; an
    optimizer's ``apply`` sums them. Outside traced functions it compiles, as ``rx.function`` does.

    Args:
      fn: Returns a scalar loss, or with ``has_aux`` a pair (loss, anything).
      argnums: The positional arguments to differentiate by; 0 if neither this nor ``variables`` is given.
      variables: A pytree of variables to differentiate by, or a function that returns one (for models that their first
        call builds).
      has_aux: True if ``fn`` returns a pair.

    Returns:
      A function that returns (loss, gradients), or ((loss, aux), gradients). The gradients have the structure of the
      argument (a tuple of such for several), of ``variables``, or a pair of both if both are given.

    >>> import replicax as rx
    >>> loss, gradient = rx.value_and_grad(lambda x: x * x)(3.0)
    >>> float(loss), float(gradient)
    (9.0, 6.0)
    """
    by_args = argnums is not None or variables is None
    numbers = (0,) if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fn)
    def compute(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if by_args:
            for number in numbers:
                given[number] = jax.tree_util.tree_map(_as_array, given[number])
        with GradientTape(persistent=True) as tape:
            if by_args:
                tape.watch([given[number] for number in numbers])
            result = fn(*given, **kwargs)
        loss = result[0] if has_aux else result
        gradients = []
        if by_args:
            found = tape.gradient(loss, [given[n] for n in numbers], unconnected_gradients="zero")
            gradients.append(tuple(found) if isinstance(argnums, Sequence) else found[0])
        if variables is not None:
            gradients.append(tape.gradient(loss, variables() if callable(variables) else variables))
        return result, gradients[0] if len(gradients) == 1 else tuple(gradients)

    compiled = Function(compute)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (compiled if current_capture() is None else compute)(*args, **kwargs)

    return wrapper


def _as_array(leaf: Any) -> Any:
    # A Python number needs an explicit dtype: see GradientTape.watch.
    is_number = isinstance(leaf, (float, complex))
    return jnp.asarray(leaf, jnp.result_type(type(leaf)) if is_number else None)
