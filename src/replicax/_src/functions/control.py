"""Conditions, and promises about values, in traced functions: ``rx.cond``, ``rx.assert_same``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.capture import TracedCapture, current_capture
from replicax._src.tracing.markers import assert_same_p
from replicax._src.values.framework import AssignableState, frameworks_in_use, is_variable, use_imported

BranchFunction = Callable[..., Any]


def cond(pred: Any, true_fn: BranchFunction, false_fn: BranchFunction, *operands: Any) -> Any:
    """Calls one of two functions. The other function assigns no variable.

    It is ``jax.lax.cond`` for code with variables: optimizer updates, metrics, ``rx.Variable.assign`` in a branch.
    Call it in ``run``, in ``rx.function``, in a layer that ``fit`` trains, or elsewhere. In a replica function the
    condition must be the same on all replicas if a branch assigns mirrored variables or communicates (optimizers do);
    this is checked.

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
    if not isinstance(pred, jax_compat.Tracer):
        return true_fn(*operands) if pred else false_fn(*operands)
    states = _assignable_states()
    written: list[dict[int, tuple[Any, str]]] = [{} for _ in states]
    results = [_find_writes(states, fn, operands, written) for fn in (true_fn, false_fn)]
    is_for_effect = any(not jax.tree_util.tree_leaves(result) for result in results)

    def threaded(fn: BranchFunction) -> BranchFunction:
        def branch_function(*values: Any) -> tuple[Any, list[list[Any]]]:
            with contextlib.ExitStack() as stack:
                for state in states:
                    stack.enter_context(state.branch())
                result = _arrays(fn(*values))
                result = None if is_for_effect else result
                return result, [
                    [state.read(variable) for variable, _ in assigned.values()]
                    for state, assigned in zip(states, written, strict=True)
                ]

        return branch_function

    is_true = jnp.asarray(pred).astype(bool)
    result, values = jax.lax.cond(is_true, threaded(true_fn), threaded(false_fn), *operands)
    for state, assigned, new in zip(states, written, values, strict=True):
        for (variable, line), value in zip(assigned.values(), new, strict=True):
            state.write(variable, value, line)
    return result


def _assignable_states() -> list[AssignableState]:
    """Returns the state that branches may assign: that of frameworks, and that of the current trace."""
    use_imported()
    capture = current_capture()
    states: list[AssignableState | None] = [framework.assignable() for framework in frameworks_in_use()]
    if isinstance(capture, TracedCapture):
        states.append(capture)
    return [state for state in states if state is not None]


def _find_writes(
    states: Sequence[AssignableState],
    fn: BranchFunction,
    operands: tuple[Any, ...],
    written: Sequence[dict[int, tuple[Any, str]]],
) -> Any:
    """Traces a branch abstractly to find the variables that it assigns; returns the shapes of its result."""

    def probe(*values: Any) -> Any:
        with contextlib.ExitStack() as stack:
            branches = [stack.enter_context(state.branch()) for state in states]
            result = _arrays(fn(*values))
            for branch, assigned in zip(branches, written, strict=True):
                for key, (variable, _, line) in branch.writes.items():
                    assigned.setdefault(key, (variable, line))
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
