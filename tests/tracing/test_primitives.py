"""The table of primitives: what it says of each is true, and the replication analysis acts on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing import markers, primitives
from replicax._src.tracing.equations import equations
from replicax._src.tracing.replication import Replication, analyse, is_call

X = jnp.asarray([[0.25, 0.5, 0.75], [0.3, 0.6, 0.9]])
Y = X + 1
INTS = jnp.asarray([[1, 2, 3], [5, 6, 7]], jnp.int32)


def on(array, *others):
    """The operands of a function of one array, or of two alike."""
    return (array, *others)


def marked(primitive, *args, **params):
    out = primitive.bind(*args, **params)
    return out[0] if primitive.multiple_results else out


def two_uses_summed(x):
    """``add_any`` alone: the sum of two cotangents of one value."""
    return jax.vjp(lambda x: (x, x), x)[1]((x, x))[0]


UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
    expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square stop_gradient tan tanh
""".split()  # noqa: SIM905
BINARY = """
    add atan2 div eq ge gt igamma igammac le lt max min mul ne nextafter pow rem sub
""".split()  # noqa: SIM905
BITWISE = "shift_left shift_right_arithmetic shift_right_logical".split()  # noqa: SIM905

ELEMENTWISE = {
    **{name: (getattr(lax, name), on(X)) for name in UNARY},
    **{name: (getattr(lax, name), on(X, Y)) for name in BINARY},
    **{name: (getattr(lax, name), on(INTS, INTS)) for name in BITWISE},
    "acosh": (lax.acosh, on(Y)),
    "add_any": (two_uses_summed, on(X)),
    "and": (lax.bitwise_and, on(INTS, INTS + 1)),
    "clamp": (lambda x: lax.clamp(0.3, x, 0.6), on(X)),
    "clz": (lax.clz, on(INTS)),
    "complex": (lax.complex, on(X, Y)),
    "conj": (lax.conj, on(lax.complex(X, Y))),
    "convert_element_type": (lambda x: lax.convert_element_type(x, jnp.float16), on(X)),
    "copy": (jnp.copy, on(X)),
    "igamma_grad_a": (lax.igamma_grad_a, on(X, Y)),
    "imag": (lax.imag, on(lax.complex(X, Y))),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), on(X)),
    "name": (lambda x: checkpoint_name(x, "kept"), on(X)),
    "not": (lax.bitwise_not, on(INTS)),
    "or": (lax.bitwise_or, on(INTS, INTS + 1)),
    "polygamma": (lax.polygamma, on(Y, X)),
    "population_count": (lax.population_count, on(INTS)),
    "real": (lax.real, on(lax.complex(X, Y))),
    "replicax_rows": (functools.partial(marked, markers.rows_p), on(X)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 3), on(X)),
    "regularized_incomplete_beta": (lax.betainc, on(X, Y, X)),
    "select_n": (lambda x, y: lax.select_n(x < 0.5, x, y), on(X, Y)),
    "xor": (lax.bitwise_xor, on(INTS, INTS + 1)),
    "zeta": (lambda x, y: lax.zeta(x, y), on(Y + 1, Y)),
}

# Operations that jax 0.10 lacks.
NEWER = {
    "log2": (lambda x: lax.log2(x), on(X)),
    "one_minus_square": (lambda x: lax.one_minus_square(x), on(X)),
    "polynomial": (lambda x, y: lax.polynomial(x, [y, 2.0, 3.0]), on(X, Y)),
}
ELEMENTWISE |= {name: case for name, case in NEWER.items() if hasattr(lax, f"{name}_p")}

