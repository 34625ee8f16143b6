"""Programs that take rows in place of tables: values and gradients equal those with full tables, or the reason why
not."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._ps.programs.lookups import find_lookups
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.capture import TracedCapture

read_p = jax_compat.identity_primitive("replicax_read")
from replicax._src.tracing.mark_resolution import MarkResolver
from replicax._src.tracing.replication import Replication

V, D = 11, 4
HERE = "test_lookups.py"


def rng():
    return np.random.default_rng(0)


TABLE = jnp.asarray(rng().normal(size=(V, D)), jnp.float32)
OTHER = jnp.asarray(rng().normal(size=(V, D)), jnp.float32)
W = jnp.asarray(rng().normal(size=(D, D)), jnp.float32)
IDS = jnp.asarray(rng().integers(0, V, (3, 5)), jnp.int32)
IDS_1 = jnp.asarray(rng().integers(0, V, 7), jnp.int32)


def marked(fn, avals):
    """``fn`` traced for a program, with unresolved marks."""
    capture = TracedCapture(lambda variable: None, 1)
    tree = None

    def body(*values):
        nonlocal tree
        with capture.tracing():
            leaves, tree = jax.tree_util.tree_flatten(fn(*values))
            return leaves

    jaxpr, consts = jax_compat.trace(body, avals)
    return jaxpr, consts


def evaluate(jaxpr, args):
    """The results, with marks resolved."""

    def run(*args):
        return MarkResolver(list).evaluate(jaxpr, args, [Replication.INVARIANT] * len(args))

    return list(jax.jit(run)(*args))


def trained(loss, num_tables=1):
    """A step: the loss and its gradients with respect to the tables, which come first, as a tape gives them."""

    def step(*args):
        args = [read_p.bind(a, number=i) if i < num_tables else a for i, a in enumerate(args)]
        with rx.GradientTape() as tape:
            for table in args[:num_tables]:
                tape.watch(table)
            value = loss(*args)
        return value, tape.gradient(value, args[:num_tables], unconnected_gradients="zero")

    return step


def looked_up(lookup, found, consts, args):
    """The operands that a worker passes for a lookup: the unique rows, padded with values that must not matter, and
    positions."""
    values = {"constant": found.consts, "input": [*consts, *args]}
    (ids,) = jax_compat.eval_jaxpr(lookup.jaxpr, [values[each.kind][each.index] for each in lookup.inputs])
    table = np.asarray([*consts, *args][lookup.table])
    assert ids.shape == (lookup.num_ids,)
    assert ids.dtype == jnp.int32
    unique, inverse = np.unique(ids, return_inverse=True)
    assert unique.min(initial=0) >= 0
    unique = unique[unique < len(table)]
    rows = np.full((lookup.num_ids, *table.shape[1:]), 77).astype(table.dtype)
    rows[: len(unique)] = table[unique]
    positions = np.where(inverse < len(unique), inverse, lookup.num_ids).astype(np.int32)
    return unique, rows, positions


def run_by_rows(fn, tables, args):
    """The results of the rewritten program, with scattered gradients of tables; and the lookups found."""
    jaxpr, consts = marked(fn, [jax_compat.abstractify(a) for a in args])
    found = find_lookups(jaxpr, [len(consts) + table for table in tables])
    pulled = [looked_up(lookup, found, consts, args) for lookup in found.lookups]
    values = {
        "constant": found.consts,
        "input": [*consts, *args],
        "rows": [rows for _, rows, _ in pulled],
        "positions": [positions for *_, positions in pulled],
    }
    results = evaluate(found.jaxpr, [jnp.asarray(values[each.kind][each.index]) for each in found.inputs])
    for number, lookup in found.gradients.items():
        unique, rows, _ = pulled[lookup]
        assert results[number].shape == rows.shape
        np.testing.assert_array_equal(results[number][len(unique) :], 0)  # of padding
        shape = jaxpr.outvars[number].aval.shape
        results[number] = jnp.zeros(shape, rows.dtype).at[unique].add(results[number][: len(unique)])
    return results, found


def check(fn, *args, tables=(0,), num_ids=None, gradients=None):
    """The results by rows equal those of the full tables, none of which is an operand of the program."""
    jaxpr, consts = marked(fn, [jax_compat.abstractify(a) for a in args])
    expected = evaluate(jaxpr, [*consts, *args])
    got, found = run_by_rows(fn, tables, args)
    assert not found.whole
    assert len(found.lookups) == len(tables)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    if num_ids is not None:
        assert [lookup.num_ids for lookup in found.lookups] == list(num_ids)
    if gradients is not None:
        assert len(found.gradients) == gradients
    return found


def refused(fn, *args, tables=(0,)):
    """The reason why the full table is needed; the program is unchanged."""
    jaxpr, consts = marked(fn, [jax_compat.abstractify(a) for a in args])
    expected = evaluate(jaxpr, [*consts, *args])
    got, found = run_by_rows(fn, tables, args)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert not found.lookups
    (why,) = found.whole
    assert why.table == len(consts) + tables[0]
    assert str(why)
    return why


# --- layers of Keras ----------------------------------------------------------------------------------


def embedding(mask_zero=False, dtype=None):
    layer = keras.layers.Embedding(V, D, mask_zero=mask_zero, dtype=dtype)
    layer.build((None, None))
    return layer


def called(layer, table, ids):
    return layer.stateless_call([table], [], ids)[0]


def test_embedding():
    layer = embedding()
    found = check(
        trained(lambda t, w, ids: jnp.mean((called(layer, t, ids) @ w) ** 2)), TABLE, W, IDS, num_ids=[15]
    )
    assert found.gradients == {1: 0}
    assert [each.kind for each in found.lookups[0].inputs] == ["input"]  # the ids, and no variable


@pytest.mark.rest
def test_mask_zero_and_lstm():
    layer, lstm = embedding(mask_zero=True), keras.layers.LSTM(3)
    lstm.build((None, None, D))
    weights = [v.value for v in lstm.trainable_variables]
    states = [v.value for v in lstm.non_trainable_variables]

    def loss(table, ids):
        mask = keras.ops.not_equal(ids, 0)
        return jnp.sum(lstm.stateless_call(weights, states, called(layer, table, ids), mask=mask)[0] ** 2)

    check(trained(loss), TABLE, IDS * (IDS > 3), gradients=1)


@pytest.mark.rest
def test_masked_bag_of_hashed_ids():
    layer = embedding()

    def loss(table, raw):
        ids = (raw * jnp.uint32(2654435761) + 17) % V
        mask = (raw > 2)[..., None]
        bag = jnp.sum(called(layer, table, ids) * mask, 1) / jnp.maximum(1, jnp.sum(mask, 1))
        return jnp.sum(bag**3)

    check(trained(loss), TABLE, IDS.astype(jnp.uint32) * 1000003, num_ids=[15])


def test_positions_added():
    layer, places = embedding(), embedding()

    def loss(table, other, ids):
        return jnp.sum(jnp.tanh(called(layer, table, ids) + called(places, other, jnp.arange(ids.shape[1]))))

    check(trained(loss, 2), TABLE, OTHER, IDS, tables=(0, 1), num_ids=[15, 5], gradients=2)


def test_mixed_precision_keeps_the_gradient_in_float32():
    layer = embedding(dtype="mixed_bfloat16")

    def loss(table, ids):
        with keras.StatelessScope(state_mapping=[(layer.trainable_variables[0], table)]):
            return jnp.sum(layer(ids).astype(jnp.float32) ** 2)

    found = check(trained(loss), TABLE, IDS)
    assert found.jaxpr.outvars[1].aval.dtype == jnp.float32


# --- ids ----------------------------------------------------------------------------------------------

ODD = jnp.asarray([0, V - 1, -1, -V, -V - 1, V, 2 * V, 2**31 - 1, -(2**31)], jnp.int32)
GATHERS = {
    "index": lambda t, i: t[i],
    "take": lambda t, i: jnp.take(t, i, axis=0),
    "fill": lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=5),
    "clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "at_get": lambda t, i: t.at[i].get(mode="fill", fill_value=2),
    "keras": lambda t, i: keras.ops.take(t, i, axis=0),
    "vmap": lambda t, i: jax.vmap(lambda one: t[one])(i),
}


def weighted(gather):
    def loss(table, ids, weights):
        return jnp.sum(jnp.nan_to_num(gather(table, ids)) ** 2 * weights)

    return loss


QUICK_GATHERS = [
    name if name in ("index", "take", "clip") else pytest.param(name, marks=pytest.mark.long)
    for name in GATHERS
]


@pytest.mark.parametrize("gather", QUICK_GATHERS)
@pytest.mark.rest
def test_ids_that_the_table_does_not_have(gather):
    weights = jnp.asarray(rng().normal(size=(len(ODD), D)), jnp.float32)
    check(trained(weighted(GATHERS[gather])), TABLE, ODD, weights, num_ids=[len(ODD)], gradients=1)
    check(lambda t, i: GATHERS[gather](t, i), TABLE, ODD)


@pytest.mark.rest
@pytest.mark.parametrize("gather", QUICK_GATHERS)
@settings(max_examples=3)
@given(
    ids=st.lists(st.integers(-2 * V, 2 * V), min_size=6, max_size=6),
    dtype=st.sampled_from(["int8", "int16", "int32", "uint8", "uint32"]),
)
def test_any_ids(gather, ids, dtype):
    ids = jnp.asarray(np.asarray(ids).astype(dtype)).reshape(2, 3)
    weights = jnp.asarray(rng().normal(size=(2, 3, D)), jnp.float32)
    check(trained(weighted(GATHERS[gather])), TABLE, ids, weights)


def test_one_row():
    check(trained(lambda t, i: jnp.sum(t[i] ** 2)), TABLE, jnp.int32(3), num_ids=[1])
    check(trained(lambda t, i: jnp.sum(t[i] ** 2)), TABLE, jnp.int32(-2))
    check(trained(lambda t, i: jnp.sum(t[i] ** 2)), TABLE, jnp.int32(40))


@pytest.mark.rest
def test_rows_of_any_rank():
    for table in (TABLE[:, 0], jnp.stack([TABLE, OTHER], axis=2)):
        check(trained(lambda t, i: jnp.sum(t[i] ** 2)), table, IDS, num_ids=[15])


def test_no_ids():
    check(trained(lambda t, i: jnp.sum(t[i] ** 2)), TABLE, IDS_1[:0], num_ids=[0])


def test_ids_are_computed_from_weights():
    found = check(trained(lambda t, w, x: jnp.sum(t[jnp.argmax(x @ w, 1)] ** 2)), TABLE, W, W)
    assert [each.index for each in found.lookups[0].inputs] == [1, 2]


# --- where lookups stand ------------------------------------------------------------------------------


def twice(table, ids):
    return jnp.sum(jnp.tanh(table[ids]) ** 2) + jnp.sum(table[ids[0] + 1] * table[ids[1]])


def in_jit(table, ids):
    return jnp.sum(jax.jit(lambda t, i: jnp.tanh(t[i]))(table, ids) ** 2)


def in_checkpoint(table, ids):
    return jax.checkpoint(lambda t, i: jnp.sum(jnp.sin(t[i]) * t[i + 1]))(table, ids)


def in_scan(table, ids):
    def step(state, row):
        state = jnp.tanh(state + table[row] + table[(row + 3) % V])
        return state, jnp.sum(table[row[0]] * state)

    last, sums = jax.lax.scan(step, jnp.zeros((ids.shape[1], D)), ids, reverse=True)
    return jnp.sum(last) + jnp.sum(sums**2) + jnp.sum(table[ids[0]])


def in_scan_in_scan(table, ids):
    def outer(state, row):
        def inner(inside, one):
            return inside + jnp.sin(table[one]) * state, None

        return jax.lax.scan(inner, state, row)[0], jnp.sum(table[row[0]])

    last, sums = jax.lax.scan(outer, jnp.ones(D), ids)
    return jnp.sum(last**2) + jnp.sum(sums)


def in_counting_scan(table, ids):
    """The ids depend on the loop's carry."""

    def step(number, row):
        return (number * 5 + row[0]) % V, jnp.sum(table[number] ** 3)

    return jnp.sum(jax.lax.scan(step, jnp.int32(2), ids)[1])


