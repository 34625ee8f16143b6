"""The properties of JAX's primitives that the passes use, by name (jax 0.10 to 0.12)."""

# ruff: noqa: SIM905 - lists of strings would have a line for each

from __future__ import annotations

from typing import Final

from replicax._src.jax_internals import jax_compat

ELEMENTWISE: Final = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt
    max min mul name ne neg nextafter not or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem replicax_rows round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square stop_gradient sub tan tanh xor zeta
    """.split()
).union(jax_compat.NEWER_ELEMENTWISE)
MOVES: Final = frozenset(
    """
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather pad reshape rev scatter-add slice split stack
    squeeze transpose
    """.split()
).union(jax_compat.NEWER_MOVES)
"""Primitives that move elements."""
UNPACKS: Final = frozenset("convert_element_type dynamic_slice reshape slice split squeeze unstack".split())
"""Primitives that take arrays out of a packed buffer."""
REDUCTIONS: Final = frozenset("argmax argmin reduce_max reduce_min reduce_prod reduce_sum".split())

# --- calls of functions -------------------------------------------------------------------------------------

JITS: Final = frozenset("jit closed_call".split())
REMATERIALISES: Final = frozenset("checkpoint remat remat2".split())
"""Primitives of rematerialised computations."""
CALLS: Final = JITS | REMATERIALISES | frozenset("custom_jvp_call custom_vjp_call custom_lin".split())
"""Calls whose operands and results are those of the function, one to one."""
CALLBACKS: Final = frozenset("ffi_call_callback io_callback pure_callback python_callback".split())
PRINTS: Final = frozenset("debug_callback debug_print".split())

# --- collectives --------------------------------------------------------------------------------------------

SUMS: Final = frozenset("psum psum_invariant".split())
MAKES_EQUAL: Final = SUMS | frozenset("all_gather all_gather_invariant pmax pmin".split())
"""Collectives that give all replicas the same value."""
COLLECTIVES: Final = MAKES_EQUAL | frozenset(
    "all_to_all ppermute ragged_all_to_all reduce_scatter replicax_aggregate".split()
)

# --- for the replication analysis --------------------------------------------------------------------

KEEPS_REDUCED: Final = (
    ELEMENTWISE
    | MOVES
    | frozenset("optimization_barrier replicax_aggregate replicax_logical replicax_replicated".split())
)
"""Primitives whose result is reduced if their operand is."""
KEEPS_SHIFTED: Final = frozenset("add convert_element_type copy reshape slice squeeze".split())
"""Primitives that leave a replica's seed in a form that can be shifted back."""
DIFFERS_BY_ITSELF: Final = frozenset("axis_index io_callback replicax_gradient".split())

# --- marks (``markers.py``) ---------------------------------------------------------------------------------

RECORDING_MARKS: Final = frozenset("replicax_tape replicax_watch".split())
MARKS: Final = RECORDING_MARKS | frozenset("replicax_accumulate replicax_aggregate replicax_gradient".split())
ELEMENTWISE_MARKS: Final = frozenset("replicax_read replicax_seed_shift replicax_seed_unshift".split())
"""Marks whose result has the elements of their operand."""