# What comes out of each of them stands in an operand already, or is 0.
MOVES = {
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (0, 1)), on(X)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), on(X, Y)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 1), (1, 2)), on(X)),
    "dynamic_update_slice": (lambda x, y: lax.dynamic_update_slice(x, y[:, :1], (0, 1)), on(X, Y)),
    "gather": (lambda x: x[np.asarray([1, 0])], on(X)),
    "pad": (lambda x: lax.pad(x, 0.0, [(1, 0, 0), (0, 2, 1)]), on(X)),
    "reshape": (lambda x: lax.reshape(x, (3, 2)), on(X)),
    "rev": (lambda x: lax.rev(x, (0,)), on(X)),
    "scatter-add": (lambda x: jnp.zeros_like(x).at[np.asarray([1, 0])].add(x), on(X)),
    "slice": (lambda x: lax.slice(x, (0, 1), (2, 3)), on(X)),
    "split": (lambda x: lax.split(x, (1, 1), 0)[1], on(X)),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), on(X[:1])),
    "stack": (lambda x, y: lax.stack([x, y]), on(X, Y)),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), on(X)),
}
NEWER_MOVES = {"unstack": (lambda x: lax.unstack(x)[1], on(X))}
MOVES |= {name: case for name, case in NEWER_MOVES.items() if hasattr(lax, f"{name}_p")}

MESH = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("d",))
OTHERS = {
    "optimization_barrier": (lax.optimization_barrier, on(X)),
    "replicax_aggregate": (functools.partial(marked, markers.aggregate_p), on(X)),
    "replicax_logical": (
        functools.partial(marked, markers.logical_p, mesh=MESH, spec=jax.sharding.PartitionSpec()),
        on(X),
    ),
    "replicax_replicated": (
        functools.partial(marked, markers.replicated_p, mesh=MESH, spec=jax.sharding.PartitionSpec()),
        on(X),
    ),
}

COLLECTIVES = {
    "all_gather": lambda x: lax.all_gather(x, "replica"),
    "pmax": lambda x: lax.pmax(x, "replica"),
    "pmin": lambda x: lax.pmin(x, "replica"),
    "psum": lambda x: lax.psum(x, "replica"),
    "all_to_all": lambda x: lax.all_to_all(x, "replica", 0, 0),
    "ppermute": lambda x: lax.ppermute(x, "replica", [(0, 1), (1, 0)]),
    "reduce_scatter": lambda x: lax.psum_scatter(x, "replica"),
}
# Of a mesh whose axes JAX checks itself, or of devices that are not here.
NOT_MADE_HERE = {"all_gather_invariant", "psum_invariant", "ragged_all_to_all"}


@jax.custom_jvp
def with_own_jvp(x):
    return jnp.sin(x)


@jax.custom_vjp
def with_own_vjp(x):
    return jnp.sin(x)


with_own_jvp.defjvp(lambda primals, tangents: (jnp.sin(*primals), tangents[0]))
with_own_vjp.defvjp(lambda x: (jnp.sin(x), None), lambda _, cotangent: (cotangent,))
CALLS = {
    "jit": jax.jit(jnp.sin),
    "checkpoint": jax.checkpoint(jnp.sin),
    "custom_jvp_call": with_own_jvp,
    "custom_vjp_call": with_own_vjp,
}


def traced(fn, *args, axis_env=()):
    jaxpr, consts = jax_compat.trace(lambda *xs: [fn(*xs)], args, axis_env)
    return jaxpr, consts


def replication_of(fn, *args, given=Replication.REDUCED, axis_env=()):
    """The replication of a function's result, where all its arguments have another; and the primitives in it."""
    jaxpr, consts = traced(fn, *args, axis_env=axis_env)
    (found,), _ = analyse(jaxpr, [Replication.INVARIANT] * len(consts) + [given] * len(args))
    return found, {eqn.primitive.name for eqn in equations(jaxpr)}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *MOVES, *OTHERS])
def test_a_reduced_value_stays_reduced(name):
    fn, args = {**ELEMENTWISE, **MOVES, **OTHERS}[name]
    found, names = replication_of(fn, *args)
    assert name in names
    assert found is Replication.REDUCED


