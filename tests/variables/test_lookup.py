"""Lookups: rows in the order of the ids from every kind of table, and combined rows for each example."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import replicax as rx
from checks import examples
from replicax import errors
from replicax._src.variables.shards import ShardsOfOne
from replicax.experimental import ShardedVariable
from replicax.nn import embedding_lookup, embedding_lookup_sparse

TABLE = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
KINDS = {
    "numpy": lambda: TABLE,
    "jax": lambda: jnp.asarray(TABLE),
    "nested_lists": TABLE.tolist,
    "variable": lambda: rx.Variable(TABLE),
    "keras_variable": lambda: keras.Variable(TABLE),
    "sharded": lambda: ShardedVariable(
        [rx.Variable(TABLE[:2]), rx.Variable(TABLE[2:4]), rx.Variable(TABLE[4:])]
    ),
    "sharded_unevenly": lambda: ShardedVariable([rx.Variable(TABLE[:1]), rx.Variable(TABLE[1:])]),
    "shards_of_one": lambda: ShardedVariable(ShardsOfOne([rx.Variable(TABLE)], 3)),
    "list_of_one": lambda: [rx.Variable(TABLE)],
    "list_of_parts": lambda: [rx.Variable(TABLE[:3]), TABLE[3:]],
    "list_of_sharded": lambda: [ShardedVariable([rx.Variable(TABLE)])],
}


@pytest.fixture(params=KINDS)
def params(request):
    return KINDS[request.param]()


def test_rows_are_in_the_order_of_the_ids(params):
    for ids in ([4, 0, 3, 0], 2, [[0, 3], [4, 1]], np.array([1], np.int64), np.zeros((2, 0), np.int32), []):
        np.testing.assert_array_equal(embedding_lookup(params, ids), TABLE[np.array(ids, int)])


def test_in_a_traced_function(params):
    ids = jnp.array([[4, 0], [3, 3]])
    np.testing.assert_array_equal(jax.jit(lambda ids: embedding_lookup(params, ids))(ids), TABLE[ids])


def test_in_replica_functions():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        tables = [KINDS[kind]() for kind in ("variable", "keras_variable", "sharded")]
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: np.array([context.replica_id_in_sync_group, 4])
    )
    rows = strategy.run(lambda ids: [embedding_lookup(table, ids) for table in tables], args=(ids,))
    for of_table in rows:
        first, second = strategy.experimental_local_results(of_table)
        np.testing.assert_array_equal(first, TABLE[[0, 4]])
        np.testing.assert_array_equal(second, TABLE[[1, 4]])


@pytest.mark.parametrize("ids", [[5], [0, -1], [[0], [9]]])
def test_missing_ids(params, ids):
    with pytest.raises(
        errors.InvalidArgumentError, match=rf"ids has {np.ravel(ids)[-1]}, which is not in \[0, 5\)"
    ):
        embedding_lookup(params, ids)


def test_ids_are_integers(params):
    with pytest.raises(errors.InvalidArgumentError, match="ids must be integers"):
        embedding_lookup(params, [0.0])


def test_traced_missing_ids_give_nan(params):
    rows = jax.jit(lambda ids: embedding_lookup(params, ids))(jnp.array([5, 0, -1]))
    np.testing.assert_array_equal(rows, [[np.nan, np.nan], TABLE[0], TABLE[4]])


@pytest.mark.parametrize(("params", "says"), [([], "empty list"), (np.float32(1), "params is a scalar")])
def test_values_that_are_not_tables(params, says):
    with pytest.raises(errors.InvalidArgumentError, match=says):
        embedding_lookup(params, [0])


@examples(25, short=10)
@given(
    table=npst.arrays(np.float32, (4, 2, 2), elements=st.floats(-8, 8, width=16)), max_norm=st.floats(0.5, 9)
)
def test_rows_are_scaled_to_max_norm(table, max_norm):
    ids = [[3, 0], [1, 1]]
    norms = np.sqrt((table**2).sum((1, 2), keepdims=True))
    wanted = (table * np.minimum(1, max_norm / np.maximum(norms, 1e-30)))[np.array(ids)]
    np.testing.assert_allclose(embedding_lookup(table, ids, max_norm), wanted, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_row_of_zeros_is_not_nan():
    gradient = jax.grad(lambda t: embedding_lookup(t, [0, 1], 1.0).sum())(jnp.array([[0.0, 0.0], [3.0, 4.0]]))
    np.testing.assert_allclose(gradient, [[1, 1], [0.032, -0.024]], rtol=1e-5)


# --- combined rows ------------------------------------------------------------------------------------


def combine(rows, weights, combiner):
    total = sum((w * row for w, row in zip(weights, rows, strict=True)), np.zeros(2))
    by = {"sum": 1.0, "mean": sum(weights), "sqrtn": np.sqrt(np.sum(np.square(weights)))}[combiner]
    return total / by if by else np.zeros(2)


RAGGED = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, 3.0])), max_size=4),
    min_size=1,
    max_size=4,
)


@pytest.mark.rest
@examples(20, short=6)
@given(examples=RAGGED, combiner=st.sampled_from(["sum", "mean", "sqrtn"]), has_weights=st.booleans())
def test_lists_of_different_lengths(examples, combiner, has_weights):
    ids = [[i for i, _ in example] for example in examples]
    weights = [[w if has_weights else 1.0 for _, w in example] for example in examples]
    wanted = [combine(TABLE[np.array(i, int)], w, combiner) for i, w in zip(ids, weights, strict=True)]
    given_weights = weights if has_weights else None
    np.testing.assert_allclose(
        embedding_lookup_sparse(TABLE, ids, given_weights, combiner), wanted, rtol=1e-5, atol=1e-6
    )
    padded = np.full((len(ids), 4), -1)
    padded_weights = np.full((len(ids), 4), np.nan, np.float32)
    for row, (i, w) in enumerate(zip(ids, weights, strict=True)):
        padded[row, : len(i)], padded_weights[row, : len(w)] = i, w
    combined = jax.jit(
        lambda ids, weights: embedding_lookup_sparse(
            TABLE, ids, weights if has_weights else None, combiner, mask=ids >= 0
        )
    )(padded, padded_weights)
    np.testing.assert_allclose(combined, wanted, rtol=1e-5, atol=1e-6)


def test_mean_is_the_default(params):
    ids = [[0, 3], [4], [1]]
    for combiner in (None, "mean"):
        np.testing.assert_allclose(
            embedding_lookup_sparse(params, ids, combiner=combiner), [[4, 5], [9, 10], [3, 4]], rtol=1e-6
        )


def test_ids_of_any_shape():
    ids = np.array([[[0, 1], [2, 3]], [[4, 4], [1, 0]]])
    np.testing.assert_allclose(embedding_lookup_sparse(TABLE, ids, combiner="sum"), TABLE[ids].sum(2))
    np.testing.assert_allclose(embedding_lookup_sparse(TABLE, ids[0, 0], combiner="sum"), TABLE[:2].sum(0))
    cube = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)
    np.testing.assert_allclose(embedding_lookup_sparse(cube, [[0, 3]]), cube[[0, 3]].mean(0, keepdims=True))


def test_max_norm_is_of_each_row_before_it_is_combined():
    combined = embedding_lookup_sparse(np.float32([[3, 4], [0, 1]]), [[0, 1]], combiner="sum", max_norm=2.5)
    np.testing.assert_allclose(combined, [[1.5, 3]], rtol=1e-6)


def test_sums_of_half_precision_are_exact():
    table = jnp.ones((1, 1), jnp.bfloat16)
    combined = embedding_lookup_sparse(table, np.zeros((1, 1000), int), combiner="sum")
    assert combined.dtype == jnp.bfloat16
    assert float(combined[0, 0]) == 1000.0
    assert float(embedding_lookup_sparse(table, np.zeros((1, 1001), int))[0, 0]) == 1.0
    weights = np.full((1, 100), 0.3, np.float32)  # in bfloat16 0.30078125, and the sum 30.125
    assert float(embedding_lookup_sparse(table, np.zeros((1, 100), int), weights, "sum")[0, 0]) == 30.0


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_gradients_of_empty_groups_are_zero(combiner):
    def loss(table, weights):
        return embedding_lookup_sparse(
            table,
            jnp.array([[-1, -1], [1, 2]]),
            weights,
            combiner,
            mask=jnp.array([[False, False], [True, False]]),
        ).sum()

    of_table, of_weights = jax.grad(loss, argnums=(0, 1))(
        jnp.asarray(TABLE), jnp.array([[1.0, 1.0], [2.0, 1.0]])
    )
    assert np.isfinite(of_table).all()
    assert np.flatnonzero(np.asarray(of_table).any(1)).tolist() == [1]
    np.testing.assert_allclose(
        of_weights, [[0, 0], [TABLE[1].sum() if combiner == "sum" else 0, 0]], atol=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"combiner": "max"}, "combiner must be one of 'mean', 'sqrtn' or 'sum', got 'max'"),
        ({"weights": np.ones((2, 3))}, r"weights has shape \(2, 3\), and ids \(2, 2\)"),
        ({"mask": np.ones(2, bool)}, r"mask has shape \(2,\), and ids \(2, 2\)"),
        ({"params": np.ones((5, 2), np.int32)}, "params has dtype int32"),
        (
            {"ids": [[0], [1, 2]], "weights": [[1.0], [1.0]]},
            r"weights has rows of \[1, 1\] numbers, and ids of \[1, 2\]",
        ),
        ({"ids": [[0], [1, 2]], "mask": np.ones((2, 2), bool)}, "leave mask out"),
        ({"ids": [[0], [5]]}, "ids has 5"),
    ],
)
def test_arguments_that_do_not_fit(arguments, says):
    with pytest.raises(errors.InvalidArgumentError, match=says):
        embedding_lookup_sparse(**{"params": TABLE, "ids": np.zeros((2, 2), int), **arguments})