def in_cond(table, ids):
    def first(t):
        return jnp.sum(t[ids] ** 2)

    def second(t):
        return jnp.sum(t[ids[0]]) + jnp.sum(t[ids[1] + 1] ** 3)

    return jax.lax.cond(ids[0, 0] > 5, first, second, table) + jax.lax.cond(
        ids[0, 0] > 5, second, first, table
    )


def in_switch(table, ids):
    branches = [lambda t: jnp.sum(t[ids]), lambda t: jnp.float32(1), lambda t: jnp.sum(t[ids[0]] ** 2)]
    return sum(jax.lax.switch(i, branches, table) for i in (ids[0, 0] % 3, ids[0, 1] % 3, ids[2, 1] % 3))


def of_each_row(table, ids):
    """By vmap, without a condition in it, for which JAX would copy the table."""
    return jnp.sum(
        jax.vmap(lambda row: jax.vmap(lambda i: jnp.where(i > 4, table[i], 2 * table[i - 1]))(row))(ids) ** 2
    )


def of_each_scale(table, ids):
    """By vmap over values that do not depend on the table."""
    return jnp.sum(jax.vmap(lambda scale: table[ids] * scale)(jnp.arange(3.0)))


def after_stop_gradient(table, ids):
    return jnp.sum(jax.lax.stop_gradient(table)[ids] * table[ids + 1])


