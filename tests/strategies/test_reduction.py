"""``Strategy.reduce`` and ``gather``, number by number, eagerly and inside ``rx.function`` and ``merge_call``.

The expected numbers are TensorFlow's (measured on 2.21, or asserted by its tests) or NumPy's.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax import errors
from replicax._src.strategies import reduction


@pytest.fixture(scope="module")
def two():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def distribute(strategy, *rows, dtype=np.float32):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.asarray(rows[context.replica_id_in_sync_group], dtype)
    )


def outside(strategy, call, values):
    return call(strategy, values)


def in_scope(strategy, call, values):
    with strategy.scope():
        return call(strategy, values)


def in_function(strategy, call, values):
    return rx.function(lambda v: call(strategy, v))(values)


def in_merge_call(strategy, call, values):
    def step(x):
        return rx.get_replica_context().merge_call(call, (x,))

    return strategy.experimental_local_results(strategy.run(step, (values,)))[-1]


WHERE = [outside, in_scope, in_function, in_merge_call]


# From the documentation of tf.distribute.Strategy.reduce, and measured.
@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [
        ("SUM", None, [4, 6, 8, 10]),
        ("MEAN", None, [2, 3, 4, 5]),
        ("SUM", 0, 28),
        ("MEAN", 0, 3.5),
        ("SUM", -1, 28),
        ("MEAN", (0,), 3.5),
        ("SUM", [0], 28),
        ("SUM", (), [4, 6, 8, 10]),
    ],
)
@pytest.mark.parametrize("where", WHERE)
def test_tensorflows_example(two, op, axis, expected, where):
    values = distribute(two, [0, 1, 2, 3], [4, 5, 6, 7])
    result = where(two, lambda s, v: s.reduce(op, v, axis=axis), values)
    np.testing.assert_allclose(np.asarray(result), expected)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("rows", "op", "expected"),
    [
        (([0, 1, 2, 3], [4, 5]), "MEAN", 2.5),
        (([0, 1, 2, 3], [4, 5]), "SUM", 15),
        (([1, 2], []), "MEAN", 1.5),
        (([1, 2], []), "SUM", 3),
        (([], []), "MEAN", np.nan),
        (([], []), "SUM", 0),
    ],
)
def test_ragged(two, where, rows, op, expected):
    result = where(two, lambda s, v: s.reduce(op, v, axis=0), distribute(two, *rows))
    np.testing.assert_allclose(np.asarray(result), expected)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, (0, 1), (0, 2), (2, 0, 1)])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("where", [outside, in_function, in_merge_call])
def test_axes_of_larger_values(two, axis, op, where):
    rows = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    axes = (0, *(a % 3 + 1 for a in np.atleast_1d(axis)))
    expected = rows.sum(axes) if op == "SUM" else rows.mean(axes)
    result = where(two, lambda s, v: s.reduce(op, v, axis=axis), distribute(two, *rows))
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-6)


def test_ragged_in_another_dim_than_the_axis(two):
    values = distribute(two, np.ones((2, 3)), np.ones((2, 1)))
    assert float(two.reduce("SUM", values, axis=(0, 1))) == 8.0
    with pytest.raises(errors.ReductionError, match="different shapes"):
        two.reduce("SUM", values, axis=0)


@pytest.mark.parametrize(
    ("dtype", "total", "mean"),
    [
        (np.int32, "int32", "float32"),
        (np.uint8, "uint8", "float32"),
        (np.float16, "float16", "float16"),
        (np.float32, "float32", "float32"),
        (jnp.bfloat16, "bfloat16", "bfloat16"),
        (np.complex64, "complex64", "complex64"),
    ],
)
@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("where", [outside, in_merge_call])
def test_dtypes(two, dtype, total, mean, axis, where):
    values = distribute(two, [1, 2], [4, 6], dtype=dtype)
    summed = where(two, lambda s, v: s.reduce("SUM", v, axis=axis), values)
    averaged = where(two, lambda s, v: s.reduce("MEAN", v, axis=axis), values)
    assert (str(summed.dtype), str(averaged.dtype)) == (total, mean)
    expected = ([5, 8], [2.5, 4.0]) if axis is None else (13, 3.25)  # as TensorFlow, whose dtype is float64
    np.testing.assert_allclose(np.asarray(summed).astype(np.complex64), expected[0])
    np.testing.assert_allclose(np.asarray(averaged).astype(np.complex64), expected[1])


@pytest.mark.parametrize("where", [outside, in_merge_call])
def test_means_of_small_integers_do_not_overflow(two, where):
    values = distribute(two, [200, 200], [250, 150], dtype=np.uint8)
    assert float(where(two, lambda s, v: s.reduce("MEAN", v, axis=0), values)) == 200.0
    assert np.asarray(where(two, lambda s, v: s.reduce("MEAN", v, axis=None), values)).tolist() == [
        225.0,
        175.0,
    ]
    means = two.run(lambda x: rx.get_replica_context().all_reduce("MEAN", x), (values,))
    assert means.values[0].tolist() == [225.0, 175.0]


@pytest.mark.parametrize("where", WHERE)
def test_pytrees(two, where):
    values = {"a": distribute(two, 1, 2), "b": [distribute(two, [1, 1], [2, 2]), None]}
    result = where(two, lambda s, v: s.reduce("SUM", v, axis=None), values)
    assert float(result["a"]) == 3.0
    assert np.asarray(result["b"][0]).tolist() == [3.0, 3.0]
    assert result["b"][1] is None


def test_plain_values_with_one_replica():
    one = rx.OneDeviceStrategy("cpu:3")
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    for strategy in (one, rx.get_strategy()):
        for op in ("mean", "MEAN", "sum", "SUM", rx.ReduceOp.SUM):
            assert strategy.reduce(op, 1.0, axis=None) == 1.0
        assert strategy.reduce("MEAN", x, axis=0).tolist() == [2.0, 3.0]
        assert float(strategy.reduce("MEAN", x, axis=(0, 1))) == 2.5
        assert strategy.reduce("SUM", x, axis=0).tolist() == [4.0, 6.0]
        assert float(strategy.reduce("SUM", x, axis=(0, 1))) == 10.0
        assert strategy.reduce("SUM", {"a": x}, axis=None)["a"] is x


def test_mean_of_plain_and_replicated_values(two):
    assert float(two.reduce("MEAN", 3.0, axis=None)) == 3.0
    assert float(two.reduce("MEAN", jnp.float32(3), axis=None)) == 3.0
    assert np.asarray(two.reduce("MEAN", two.replicate(jnp.ones(2)), axis=None)).tolist() == [1.0, 1.0]


def test_results_are_on_all_worker_devices(two):
    result = two.reduce("SUM", distribute(two, 1, 2), axis=None)
    assert result.devices() == set(two.extended.worker_devices)
    assert result.sharding.is_fully_replicated


def test_reduction_is_compiled_once(two):
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        names = []
        import logging

        patch.setattr(logging.getLogger("jax"), "propagate", False)
        handler = logging.Handler()
        handler.emit = lambda record: names.append(record.getMessage())
        logging.getLogger("jax").addHandler(handler)
        try:
            for i in range(4):
                two.reduce("SUM", distribute(two, [i, 1, 7, 2], [2, 3, 4, 5]), axis=0)
                two.gather(distribute(two, [i, 1, 7, 2], [2, 3, 4, 5]), axis=0)
        finally:
            logging.getLogger("jax").removeHandler(handler)
    compiled = [name for name in names if name.startswith("Finished XLA compilation")]
    assert len(compiled) <= 2, compiled


# --- gather -------------------------------------------------------------------------------------------

# TensorFlow's GatherTest: the value of every replica, the axis.
GATHERED = [
    ([1, 2, 3], 0),
    ([[1, 2, 3]], 0),
    ([[1, 2, 3]], 1),
    ([[[1, 2], [1, 2]]], 0),
    ([[[1, 2], [1, 2]]], 1),
    ([[[1, 2], [1, 2]]], 2),
    ([[[1, 2], [1, 2]]], -1),
]


@pytest.mark.parametrize(("rows", "axis"), GATHERED)
@pytest.mark.parametrize("where", WHERE)
def test_gather(two, rows, axis, where):
    first, second = np.array(rows), np.array(rows) * 10
    result = where(two, lambda s, v: s.gather(v, axis=axis), distribute(two, first, second))
    assert np.asarray(result).tolist() == np.concatenate([first, second], axis=axis).tolist()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("shapes", "axis"),
    [(((1, 1), (2, 1)), 0), (((1, 1), (1, 2)), 1), (((0, 2), (3, 2)), 0), (((2,), (0,)), 0)],
)
def test_gather_of_ragged_values(two, where, shapes, axis):
    rows = [np.full(shape, r + 1.0) for r, shape in enumerate(shapes)]
    result = where(two, lambda s, v: s.gather(v, axis=axis), distribute(two, *rows))
    assert np.asarray(result).tolist() == np.concatenate(rows, axis=axis).tolist()


def test_gather_keeps_dtypes_bools_included(two):
    for dtype in (np.bool_, np.int8, np.float16):
        result = two.gather(distribute(two, [0, 1], [1, 0], dtype=dtype), axis=0)
        assert result.dtype == dtype
        assert result.tolist() == [0, 1, 1, 0]


def test_gather_of_pytrees_and_equal_and_plain_values(two):
    values = {"a": distribute(two, [1], [2]), "b": (distribute(two, [3], [4]),)}
    result = two.gather(values, axis=0)
    assert (result["a"].tolist(), result["b"][0].tolist()) == ([1, 2], [3, 4])
    same = two.run(lambda: jnp.array([5.0, 6.0]))
    assert two.gather(same, axis=0).tolist() == [5, 6, 5, 6]
    plain = jnp.ones(2)
    assert two.gather(plain, axis=0) is plain
    assert rx.OneDeviceStrategy("cpu:0").gather(plain, axis=0) is plain


# --- reduce_to, batch_reduce_to, broadcast_to ---------------------------------------------------------


def test_reduce_to_a_device(two):
    result = two.extended.reduce_to("SUM", distribute(two, 1, 2), destinations="/cpu:5")
    assert result.devices() == {jax.devices()[5]}
    assert float(result) == 3.0


def test_reduce_to_where_a_value_is(two):
    values = distribute(two, 1, 2)
    with two.scope():
        v = rx.Variable(0.0)
    for destinations in (values, v):
        result = two.extended.reduce_to("MEAN", values, destinations)
        assert isinstance(result, rx.Mirrored)
        assert float(np.asarray(result)) == 1.5
    with pytest.raises(errors.InvalidArgumentError, match="got a list"):
        two.extended.reduce_to("SUM", values, ["cpu:0", "cpu:1"])


def test_batch_reduce_to(two):
    pairs = [(distribute(two, 1, 2), "cpu:0"), (distribute(two, [3, 4], [5, 6]), "cpu:1")]
    first, second = two.extended.batch_reduce_to(rx.ReduceOp.SUM, pairs)
    assert (float(first), second.tolist()) == (3.0, [8.0, 10.0])
    assert (first.devices(), second.devices()) == ({jax.devices()[0]}, {jax.devices()[1]})


def test_broadcast_to(two):
    value = two.extended.broadcast_to(jnp.ones(2), destinations=two.extended.worker_devices)
    assert isinstance(value, rx.Mirrored)
    assert [component.tolist() for component in value.values] == [[1.0, 1.0]] * 2


def test_replica_context_all_gather_errors(two):
    def gather(x, axis):
        return rx.get_replica_context().all_gather(x, axis)

    with pytest.raises(errors.ReductionError, match="Cannot gather scalars"):
        two.run(gather, (distribute(two, 1, 2), 0))
    with pytest.raises(errors.ReductionError, match="Dimension 1 in both shapes must be equal"):
        two.run(gather, (distribute(two, np.ones((1, 2)), np.ones((1, 3))), 0))
    slices = rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2))
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        two.run(lambda: gather(slices, 0))


def test_local_results_of_indexed_slices_and_keras_variables():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        kernel = keras.Variable(np.array([1.0, 2.0], "float32"))
    replica_id = lambda: rx.get_replica_context().replica_id_in_sync_group  # noqa: E731
    slices = strategy.run(lambda: rx.IndexedSlices(jnp.ones((1, 2)) * replica_id(), jnp.array([0]), (3, 2)))
    first, second = strategy.experimental_local_results(slices)
    assert (first.values.tolist(), second.values.tolist()) == ([[0.0, 0.0]], [[1.0, 1.0]])
    assert second.dense_shape == (3, 2)
    strategy.run(lambda: kernel.assign_add(np.ones(2, "float32")))
    assert [c.tolist() for c in strategy.experimental_local_results(kernel)] == [[2.0, 3.0]] * 2


@pytest.mark.parametrize(
    "make", [rx.get_strategy, rx.MirroredStrategy, rx.experimental.CentralStorageStrategy]
)
def test_axis_is_required(make):
    call = lambda: make().reduce("SUM", jnp.ones(2))  # noqa: E731
    message(
        errors.InvalidArgumentError,
        call,
        "axis=None to combine the replicas' values",
        "axis=0 to combine the rows",
    )


@pytest.mark.parametrize("rows", [4, 3])
def test_a_python_number_that_a_step_returns_is_summed_or_its_error_says_what_to_return(rows):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    (batch,) = strategy.experimental_distribute_dataset(
        rx.data.from_arrays(np.ones(rows, np.float32)).batch(rows)
    )
    counted = strategy.run(lambda x: x.shape[0], args=(batch,))
    if rows == 3:  # the replicas' numbers differ, so they are arrays
        assert int(strategy.reduce("sum", counted, axis=None)) == 3
    else:
        with pytest.raises(
            errors.ReductionError, match=r"return an array, such as jnp\.asarray\(x\.shape\[0\]\)"
        ):
            strategy.reduce("sum", counted, axis=None)
    counted = strategy.run(lambda x: jnp.asarray(x.shape[0]), args=(batch,))
    assert int(strategy.reduce("sum", counted, axis=None)) == rows


# --- an operation that nobody has implemented -----------------------------------------------------------


@pytest.fixture
def largest(monkeypatch):
    """A member that was added to ``ReduceOp`` and to nothing else."""
    member = object.__new__(rx.ReduceOp)
    member._name_ = member._value_ = "MAX"
    monkeypatch.setitem(rx.ReduceOp._member_map_, "MAX", member)
    monkeypatch.setitem(rx.ReduceOp._value2member_map_, "MAX", member)
    return member


def in_replicas(function):
    """Runs a function of a replica's value on all replicas."""
    return lambda strategy, values: strategy.run(function, (values,))


