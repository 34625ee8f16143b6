"""``ShardedVariable`` acts like the full array, over shards of any sizes; ``tests/parity`` compares it with
TensorFlow's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from checks import examples
from replicax import errors
from replicax._src.variables.shards import ShardsOfOne
from replicax.experimental import ShardedVariable

VALUE = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
OPERATIONS = {
    "add": lambda array, i, row: array.__setitem__(i, array[i] + row),
    "sub": lambda array, i, row: array.__setitem__(i, array[i] - row),
    "mul": lambda array, i, row: array.__setitem__(i, array[i] * row),
    "div": lambda array, i, row: array.__setitem__(i, array[i] / row),
    "min": lambda array, i, row: array.__setitem__(i, np.minimum(array[i], row)),
    "max": lambda array, i, row: array.__setitem__(i, np.maximum(array[i], row)),
    "update": lambda array, i, row: array.__setitem__(i, row),
}
STRATEGIES = {
    "default": rx.get_strategy,
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central_storage": lambda: rx.CentralStorageStrategy(["cpu:1", "cpu:2"]),
}


def in_variables(value, sizes=(2, 2, 1), **options):
    cuts = np.cumsum(sizes)[:-1]
    return ShardedVariable([rx.Variable(part, **options) for part in np.split(value, cuts)])


def in_one(value, num_shards=3, **options):
    return ShardedVariable(ShardsOfOne([rx.Variable(value, **options)], num_shards))


@pytest.fixture(params=[in_variables, in_one])
def make(request):
    return request.param


@pytest.fixture(params=STRATEGIES, scope="module")
def strategy(request):
    return STRATEGIES[request.param]()


def slices(rows, *numbers):
    return rx.IndexedSlices(np.asarray(rows, np.float32), np.asarray(numbers, np.int32))


# --- what it is ---------------------------------------------------------------------------------------


def test_attributes_describe_the_full_variable(make):
    v = make(VALUE)
    assert (v.shape, v.dtype, v.ndim, v.size) == ((5, 2), np.float32, 2, 10)
    np.testing.assert_array_equal(v.numpy(), VALUE)
    np.testing.assert_array_equal(v.value, VALUE)
    assert "shape=(5, 2), dtype=float32, num_shards=3" in repr(v)


def test_len_and_iteration_are_of_the_shards(make):
    v = make(VALUE)
    assert len(v) == len(v.variables) == 3
    assert [shard.shape for shard in v] == [(2, 2), (2, 2), (1, 2)]
    np.testing.assert_array_equal(np.concatenate([shard.numpy() for shard in v]), VALUE)


def test_names():
    assert in_variables(VALUE).name == "ShardedVariable"
    assert ShardedVariable([rx.Variable([1.0])], name="w").name == "w"
    one = in_one(VALUE, name="w")
    assert one.name == "w"
    assert [shard.name for shard in one] == ["w/part_0", "w/part_1", "w/part_2"]


def test_shards_can_be_assigned(make):
    v = make(VALUE)
    v.variables[1].assign(np.full((2, 2), 7.0))
    v.variables[2].assign_add([[1.0, 2.0]])
    v.variables[0].assign_sub(np.ones((2, 2)))
    np.testing.assert_array_equal(v.numpy(), [[0, 1], [2, 3], [7, 7], [7, 7], [10, 12]])


def test_shard_of_one_checks_shapes():
    with pytest.raises(errors.VariableError, match=r"'w/part_2'.*\(1, 2\)"):
        in_one(VALUE, name="w").variables[2].assign([1.0, 2.0])


@pytest.mark.parametrize("variables", [[], None, [1.0], "w", {}, np.ones(3)])
def test_invalid_lists_of_variables(variables):
    with pytest.raises(TypeError, match=r"should be a non-empty list of `rx.Variable`s\. Received"):
        ShardedVariable(variables)


def test_single_variable_is_not_a_list():
    with pytest.raises(TypeError, match="non-empty list"):
        ShardedVariable(rx.Variable([1.0, 2.0]))


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([[1]], "must have the same dtype. Received dtypes: ['float32', 'int32']"),
        ([[[1.0]]], "must have the same shapes except for the first axis"),
        ([[[1.0, 2.0]], [[1.0]]], "must have the same shapes except for the first axis"),
        ([1.0], "must have the same shapes except for the first axis"),
    ],
)
def test_shards_that_do_not_fit(others, says):
    shards = [rx.Variable([1.0])] if len(others) == 1 and np.ndim(others[0]) else []
    with pytest.raises(errors.VariableError) as raised:
        ShardedVariable([*shards, *map(rx.Variable, others)])
    assert says in str(raised.value)


# --- reading ------------------------------------------------------------------------------------------


@st.composite
def arrays_and_sizes(draw):
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    shape = (sum(sizes), *draw(st.lists(st.integers(1, 3), max_size=2)))
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape), sizes


def basic_indices(shape):
    bounds = st.none() | st.integers(-7, 7)
    steps = st.none() | st.integers(-3, 3).filter(bool)
    of_dim = [st.builds(slice, bounds, bounds, steps) | st.integers(-n, n - 1) for n in shape if n]
    of_dim += [st.builds(slice, bounds, bounds, steps) for n in shape if not n]

    def with_extras(index, num_taken, gap, new):
        items = list(index[:num_taken])
        items[gap % (num_taken + 1) : gap % (num_taken + 1)] = [Ellipsis] * (
            num_taken < len(shape) or gap > 3
        )
        items[new % (len(items) + 1) : new % (len(items) + 1)] = [None] * (new > 3)
        return tuple(items)

    return st.builds(
        with_extras, st.tuples(*of_dim), st.integers(0, len(shape)), st.integers(0, 6), st.integers(0, 6)
    )


@examples(40, short=15)
@given(data=st.data(), array_and_sizes=arrays_and_sizes())
def test_slices_are_those_of_the_array(data, array_and_sizes):
    array, sizes = array_and_sizes
    index = data.draw(basic_indices(array.shape))
    try:
        wanted = array[index]
    except IndexError:  # an ellipsis in the wrong place of a shape with an empty dim
        return
    v = in_variables(array, sizes)
    np.testing.assert_array_equal(np.asarray(v[index]), wanted)
    np.testing.assert_array_equal(np.asarray(v[index[0] if len(index) == 1 else index]), wanted)


@pytest.mark.parametrize(
    "index",
    [
        np.array([True, False, True, False, True]),
        VALUE > 4,
        jnp.array([False, False, False, False, True]),
        [True, False, True, False, True],
        np.zeros(5, bool),
        np.array([4, 0, 2, 0]),
        np.array([[4, -1], [0, 2]], np.int8),
        [3, 1],
        np.int64(2),
        jnp.int32(3),
        (np.array([4, 0]), 1),
        (slice(1, 3), [1, 0]),
    ],
    ids=str,
)
def test_masks_and_arrays_of_numbers(make, index):
    v = make(VALUE)
    plain = tuple(np.asarray(x) if isinstance(x, jax.Array) else x for x in (index,))
    np.testing.assert_array_equal(np.asarray(v[index]), VALUE[plain[0]])


def test_index_may_be_a_variable(make):
    np.testing.assert_array_equal(make(VALUE)[rx.Variable([3, 0])], VALUE[[3, 0]])


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (5, "slice index 5 of dimension 0 out of bounds"),
        (-6, "slice index -6 of dimension 0 out of bounds"),
        ((0, 2), "slice index 2 of dimension 1 out of bounds"),
        ((..., -3), "slice index -3 of dimension 1 out of bounds"),
        ((None, 7), "slice index 7 of dimension 0 out of bounds"),
        (np.array([0, 9, 1]), "slice index 9 of dimension 0 out of bounds"),
        ([0, -9], "slice index -9 of dimension 0 out of bounds"),
        ((np.array([True] * 5), 2), "slice index 2 of dimension 1 out of bounds"),
        ((0, 0, 0), "3 indices were given"),
        (np.ones((5, 2, 1), bool), "3 indices were given"),
    ],
    ids=str,
)
def test_out_of_bounds(make, index, says):
    with pytest.raises(IndexError, match=f"ShardedVariable: {says}"):
        make(VALUE)[index]


@pytest.mark.parametrize("index", [True, False, np.bool_(True), (slice(None), True)], ids=str)
def test_scalar_masks(make, index):
    with pytest.raises(errors.InvalidArgumentError, match="mask cannot be scalar"):
        make(VALUE)[index]


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (np.array([True, False]), r"\(2,\) where it should be \(5,\)"),
        (np.ones((2, 5), bool), r"\(2, 5\) where it should be \(5, 2\)"),
        ((..., np.array([True] * 5)), r"\(5,\) where it should be \(2,\)"),
    ],
)
def test_masks_of_another_shape(make, index, says):
    with pytest.raises(errors.InvalidArgumentError, match=f"ShardedVariable: a mask of shape {says}"):
        make(VALUE)[index]


def test_step_of_zero(make):
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        make(VALUE)[::0]


def test_operators_use_the_full_variable(make):
    v = make(VALUE)
    np.testing.assert_array_equal(1 - v, 1 - VALUE)
    np.testing.assert_array_equal(v @ jnp.ones((2, 1)), VALUE @ np.ones((2, 1)))
    np.testing.assert_array_equal(v > 3, VALUE > 3)
    np.testing.assert_array_equal(v + v, VALUE * 2)
    np.testing.assert_array_equal(-v, -VALUE)
    np.testing.assert_array_equal(jnp.sum(v, axis=0), VALUE.sum(0))
    np.testing.assert_array_equal(np.asarray(v), VALUE)
    assert {v: 1}[v] == 1


def test_sparse_read_is_in_the_order_of_the_indices(make):
    v = make(VALUE)
    np.testing.assert_array_equal(v.sparse_read(np.array([4, 0, 2, 0])), VALUE[[4, 0, 2, 0]])
    assert v.sparse_read([]).shape == (0, 2)


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([[0, 1]], r"indices must be 1D Tensor for sparse operations. Received shape: \(1, 2\)"),
        (0, r"indices must be 1D Tensor for sparse operations. Received shape: \(\)"),
        ([5], r"5, which is not in \[0, 5\)"),
        ([0, -1], r"-1, which is not in \[0, 5\)"),
        ([0.0], "must be integers"),
    ],
)
def test_indices_that_are_not_rows(make, indices, says):
    v = make(VALUE)
    with pytest.raises(errors.InvalidArgumentError, match=says):
        v.sparse_read(np.array(indices))
    with pytest.raises(errors.InvalidArgumentError, match=says):
        v.scatter_add(rx.IndexedSlices(np.ones((*np.shape(indices), 2), np.float32), np.array(indices)))
    np.testing.assert_array_equal(v.numpy(), VALUE)


# --- assigning ----------------------------------------------------------------------------------------


def test_assign(make):
    v = make(VALUE)
    assert v.assign(VALUE[::-1]) is v
    np.testing.assert_array_equal(v.numpy(), VALUE[::-1])
    assert v.assign_add(VALUE) is v
    np.testing.assert_array_equal(v.numpy(), VALUE[::-1] + VALUE)
    assert v.assign_sub(make(VALUE)) is v
    np.testing.assert_array_equal(v.numpy(), VALUE[::-1])


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("shape", [(), (4, 2), (7, 2), (2,), (5, 1), (1, 2)])
def test_assign_takes_the_full_shape(make, method, shape):
    v = make(VALUE)
    with pytest.raises(errors.VariableError, match=r"\(5, 2\)"):
        getattr(v, method)(np.ones(shape, np.float32))
    np.testing.assert_array_equal(v.numpy(), VALUE)


def test_assign_takes_arrays(make):
    with pytest.raises(errors.VariableError, match=r"must be an array or a number.*got str"):
        make(VALUE).assign("rows")


@examples(20, short=6)
@given(
    data=st.data(),
    operation=st.sampled_from(sorted(OPERATIONS)),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum),
)
def test_scatter_is_row_by_row(data, operation, sizes):
    num_rows = sum(sizes)
    array = np.arange(1, 1 + num_rows * 2, dtype=np.float32).reshape(num_rows, 2)
    is_unique = operation == "update"  # which of two rows stays is not said
    numbers = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=6, unique=is_unique))
    rows = np.array([[2.0 + i, 0.5 + i] for i in range(len(numbers))], np.float32).reshape(-1, 2)
    wanted = array.copy()
    for i, row in zip(numbers, rows, strict=True):
        OPERATIONS[operation](wanted, i, row)
    for v in (in_variables(array, sizes), in_one(array, min(len(sizes), num_rows))):
        assert getattr(v, f"scatter_{operation}")(slices(rows, *numbers)) is v
        np.testing.assert_allclose(v.numpy(), wanted, rtol=1e-6)


def test_batch_scatter_update(make):
    v = make(VALUE)
    assert v.batch_scatter_update(slices([[10, 20], [30, 40]], 4, 0)) is v
    np.testing.assert_array_equal(v.numpy(), [[30, 40], *VALUE[1:4], [10, 20]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_small_integers_are_indices_of_many_rows(make, dtype):
    array = np.zeros((300, 1), np.float32)
    v = in_variables(array, (150, 150)) if make is in_variables else in_one(array, 2)
    v.scatter_update(rx.IndexedSlices(np.float32([[7.0]]), np.array([100], dtype)))
    assert np.flatnonzero(v.numpy()).tolist() == [100]


def test_scatter_takes_indexed_slices(make):
    with pytest.raises(errors.VariableError, match=r"scatter_add takes rx\.IndexedSlices"):
        make(VALUE).scatter_add(np.ones((5, 2)))


def test_values_of_scatter_have_the_shape_of_rows(make):
    with pytest.raises(errors.VariableError, match=r"\(1, 2\).*\(1,\)"):
        make(VALUE).scatter_add(slices([1.0], 0))


# --- in programs --------------------------------------------------------------------------------------


def test_in_a_replica_function(strategy, make):
    with strategy.scope():
        v = make(VALUE, aggregation="SUM")
    num_replicas = strategy.num_replicas_in_sync
    traces = []

    @rx.function
    def step(ids):
        traces.append(ids)

        def replica_fn(ids):
            v.scatter_add(rx.IndexedSlices(jnp.ones((2, 2)), ids))
            v.assign_sub(jnp.full((5, 2), 0.5))
            return v.sparse_read(ids), v[ids], v[-1]

        return strategy.run(replica_fn, args=(ids,))

    wanted = VALUE.copy()
    for ids in ([4, 0], [1, 4]):
        read, sliced, last = strategy.experimental_local_results(step(jnp.array(ids)))[0]
        wanted[ids] += num_replicas
        wanted -= 0.5 * num_replicas
        np.testing.assert_array_equal(v.numpy(), wanted)
        np.testing.assert_array_equal(read, wanted[ids])
        np.testing.assert_array_equal(sliced, wanted[ids])
        np.testing.assert_array_equal(last, wanted[-1])
    assert len(traces) == 1


def test_traced_missing_indices_change_nothing(strategy, make):
    with strategy.scope():
        v = make(VALUE, aggregation="SUM")

    def replica_fn(ids):
        v.scatter_update(
            rx.IndexedSlices(jnp.zeros((3, 2)), ids)
        ) if strategy.num_replicas_in_sync == 1 else None
        v.scatter_add(rx.IndexedSlices(jnp.ones((3, 2)), ids))

    strategy.run(replica_fn, args=(jnp.array([-1, 5, 7]),))
    np.testing.assert_array_equal(v.numpy(), VALUE)


def test_as_an_argument(strategy, make):
    with strategy.scope():
        v = make(VALUE)

    def replica_fn(table):
        table.assign_add(jnp.ones((5, 2)))
        return table.sparse_read(jnp.array([4, 1]))

    rows = strategy.experimental_local_results(strategy.run(replica_fn, args=(v,)))[0]
    np.testing.assert_array_equal(rows, VALUE[[4, 1]] + 1)
    np.testing.assert_array_equal(v.numpy(), VALUE + 1)


def test_functions_of_jax_get_the_full_array(make):
    v = make(VALUE)
    np.testing.assert_array_equal(jax.jit(lambda x: x[3] * 2)(v), VALUE[3] * 2)
    np.testing.assert_array_equal(jax.grad(lambda x: (x**2).sum())(v), VALUE * 2)


def test_gradient_of_a_tape_has_the_full_shape(strategy, make):
    with strategy.scope():
        v = make(VALUE)

    def replica_fn():
        with rx.GradientTape() as tape:
            loss = jnp.sum(v.sparse_read(jnp.array([0, 4, 4])) ** 2)
        return tape.gradient(loss, v)

    gradient = strategy.experimental_local_results(strategy.run(replica_fn))[0]
    wanted = np.zeros_like(VALUE)
    wanted[0], wanted[4] = 2 * VALUE[0], 4 * VALUE[4]
    np.testing.assert_array_equal(gradient, wanted)


def test_lookup_in_a_program_is_one_gather_of_rows(make):
    v = make(VALUE)
    for read in (v.sparse_read, v.__getitem__, lambda ids: rx.nn.embedding_lookup(v, ids)):
        jaxpr = jax.make_jaxpr(jax.jit(read))(jnp.array([1, 0]))
        assert str(jaxpr).count(" gather[") == 1
        assert "slice_sizes=(1, 2)" in str(jaxpr)
