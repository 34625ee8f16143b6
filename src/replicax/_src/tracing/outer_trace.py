"""Errors of calls that start a program inside a function that JAX traces on its own."""

from __future__ import annotations

from typing import Final

from replicax._src.jax_internals import jax_compat
from replicax._src.user.user_code import user_line
from replicax._src.vocabulary.errors import TraceError

_AROUND: Final = {
    "jax.jit": "which cannot hold the strategy's devices and variables. It compiles its programs itself: leave jax.jit "
    "out. For one program of several calls, call it inside rx.function instead of jax.jit; for a loop of steps use "
    "strategy.run_steps.",
    "jax.grad": "which cannot differentiate through it. Differentiate in the function that strategy.run runs: "
    "jax.value_and_grad(loss)(w) and rx.get_replica_context().all_reduce('SUM', gradients), or rx.GradientTape and an "
    "optimizer.",
    "jax.vmap": "which cannot batch it. Call jax.vmap in the function that strategy.run runs.",
}


def called_in_trace(call: str) -> TraceError:
    """Returns the error for a call that starts a program, in a function that JAX traces on its own.

    Args:
      call: The name of the call, such as ``strategy.run``.
    """
    around = jax_compat.transformation()
    shown = "jax.grad, jax.value_and_grad or jax.vjp" if around == "jax.grad" else around
    shown = "jax.jit (or jax.checkpoint, jax.lax.scan, ...)" if around == "jax.jit" else shown
    return TraceError(f"{call} was called at {user_line()} inside {shown}, {_AROUND[around]}")


def tracer_as_argument(call: str) -> TraceError:
    """Returns the error for a tracer among the arguments of such a call, outside of the traces of replicax."""
    if not jax_compat.is_evaluating():
        return called_in_trace(call)
    return TraceError(
        f"{call} got a tracer as an argument outside its trace: the value was computed in a function that JAX traced "
        "(jax.jit, jax.grad, or an earlier run) and kept. Return it from that function."
    )