@pytest.mark.parametrize(
    "name", [*ELEMENTWISE, *MOVES, "optimization_barrier", "replicax_logical", "replicax_replicated"]
)
def test_a_value_that_differs_still_differs(name):
    fn, args = {**ELEMENTWISE, **MOVES, **OTHERS}[name]
    assert replication_of(fn, *args, given=Replication.VARYING)[0] is Replication.VARYING


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_each_element_is_computed_by_itself(name):
    fn, args = ELEMENTWISE[name]
    whole = fn(*args)
    assert whole.shape == args[0].shape
    for i, row in enumerate(zip(*args, strict=True)):
        # XLA computes the elements at the end of an array, which fill no vector register, in another way.
        np.testing.assert_allclose(whole[i], fn(*row), rtol=1e-6)


@pytest.mark.parametrize("name", MOVES)
def test_elements_are_only_moved(name):
    fn, args = MOVES[name]
    known = {0.0} | {float(value) for arg in args for value in np.ravel(arg)}
    assert {float(value) for value in np.ravel(fn(*args))} <= known


@pytest.mark.parametrize("name", sorted(primitives.KEEPS_SHIFTED))
def test_a_shifted_seed_stays_one(name):
    fn, args = {
        **ELEMENTWISE,
        **MOVES,
        "add": (lambda x: lax.add(x, jnp.ones_like(x)), on(X)),
    }[name]
    assert replication_of(fn, *args, given=Replication.SHIFTED)[0] is Replication.SHIFTED


def test_the_sum_of_two_shifted_seeds_is_none():
    assert replication_of(lax.add, X, X, given=Replication.SHIFTED)[0] is Replication.VARYING


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_all_replicas_the_same_or_not(name):
    fn, rows = COLLECTIVES[name], jnp.arange(8.0).reshape(2, 2, 2)
    found, names = replication_of(fn, rows[0], given=Replication.VARYING, axis_env=[("replica", 2)])
    assert name in names
    results = jax.vmap(fn, axis_name="replica")(rows)
    is_equal = bool((results[0] == results[1]).all())
    assert is_equal == (name in primitives.MAKES_EQUAL)
    assert found is (Replication.REDUCED if is_equal else Replication.VARYING)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_what_its_function_is(name):
    jaxpr, _ = traced(CALLS[name], X)
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "pjit"]
    assert eqn.primitive.name == name or {eqn.primitive.name, name} <= primitives.REMATERIALISES
    assert is_call(eqn)
    assert replication_of(CALLS[name], X)[0] is Replication.REDUCED
    assert replication_of(CALLS[name], X, given=Replication.VARYING)[0] is Replication.VARYING


BY_ITSELF = {
    "axis_index": lambda x: lax.axis_index("replica"),
    "io_callback": lambda x: io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32)),
    "replicax_gradient": lambda x: marked(
        markers.gradient_p,
        jnp.sum(x),
        x,
        tape=0,
        lengths=(1, 0, 1),
        derived=(False,),
        ordinal=0,
    ),
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_some_results_differ_whatever_they_are_computed_from(name):
    found, names = replication_of(BY_ITSELF[name], X, given=Replication.INVARIANT, axis_env=[("replica", 2)])
    assert name in names
    assert found is Replication.VARYING


def test_each_primitive_of_the_table_is_tested():
    assert set(NEWER) == jax_compat.NEWER_ELEMENTWISE
    assert set(NEWER_MOVES) == jax_compat.NEWER_MOVES
    newer = {*NEWER, *NEWER_MOVES} - {*ELEMENTWISE, *MOVES}
    assert primitives.ELEMENTWISE - newer == set(ELEMENTWISE)
    assert primitives.MOVES - newer == set(MOVES)
    assert primitives.KEEPS_REDUCED - newer == {*ELEMENTWISE, *MOVES, *OTHERS}
    assert {*COLLECTIVES, "replicax_aggregate"} == primitives.COLLECTIVES - NOT_MADE_HERE
    assert set(BY_ITSELF) == primitives.DIFFERS_BY_ITSELF
    assert primitives.CALLS - {"remat", "remat2", "closed_call", "custom_lin"} == set(CALLS)
