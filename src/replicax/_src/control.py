"""Conditions, and promises about values, in traced functions: ``rx.cond``, ``rx.assert_same``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src import jax_compat
from replicax._src.framework import is_variable
from replicax._src.tracing.capture import TracedCapture, current_capture
from replicax._src.tracing.markers import assert_same_p

BranchFunction = Callable[..., Any]


def cond(pred: Any, true_fn: BranchFunction, false_fn: BranchFunction, *operands: Any) -> Any:
    """Calls one of two functions; only the one that is called assigns its variables.

    It is ``jax.lax.cond`` for code with variables: optimizer updates, metrics, ``rx.Variable.assign`` in a branch.
    Call it in ``run``, in ``rx.function``, or elsewhere. In a replica function the condition must be the same on all
    replicas if a branch assigns mirrored variables or communicates (optimizers do); this is checked.

    Args:
      pred: A scalar, true or false.
      true_fn, false_fn: Take ``operands``; return pytrees of arrays with the same structure.
      *operands: Arrays, or pytrees of them.

    Returns:
      The result of the function that was called; None if one of the two returns nothing.

    Raises:
      DivergentCollectiveError: A branch has a collective, and the condition varies between replicas.
      TypeError: The branches return different structures (from ``jax.lax.cond``).

    >>> import replicax as rx
    >>> count = rx.Variable(0)
    >>> @rx.function
    ... def count_positive(x):
    ...     rx.cond(x > 0, lambda: count.assign_add(1), lambda: count.read_value())
    >>> count_positive(2.0), count_positive(-2.0), int(count.value)
    (None, None, 1)
    """
    capture = current_capture()
    if not isinstance(pred, jax_compat.Tracer):
        return true_fn(*operands) if pred else false_fn(*operands)
    if not isinstance(capture, TracedCapture):
        return jax.lax.cond(pred, true_fn, false_fn, *operands)
    written: dict[int, tuple[Any, str]] = {}
    results = [_find_writes(capture, fn, operands, written) for fn in (true_fn, false_fn)]
    is_for_effect = any(not jax.tree_util.tree_leaves(result) for result in results)
    variables = [variable for variable, _ in written.values()]

    def threaded(fn: BranchFunction) -> BranchFunction:
        def branch_function(*values: Any) -> tuple[Any, list[Any]]:
            with capture.branch():
                result = _arrays(fn(*values))
                result = None if is_for_effect else result
                return result, [capture.read(v) for v in variables]

        return branch_function

    is_true = jnp.asarray(pred).astype(bool)
    result, values = jax.lax.cond(is_true, threaded(true_fn), threaded(false_fn), *operands)
    for (variable, line), value in zip(written.values(), values, strict=True):
        capture.write(variable, value, line)
    return result


def _find_writes(
    capture: TracedCapture, fn: BranchFunction, operands: tuple[Any, ...], written: dict[int, tuple[Any, str]]
) -> Any:
    """Traces a branch abstractly to find the variables that it assigns; returns the shapes of its result."""

    def probe(*values: Any) -> Any:
        with capture.branch() as branch:
            result = _arrays(fn(*values))
            for key, (variable, _, line) in branch.writes.items():
                written.setdefault(key, (variable, line))
            return result

    return jax.eval_shape(probe, *operands)


def _arrays(result: Any) -> Any:
    """The result of a branch, with variables replaced by their values."""
    return jax.tree_util.tree_map(
        lambda leaf: leaf.value if is_variable(leaf) else leaf,
        result,
        is_leaf=is_variable,
    )


def assert_same(value: Any) -> Any:
    """Declares that a value is the same on all replicas, where replicax cannot prove it. Costs nothing.

    Call it in replica context. If the value does vary, replicas diverge without an error, because the program relies
    on it. A loss that is declared the same may be reduced in the differentiated function and its gradients summed (see
    ``ReducedLossError``): the program then divides by the number of replicas itself.

    Args:
      value: An array, or a pytree of them.

    Returns:
      The same value.

    >>> import jax.numpy as jnp, replicax as rx
    >>> rx.assert_same(jnp.float32(2.0)).item()
    2.0
    """
    capture = current_capture()
    if not isinstance(capture, TracedCapture) or not capture.is_replica:
        return value
    return jax.tree_util.tree_map(lambda leaf: assert_same_p.bind(jnp.asarray(leaf)), value)