PLACES = {
    "twice": (twice, 25),
    "in_jit": (in_jit, 15),
    "in_checkpoint": (in_checkpoint, 30),
    "in_scan": (in_scan, 38),
    "in_scan_in_scan": (in_scan_in_scan, 18),
    "in_counting_scan": (in_counting_scan, 3),
    "in_cond": (in_cond, 50),
    "in_switch": (in_switch, 60),
    "of_each_row": (of_each_row, 30),
    "of_each_scale": (of_each_scale, 15),
    "after_stop_gradient": (after_stop_gradient, 30),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.rest
def test_lookups_anywhere_are_merged_into_one(place):
    loss, num_ids = PLACES[place]
    check(trained(loss), TABLE, IDS, num_ids=[num_ids], gradients=1)


def test_untaken_branch_needs_no_rows():
    def loss(table, ids):
        return jax.lax.cond(ids[0] < 0, lambda t: jnp.sum(t[ids]), lambda t: jnp.sum(t[ids + 1]), table)

    ids = jnp.asarray([2, 4])
    jaxpr, consts = marked(trained(loss), [jax_compat.abstractify(a) for a in (TABLE, ids)])
    found = find_lookups(jaxpr, [len(consts)])
    unique, *_ = looked_up(found.lookups[0], found, consts, (TABLE, ids))
    assert unique.tolist() == [3, 5]


def test_a_tape_in_a_scan():
    def fn(table, ids):
        def step(total, row):
            value, (gradient,) = trained(lambda t: jnp.sum(t[row] ** 2))(table)
            return total + value, jnp.sum(gradient**2)

        return jax.lax.scan(step, jnp.float32(0), ids)

    check(fn, TABLE, IDS, num_ids=[15], gradients=0)


@settings(max_examples=2)
@given(st.lists(st.sampled_from(sorted(PLACES)), min_size=2, max_size=3), st.integers(0, 99))
@pytest.mark.rest
def test_several_places_have_one_lookup(places, seed):
    ids = jnp.asarray(np.random.default_rng(seed).integers(0, V - 1, (3, 5)))

    def loss(table, ids):
        return sum(PLACES[place][0](table, ids) for place in places)

    check(trained(loss), TABLE, ids, num_ids=[sum(PLACES[place][1] for place in places)])


# --- gradients by jax.grad ----------------------------------------------------------------------------


def by_jax(loss, num_tables=1):
    """A step whose gradients the user computes with JAX."""

    def step(*args):
        return jax.value_and_grad(loss, tuple(range(num_tables)))(*args)

    return step


def jitted_twice(table, ids):
    look_up = jax.jit(lambda t, i: jnp.tanh(t[i]))
    return jnp.sum(look_up(table, ids) * look_up(table, ids + 1))


@pytest.mark.parametrize("gather", QUICK_GATHERS)
def test_gradients_of_jax_grad_are_by_rows(gather):
    weights = jnp.asarray(rng().normal(size=(len(ODD), D)), jnp.float32)
    check(by_jax(weighted(GATHERS[gather])), TABLE, ODD, weights, gradients=1)


@pytest.mark.parametrize("loss", [twice, in_jit, jitted_twice, of_each_row, after_stop_gradient])
@pytest.mark.rest
def test_jax_grad_of_several_lookups(loss):
    check(by_jax(loss), TABLE, IDS, gradients=1)


def test_jax_grad_by_two_tables_of_one_shape_and_a_cast():
    def loss(table, other, ids):
        table = table.astype(jnp.bfloat16)
        return jnp.sum((table[ids] * 2 * other[ids]).astype(jnp.float32) ** 2)

    found = check(by_jax(loss, 2), TABLE, OTHER, IDS, tables=(0, 1), gradients=2)
    assert found.gradients == {1: 0, 2: 1}


def test_jax_grad_in_a_loop_gives_the_gradient_of_all_rows():
    check(by_jax(in_counting_scan), TABLE, IDS, gradients=0)
    assert refused(by_jax(in_scan), TABLE, IDS).primitive == "add_any"  # to that of the lookup after the loop


def test_other_sums_at_the_ids_are_not_gradients_of_the_table():
    def fn(table, ids):
        counts = jnp.zeros((V, D)).at[ids].add(1)
        other = jnp.ones((V, D)).at[ids].add(table[ids])
        return counts, other

    check(fn, TABLE, IDS, gradients=0)


INTO = {
    "zeros": (0.0, (V, D), (1,), 1),
    "ones": (1.0, (V, D), (1,), 0),
    "more_rows": (0.0, (V + 5, D), (1,), 0),
    "columns_first": (0.0, (V, D), (0,), 0),
}


@pytest.mark.parametrize("into", INTO)
def test_additions_at_the_indices_of_a_lookup(into):
    base, shape, window, gradients = INTO[into]
    gathered = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    added = jax.lax.ScatterDimensionNumbers(window, (0,), (0,))

    def fn(table, ids):
        indices = ids[:, None]
        rows = jax.lax.gather(table, indices, gathered, (1, D), mode="clip")
        start = jax.lax.broadcast(base, shape)
        return jax.lax.scatter_add(start, indices, jnp.sin(rows).T if window == (0,) else rows, added)

    check(fn, TABLE, IDS_1, gradients=gradients)


def test_the_table_itself_is_not_differentiated():
    def of_table(table, ids):
        with rx.GradientTape() as tape:
            tape.watch(table)
            value = jnp.sum(table[ids] ** 2)
        return value, tape.gradient(table, table)

    def of_gradient(table, ids):
        with rx.GradientTape() as outer:
            outer.watch(table)
            value, (gradient,) = trained(lambda t: jnp.sum(t[ids] ** 3))(table)
        return value, outer.gradient(gradient, table)

    assert refused(of_table, TABLE, IDS).primitive == "replicax_gradient"
    assert refused(of_gradient, TABLE, IDS).primitive == "replicax_gradient"


# --- what is done with gradients ----------------------------------------------------------------------


def with_gradient(after):
    """A step that returns the result of ``after`` for the gradient."""

    def step(table, ids):
        _, (gradient,) = trained(lambda t: jnp.sum(jnp.sin(t[ids]) * 3))(table)
        return after(gradient)

    return step


KEPT = {
    "clip": (lambda g: jnp.clip(g, -0.5, 0.5), 1),
    "scale": (lambda g: g * 0.5 / 3.0, 1),
    "sign": (lambda g: -jnp.sign(g), 1),
    "twice": (lambda g: g + g * g - 2 * g, 1),
    "converted": (lambda g: g.astype(jnp.bfloat16).astype(jnp.float32), 1),
    "norm": (lambda g: jnp.sqrt(jnp.sum(g**2)), 0),
    "norm_of_columns": (lambda g: jnp.sum(jnp.abs(g), axis=0), 0),
    "global_clipnorm": (lambda g: g * jnp.minimum(1.0, 2.0 / jnp.sqrt(jnp.sum(jnp.square(g)))), 1),
}
NEEDED = {
    "plus_one": ("add", lambda g: g + 1),
    "clip_above_0": ("max", lambda g: jnp.clip(g, 0.1, 0.5)),
    "cos": ("cos", jnp.cos),
    "maximum": ("reduce_max", jnp.max),
    "per_column": ("mul", lambda g: g * jnp.arange(4.0)),
    "inverse": ("div", lambda g: 1 / g),
    "root": ("integer_pow", lambda g: g**-2),
}


@pytest.mark.parametrize("after", KEPT)
def test_operations_that_keep_gradients_by_rows(after):
    function, gradients = KEPT[after]
    check(with_gradient(function), TABLE, IDS, gradients=gradients)


@pytest.mark.parametrize("after", NEEDED)
def test_operations_that_need_the_gradient_of_all_rows(after):
    primitive, function = NEEDED[after]
    why = refused(with_gradient(lambda g: jnp.nan_to_num(function(g), posinf=0, neginf=0)), TABLE, IDS)
    assert why.primitive == primitive
    assert HERE in why.line


# --- what needs the whole table -----------------------------------------------------------------------


@jax.custom_jvp
def halved(table, ids):
    return table[ids]


@halved.defjvp
def _halved_jvp(primals, tangents):
    return halved(*primals), 0.5 * tangents[0][primals[1]]


def parts_of_rows(table, ids):
    numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    return jnp.sum(jax.lax.gather(table, ids[0][:, None], numbers, (1, 2)) ** 2)


WHOLE = {
    "parts_of_rows": ("gather", parts_of_rows),
    "tied": ("transpose", lambda t, ids: jnp.sum(t[ids] @ t.T)),
    "tied_contracted": ("dot_general", lambda t, ids: jnp.sum(jnp.einsum("bsd,vd->bsv", t[ids], t))),
    "one_hot": ("dot_general", lambda t, ids: jnp.sum((jax.nn.one_hot(ids, V) @ t) ** 2)),
    "l2": ("integer_pow", lambda t, ids: jnp.sum(t[ids]) + 0.1 * jnp.sum(t**2)),
    "first_rows": ("slice", lambda t, ids: jnp.sum(t[:10]) + jnp.sum(t[ids])),
    "columns": ("gather", lambda t, ids: jnp.sum(t[:, ids % D])),
    "carried": ("scan", lambda t, ids: jnp.sum(jax.lax.scan(lambda c, i: (c * 2, c[i]), t, ids)[1])),
    "row_by_row": (
        "scan",
        lambda t, ids: jnp.sum(jax.lax.scan(lambda c, row: (c + row, row), jnp.ones(D), t)[0]),
    ),
    "while": (
        "while",
        lambda t, ids: jax.lax.stop_gradient(
            jax.lax.while_loop(lambda c: c < 9, lambda c: c + jnp.sum(t[ids] ** 2) + 1, 0.0)
        ),
    ),
    "in_scan": (
        "transpose",
        lambda t, ids: jax.lax.scan(lambda c, i: (c + jnp.sum(t[i] @ t.T), None), 0.0, ids)[0],
    ),
    "chosen": (
        "cond",
        lambda t, ids: jnp.sum(jax.lax.cond(ids[0, 0] > 2, jax.lax.stop_gradient, lambda t: t, t)[ids]),
    ),
    "cond_in_vmap": (
        "broadcast_in_dim",
        lambda t, ids: jnp.sum(
            jax.vmap(lambda i: jax.lax.cond(i > 4, lambda: t[i], lambda: 2 * t[i - 1]))(ids[0])
        ),
    ),
    "own_derivative": ("custom_jvp_call", lambda t, ids: jnp.sum(halved(t, ids) ** 2)),
    "ids_of_rows": ("gather", lambda t, ids: jnp.sum(t[jnp.argmax(t[ids], -1)])),
    "ids_of_rows_in_scan": (
        "gather",
        lambda t, ids: jax.lax.scan(lambda c, i: (jnp.argmax(t[c]), jnp.sum(t[c])), 1, ids)[1].sum(),
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", WHOLE)
def test_operation_that_needs_the_full_table_is_named(name):
    primitive, loss = WHOLE[name]
    why = refused(trained(loss), TABLE, IDS)
    assert why.primitive == primitive
    assert HERE in why.line


def test_a_table_that_is_returned():
    assert refused(lambda t, i: (t * 1, t[i]), TABLE, IDS).primitive == "mul"
    assert "result" in str(refused(lambda t, i: (t, t[i]), TABLE, IDS))


def test_one_of_two_tables_is_needed_in_full():
    def loss(table, other, ids):
        return jnp.sum(table[ids] ** 2) + jnp.sum(other[ids] @ other.T)

    jaxpr, consts = marked(trained(loss, 2), [jax_compat.abstractify(a) for a in (TABLE, OTHER, IDS)])
    got, found = run_by_rows(trained(loss, 2), (0, 1), (TABLE, OTHER, IDS))
    for one, other in zip(got, evaluate(jaxpr, [*consts, TABLE, OTHER, IDS]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert [lookup.table for lookup in found.lookups] == [len(consts)]
    assert [why.table for why in found.whole] == [len(consts) + 1]


def test_a_table_that_is_not_used():
    jaxpr, consts = marked(lambda t, i: i + 1, [jax_compat.abstractify(a) for a in (TABLE, IDS)])
    found = find_lookups(jaxpr, [len(consts)])
    assert not found.lookups
    assert not found.whole


# --- size ---------------------------------------------------------------------------------------------


def test_a_table_larger_than_memory_is_a_shape():
    table = jax.ShapeDtypeStruct((10**9, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((32, 8), jnp.int32)
    jaxpr, consts = marked(
        trained(lambda t, i: jnp.sum(t[i] ** 2)), list(map(jax_compat.abstractify, (table, ids)))
    )
    found = find_lookups(jaxpr, [len(consts)])
    assert [lookup.num_ids for lookup in found.lookups] == [256]
    assert max(v.aval.size for v in [*found.jaxpr.invars, *found.jaxpr.outvars]) == 256 * 64
    numbers = jnp.asarray(rng().integers(0, 10**9, (32, 8)), jnp.int32)
    (got,) = jax_compat.eval_jaxpr(found.lookups[0].jaxpr, [numbers])
    np.testing.assert_array_equal(got, numbers.reshape(-1))


def test_more_rows_than_int32_counts():
    table = jax.ShapeDtypeStruct((2**31, 1), jnp.float32)
    jaxpr, consts = marked(jnp.sum, [jax_compat.abstractify(table)])
    (why,) = find_lookups(jaxpr, [len(consts)]).whole
    assert "2147483647 rows" in str(why)
