"""Which optimizers may update only some rows of a table; their result equals the full update, and the program is
checked."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._ps.keras.tables import why_not_for_tables
from table_updates import TableUpdate, find_mixing, is_lazy_equal_dense, row_program

K = keras.optimizers
ROWS, WIDTH = 5, 3


def of_keras(optimizer, rows=ROWS):
    """The update of a table, and the state: arguments and results of ``stateless_apply``."""
    table = keras.Variable(jnp.zeros((rows, WIDTH)), name="table")
    optimizer.build([table])
    values = [jnp.asarray(v.value) for v in optimizer.variables]

    def apply(table, gradient, *variables):
        (table,), variables = optimizer.stateless_apply(list(variables), [gradient], [table])
        return [table, *variables]

    return traced(apply, [jnp.asarray(table.value)] * 2, values, rows)


def of_optax(transformation, rows=ROWS):
    table = jnp.zeros((rows, WIDTH))
    leaves, tree = jax.tree_util.tree_flatten(transformation.init(table))

    def apply(table, gradient, *leaves):
        updates, state = transformation.update(gradient, jax.tree_util.tree_unflatten(tree, leaves), table)
        return [optax.apply_updates(table, updates), *jax.tree_util.tree_leaves(state)]

    return traced(apply, [table] * 2, [jnp.asarray(leaf) for leaf in leaves], rows)


def traced(apply, tables, values, rows):
    closed = jax.make_jaxpr(apply)(*tables, *values)
    has_rows = [True, True, *(v.shape[:1] == (rows,) for v in values)]
    written = [0, *range(2, 2 + len(values))]
    return TableUpdate(closed, has_rows, 0, 1, written), [tables[0], *values]


def is_equal(update, state):
    shared = [v for position, v in zip(update.state, state, strict=True) if not update.has_rows[position]]
    return is_lazy_equal_dense(update, shared)


SCHEDULE = K.schedules.ExponentialDecay(0.1, 10, 0.9)
EQUAL = {
    "sgd": lambda: K.SGD(0.1),
    "schedule": lambda: K.SGD(SCHEDULE),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.01),
    "adagrad": lambda: K.Adagrad(0.1),
    "adagrad_clipvalue": lambda: K.Adagrad(SCHEDULE, clipvalue=0.01),
    "optax_sgd": lambda: optax.sgd(0.1),
    "optax_adagrad": lambda: optax.adagrad(0.1),
}
LAZY = {
    "momentum": lambda: K.SGD(0.1, momentum=0.9),
    "nesterov": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "weight_decay": lambda: K.SGD(0.1, weight_decay=0.01),
    "adam": lambda: K.Adam(),
    "amsgrad": lambda: K.Adam(amsgrad=True),
    "adamw": lambda: K.AdamW(),
    "adadelta": lambda: K.Adadelta(),
    "rmsprop": lambda: K.RMSprop(centered=True, momentum=0.9),
    "ftrl": lambda: K.Ftrl(),
    "ftrl_l1": lambda: K.Ftrl(l1_regularization_strength=0.01, beta=0.1),
    "lion": lambda: K.Lion(),
    "nadam": lambda: K.Nadam(),
    "adamax": lambda: K.Adamax(),
    "schedule_free": lambda: K.ScheduleFreeAdamW(),
    "use_ema": lambda: K.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: K.SGD(0.1, gradient_accumulation_steps=2),
    "optax_momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "optax_adam": lambda: optax.adam(0.1),
    "optax_adamw": lambda: optax.adamw(0.1),
    "optax_adadelta": lambda: optax.adadelta(0.1),
    "optax_rmsprop": lambda: optax.rmsprop(0.1),
    "optax_lion": lambda: optax.lion(0.1),
    "optax_nadam": lambda: optax.nadam(0.1),
    "optax_adamax": lambda: optax.adamax(0.1),
    "optax_radam": lambda: optax.radam(0.1),
    "optax_yogi": lambda: optax.yogi(0.1),
    "optax_adabelief": lambda: optax.adabelief(0.1),
    "optax_adan": lambda: optax.adan(0.1),
    "optax_rprop": lambda: optax.rprop(0.1),
}
REFUSED = {
    "adafactor": (lambda: K.Adafactor(), {"reduce_sum"}),
    "lamb": (lambda: K.Lamb(), {"reduce_sum"}),
    "muon": (lambda: K.Muon(), {"reduce_sum", "dot_general", "transpose"}),
    "clipnorm": (lambda: K.SGD(0.1, clipnorm=1.0), {"reduce_sum"}),
    "global_clipnorm": (lambda: K.Adam(global_clipnorm=1.0), {"reduce_sum"}),
    "optax_lamb": (lambda: optax.lamb(0.1), {"reduce_sum"}),
    "optax_lars": (lambda: optax.lars(0.1), {"reduce_sum"}),
    "optax_fromage": (lambda: optax.fromage(0.1), {"reduce_sum"}),
    "optax_sm3": (lambda: optax.sm3(0.1), {"reduce_max"}),
    "optax_novograd": (lambda: optax.novograd(0.1), {"reduce_sum"}),
    "optax_clip": (lambda: optax.clip_by_global_norm(1.0), {"reduce_sum"}),
    "optax_block": (lambda: optax.clip_by_block_rms(1.0), {"reduce_sum"}),
    "optax_agc": (lambda: optax.adaptive_grad_clip(0.1), {"reduce_sum"}),
    "optax_finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), {"reduce_and", "reduce_or"}),
    "optax_noise": (lambda: optax.noisy_sgd(0.1, key=0), {"add"}),
}


def of(make, rows=ROWS):
    optimizer = make()
    return of_keras(optimizer, rows) if isinstance(optimizer, K.Optimizer) else of_optax(optimizer, rows)


@pytest.mark.parametrize("name", [*EQUAL, *LAZY])
def test_updates_row_by_row(name):
    update, state = of((EQUAL | LAZY)[name])
    assert find_mixing(update) is None
    assert is_equal(update, state) == (name in EQUAL)


@pytest.mark.parametrize("name", REFUSED)
def test_operation_that_mixes_rows_is_named(name):
    make, primitives = REFUSED[name]
    update, _ = of(make)
    mixing = find_mixing(update)
    assert mixing is not None
    assert mixing.primitive in primitives
    assert ".py:" in mixing.line
    assert f"{mixing.primitive} " in str(mixing)


SHARD = 8
QUICK = {"sgd", "adagrad", "adam", "ftrl", "nadam", "schedule_free", "optax_adan"}
MOVING = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
    for name in EQUAL | LAZY
    if name not in ("use_ema", "accumulation")
]
programs = {}


def dense_and_by_rows(name):
    """The update of all rows of a shard; the compiled program of some rows; a state."""
    if name not in programs:
        dense, _ = of((EQUAL | LAZY)[name], SHARD)
        some, _ = of((EQUAL | LAZY)[name])
        programs[name] = dense, jax.jit(dense.evaluate), jax.jit(row_program(some))
    return programs[name]


def moved_state(update, rng):
    """Random rows, and bindings above 0; counts in the middle of training."""
    state = []
    for position in update.state:
        aval = update.closed.jaxpr.invars[position].aval
        if jnp.issubdtype(aval.dtype, jnp.integer):
            state.append(jnp.full(aval.shape, 5, aval.dtype))
        else:
            state.append(jnp.asarray(rng.uniform(0.1, 1.0, aval.shape), aval.dtype))
    return state


PADDING = st.sampled_from([SHARD, SHARD + 1, 2**31 - 1, -1, -SHARD, -(2**31)])
IDS = st.tuples(st.permutations(range(SHARD)), st.integers(0, ROWS), st.lists(PADDING, min_size=ROWS))


@pytest.mark.parametrize("name", MOVING)
@settings(max_examples=5)
@given(drawn=IDS, seed=st.integers(0, 99))
def test_updating_some_rows_equals_updating_all(name, drawn, seed):
    order, count, padding = drawn
    ids = np.asarray([*order[:count], *padding][:ROWS], np.int32)
    there = ids[:count]
    rng = np.random.default_rng(seed)
    update, evaluate, run = dense_and_by_rows(name)
    state = moved_state(update, rng)
    gradient = rng.normal(size=(ROWS, WIDTH)).astype("float32")
    whole = np.zeros((SHARD, WIDTH), "float32")
    whole[there] = gradient[:count]
    operands = dict(zip(update.state, state, strict=True))
    given = operands | {update.gradient: whole}
    expected = evaluate([given[i] for i in range(len(given))])
    got = run(state, ids, gradient)
    for position, new, dense in zip(update.written, got, expected, strict=True):
        if not update.has_rows[position]:
            np.testing.assert_allclose(new, dense, rtol=1e-6)
            continue
        old = np.asarray(operands[position])
        np.testing.assert_allclose(np.asarray(new)[there], np.asarray(dense)[there], rtol=1e-5, atol=1e-6)
        others = np.setdiff1d(np.arange(SHARD), there)
        np.testing.assert_array_equal(np.asarray(new)[others], old[others])
        if name in EQUAL:
            np.testing.assert_allclose(new, dense, rtol=1e-5, atol=1e-6)


# --- operations ---------------------------------------------------------------------------------------


def mixing_of(apply, *shared):
    """The operation that mixes rows in a custom update of a table with shared values."""
    table = jnp.ones((ROWS, WIDTH))
    closed = jax.make_jaxpr(apply)(table, table, *shared)
    num_results = len(closed.jaxpr.outvars)
    written = [0, *range(2, 1 + num_results)]
    return find_mixing(TableUpdate(closed, [True, True, *[False] * len(shared)], 0, 1, written))


def step(table, gradient):
    return (table - gradient,)


KEPT = {
    "norm_of_rows": lambda t, g: step(t, g / jnp.linalg.norm(g, axis=1, keepdims=True)),
    "softmax": lambda t, g: step(t, jax.nn.softmax(g)),
    "per_column": lambda t, g: step(t, g * jnp.arange(WIDTH)),
    "checkpoint": lambda t, g: step(t, jax.checkpoint(jnp.sin)(g)),
    "reshape": lambda t, g: step(t, g.reshape(ROWS, 1, WIDTH).sum(1)),
    "number_of_column": lambda t, g: step(t, g * jax.lax.broadcasted_iota(g.dtype, g.shape, 1)),
    "columns_swapped": lambda t, g: step(t, g[:, ::-1]),
    "two_halves": lambda t, g: step(t, jnp.concatenate([g[:, :1], 2 * g[:, 1:]], axis=1)),
    "cond": lambda t, g: step(t, jax.lax.cond(jnp.arange(3).sum() > 2, lambda g: g, jnp.zeros_like, g)),
}
MIXED = {
    "mean": ("reduce_sum", lambda t, g: step(t, g - g.mean(axis=0))),
    "numbered": ("mul", lambda t, g: step(t, g * jnp.arange(ROWS)[:, None])),
    "number_of_row": ("mul", lambda t, g: step(t, g * jax.lax.broadcasted_iota(g.dtype, g.shape, 0))),
    "noise": ("add", lambda t, g: step(t, g + jax.random.normal(jax.random.key(0), g.shape))),
    "reversed": ("rev", lambda t, g: step(t, g[::-1])),
    "next": ("slice", lambda t, g: step(t, jnp.roll(g, 1, axis=0))),
    "sorted": ("sort", lambda t, g: step(t, jnp.sort(g, axis=0))),
    "running": ("cumsum", lambda t, g: step(t, jnp.cumsum(g, axis=0))),
    "flat": ("reshape", lambda t, g: step(t, jnp.square(g.reshape(-1)).reshape(g.shape))),
    "product": ("dot_general", lambda t, g: step(t, jnp.ones((ROWS, ROWS)) @ g)),
    "in_jit": ("reduce_max", lambda t, g: step(t, jax.jit(lambda x: x / x.max())(g))),
    "in_cond": (
        "reduce_max",
        lambda t, g: step(t, jax.lax.cond(jnp.arange(3).sum() > 2, lambda g: g, lambda g: g / g.max(), g)),
    ),
    "cond_on_rows": (
        "slice",
        lambda t, g: step(t, jax.lax.cond(g[0, 0] > 0, lambda g: g, jnp.zeros_like, g)),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_operations_that_keep_rows_apart(name):
    assert mixing_of(KEPT[name]) is None


@pytest.mark.parametrize("name", MIXED)
def test_operations_that_mix_rows(name):
    primitive, apply = MIXED[name]
    mixing = mixing_of(apply)
    assert mixing is not None
    assert mixing.primitive == primitive


def test_shared_values_may_not_depend_on_rows():
    found = mixing_of(lambda t, g, scale: (t - scale * g, g[0]), jnp.ones(WIDTH))
    assert found is not None
    assert found.primitive == "slice"
    table = jnp.ones((ROWS, WIDTH))
    closed = jax.make_jaxpr(lambda t, g, other: (t - g, other + g))(table, table, table)
    found = find_mixing(TableUpdate(closed, [True, True, False], 0, 1, [0, 2]))
    assert found is not None
    assert found.primitive == "add"


# --- settings of Keras --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda: K.SGD(0.1, use_ema=True), "use_ema=True"),
        (lambda: K.Adam(gradient_accumulation_steps=4), "gradient_accumulation_steps=4"),
        (lambda: K.LossScaleOptimizer(K.SGD(0.1, use_ema=True)), "use_ema=True"),
    ],
)
def test_settings_that_are_wrong_row_by_row(optimizer, said):
    assert said in why_not_for_tables(optimizer())


def test_settings_that_are_not():
    assert why_not_for_tables(K.SGD(0.1, momentum=0.9, clipvalue=1.0, weight_decay=0.1)) is None
    assert why_not_for_tables(K.LossScaleOptimizer(K.Adam())) is None