UNKNOWN = {
    "per replica": lambda strategy, values: strategy.reduce("MAX", values, axis=None),
    "per replica and row": lambda strategy, values: strategy.reduce("MAX", values, axis=0),
    "mirrored": lambda strategy, values: strategy.reduce("MAX", rx.Variable(jnp.ones(3)), axis=None),
    "rows of a mirrored variable": lambda strategy, values: strategy.reduce("MAX", rx.Variable(jnp.ones(3)), axis=0),
    "plain": lambda strategy, values: strategy.reduce("MAX", jnp.ones(3), axis=None),
    "all_reduce": in_replicas(lambda x: rx.get_replica_context().all_reduce("MAX", x)),
    "all_reduce of slices": in_replicas(
        lambda x: rx.get_replica_context().all_reduce("MAX", rx.IndexedSlices(x[None], jnp.array([0]), (1, 2)))
    ),
    "merge_call": in_replicas(
        lambda x: rx.get_replica_context().merge_call(lambda s, x: s.reduce("MAX", x, axis=None), (x,))
    ),
    "merge_call of rows": in_replicas(
        lambda x: rx.get_replica_context().merge_call(lambda s, x: s.reduce("MAX", x, axis=0), (x,))
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("ops", [None, rx.CrossDeviceOps, rx.ReductionToOneDevice])
def test_reduction_that_is_not_implemented_is_an_error_and_no_sum(largest, way, ops):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops and ops())
    with strategy.scope():
        message(errors.ReductionError, lambda: way(strategy, distribute(strategy, [1, 5], [2, 3])))


def test_reduction_by_its_name_is_an_error_where_a_member_is_needed():
    values = rx.CrossDeviceOps.reduce_implementation
    says = message(
        errors.ReductionError, lambda: values(rx.CrossDeviceOps(), "mean", jnp.ones(3), None, None)
    )
    assert "Cannot reduce by 'mean'" in says


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reducing_numbers_that_are_ready_runs_no_program_and_gives_its_bits(num_replicas, op, monkeypatch):
    strategy = rx.MirroredStrategy([f"cpu:{r}" for r in range(num_replicas)])
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(num_replicas, 8)) * 10.0 ** rng.integers(-20, 38, (num_replicas, 8))).astype(
        "f4"
    )
    rows[:, 0], rows[:, 1], rows[0, 2], rows[-1, 2], rows[0, 3] = -0.0, 3e38, np.inf, -np.inf, np.nan
    equal = strategy.run(lambda x: x, args=(strategy.replicate(rows[0]),))
    values = {"rows": distribute(strategy, *rows), "equal": equal}
    if op == "SUM":
        integers = rng.integers(-(2**31), 2**31, rows.shape)
        values["integers"] = distribute(strategy, *integers, dtype=np.int32)
    jax.block_until_ready([value.stored for value in values.values()])
    of_program = reduction._launch
    monkeypatch.setattr(reduction, "_launch", None)
    on_host = {name: strategy.reduce(op, value, axis=None) for name, value in values.items()}
    monkeypatch.setattr(reduction, "_launch", of_program)
    monkeypatch.setattr(reduction, "_is_quick_on_host", lambda *_: False)
    for name, value in values.items():
        expected, result = strategy.reduce(op, value, axis=None), on_host[name]
        assert (result.dtype, result.sharding) == (expected.dtype, expected.sharding)
        np.testing.assert_array_equal(np.asarray(result).view("u4"), np.asarray(expected).view("u4"), name)


def test_reducing_numbers_that_xla_rounds_to_zero_gives_its_bits(two, monkeypatch):
    values = distribute(two, [1e-45, 1.2e-38], [1e-45, -1e-38])
    jax.block_until_ready(values.stored)
    result = two.reduce("SUM", values, axis=None)
    monkeypatch.setattr(reduction, "_is_quick_on_host", lambda *_: False)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(two.reduce("SUM", values, axis=None)))
