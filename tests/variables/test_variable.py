"""``rx.Variable``: creation, reading, assigning and scattering, in every context, by every rule of aggregation.

The tables are TensorFlow's (its source and measured values), except where the design says otherwise.
"""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax import errors

STRATEGIES = {
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central_storage": lambda: rx.CentralStorageStrategy(["cpu:1", "cpu:2"]),
}


@pytest.fixture(params=STRATEGIES, scope="module")
def strategy(request):
    return STRATEGIES[request.param]()


def make(strategy, initial=1.0, **kwargs):
    with strategy.scope():
        return rx.Variable(initial, **kwargs)


def components(strategy, v):
    return [np.asarray(c).tolist() for c in strategy.experimental_local_results(v)]


def own(x=1.0):
    """x on the first replica, x + 1 on the second."""
    return rx.get_replica_context().replica_id_in_sync_group + x


# --- copies ---------------------------------------------------------------------------------------------


def test_copies_are_new_variables_of_the_same_strategy(strategy):
    v = make(strategy, [1.0, 2.0], name="w", trainable=False, aggregation="mean")
    for copied in (copy.deepcopy(v), copy.copy(v), copy.deepcopy({"v": [v, v]})["v"][0]):
        v.assign([5.0, 6.0])
        strategy.run(lambda copied=copied: copied.assign_add([1.0, 1.0]))
        assert copied.numpy().tolist() == [2.0, 3.0]
        assert (copied.name, copied.trainable, copied.aggregation.name) == ("w", False, "MEAN")
        assert copied.distribute_strategy is strategy
        v.assign([1.0, 2.0])
    both = copy.deepcopy([v, v])
    assert both[0] is both[1]


def test_a_pickle_holds_the_value_and_is_loaded_in_the_scope_that_is_open(strategy):
    text = pickle.dumps(make(strategy, np.arange(3, dtype=np.int32), name="ids"))
    with strategy.scope():
        loaded = pickle.loads(text)
    assert (loaded.name, loaded.dtype, loaded.numpy().tolist()) == ("ids", np.int32, [0, 1, 2])
    assert loaded.distribute_strategy is strategy
    assert pickle.loads(text).distribute_strategy is rx.get_strategy()


def test_components_are_not_copied_and_the_error_says_why(strategy):
    v = make(strategy, 1.0, name="total", synchronization="on_read", aggregation="sum")
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        message(
            errors.UnsupportedError,
            lambda copied=copied: copied(v),
            "'total' is one value per replica",
            "Checkpoint",
        )


def test_a_variable_is_not_copied_in_a_function_that_is_traced(strategy):
    v = make(strategy, 1.0, name="w")
    message(
        errors.VariableError,
        lambda: strategy.run(lambda: copy.deepcopy(v).value),
        "'w' was copied",
        "Copy it outside",
    )


# --- creation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initial", "dtype", "shape", "expected"),
    [
        (1, None, (), "int32"),
        (1.5, None, (), "float32"),
        (True, None, (), "bool"),
        ([1.0, 2.0], None, (2,), "float32"),
        (np.zeros((2, 3)), None, (2, 3), "float32"),
        (np.zeros(2, np.float16), None, (2,), "float16"),
        (1, "float32", (), "float32"),
        ([1, 2], jnp.bfloat16, (2,), "bfloat16"),
        (lambda: np.ones(4, np.int8), None, (4,), "int8"),
        (lambda: 3, jnp.float32, (), "float32"),
        (jnp.arange(3), None, (3,), "int32"),
    ],
)
def test_shape_and_dtype_are_those_of_the_initial_value(strategy, initial, dtype, shape, expected):
    v = make(strategy, initial, dtype=dtype)
    assert v.shape == shape
    assert str(v.dtype) == expected
    assert v.ndim == len(shape)
    assert v.size == int(np.prod(shape))
    assert v.value.shape == shape
    assert str(v.value.dtype) == expected
    assert not v.value.weak_type


@pytest.mark.parametrize("how", ["initial", "assign"])
def test_numpy_array_may_be_changed_right_after_it_was_given(strategy, how):
    """With 2048 x 2048, JAX reads the array after the call in some of these trials, unless it is copied."""
    variable = make(strategy, np.zeros((2048, 2048), np.float32))
    for _ in range(20):
        value = np.ones((2048, 2048), np.float32)
        if how == "initial":
            variable = make(strategy, value)
        else:
            variable.assign(value)
        value[:] = 2
        assert np.asarray(variable.value).max() == 1


def test_the_initial_function_is_called_once(strategy):
    calls = []
    v = make(strategy, lambda: calls.append(1) or np.random.default_rng().normal(size=3))
    assert calls == [1]
    first, second = components(strategy, v)
    assert first == second


def test_another_variable_and_distributed_values_as_initial_value(strategy):
    v = make(strategy, make(strategy, [1.0, 2.0]))
    v.assign([3.0, 4.0])
    assert np.asarray(make(strategy, v)).tolist() == [3.0, 4.0]
    assert np.asarray(make(strategy, strategy.replicate(jnp.ones(2)))).tolist() == [1.0, 1.0]
    with pytest.raises(errors.PerReplicaUseError):
        make(strategy, strategy.run(lambda: own()))


@pytest.mark.parametrize("initial", ["text", None, object(), {"a": 1}], ids=["str", "None", "object", "dict"])
def test_invalid_initial_values(strategy, initial):
    with pytest.raises(errors.VariableError, match="'w'") as caught:
        make(strategy, initial, name="w")
    assert type(initial).__name__ in str(caught.value)


def test_attributes(strategy):
    v = make(strategy, name="w", trainable=False, aggregation="sum")
    assert (v.name, v.trainable, v.distribute_strategy) == ("w", False, strategy)
    assert v.aggregation is rx.VariableAggregation.SUM
    assert v.synchronization is rx.VariableSynchronization.ON_WRITE
    assert make(strategy).trainable
    assert strategy.extended.variable_created_in_scope(v)
    assert not strategy.extended.variable_created_in_scope(rx.Variable(1.0))


def test_invalid_combinations(strategy):
    with pytest.raises(errors.VariableError, match=r"`NONE` variable synchronization mode is not supported"):
        make(strategy, synchronization="NONE")
    with pytest.raises(errors.VariableError, match=r"'w'.*aggregation=MEAN and a non-floating dtype int32"):
        make(strategy, 1, name="w", aggregation="MEAN")
    with pytest.raises(errors.InvalidArgumentError, match="'MAX' is not a valid VariableAggregation"):
        make(strategy, aggregation="MAX")
    with pytest.raises(errors.InvalidArgumentError, match="'LATER' is not a valid VariableSynchronization"):
        make(strategy, synchronization="LATER")


def test_made_inside_run_once(strategy):
    made = []

    def step(x):
        if not made:
            made.append(rx.Variable(lambda: np.random.default_rng().normal(size=2), aggregation="SUM"))
        made[0].assign_add(jnp.ones(2) * x)
        return made[0]

    returned = strategy.run(step, (2.0,))
    assert returned is made[0]
    start = np.asarray(made[0]) - 4
    strategy.run(step, (2.0,))
    np.testing.assert_allclose(np.asarray(made[0]), start + 8, rtol=1e-6)
    assert made[0].distribute_strategy is strategy
    first, second = components(strategy, made[0])
    assert first == second


def test_made_inside_run_from_a_traced_value(strategy):
    with pytest.raises(errors.VariableError, match=r"'w'.*traced"):
        strategy.run(lambda x: rx.Variable(x, name="w"), (jnp.ones(2),))


def test_printing(strategy):
    v = make(strategy, [1.0, 2.0], name="w")
    assert repr(v) == "Variable('w', shape=(2,), dtype=float32, value=[1. 2.])"
    assert str(v) == f"{v}" == repr(v)
    hidden = make(strategy, 1.0, name="h", synchronization="ON_READ")
    assert repr(hidden) == "Variable('h', shape=(), dtype=float32, value=<VariableError>)"
    shown = []
    strategy.run(lambda: shown.append(repr(v)))
    assert shown[0].startswith("Variable('w', shape=(2,), dtype=float32, value=")
    assert "float32[2]" in shown[0]


def test_where_values_live(strategy):
    v = make(strategy, [1.0, 2.0])
    for _ in range(2):
        assert v.value.devices() == set(strategy.extended.parameter_devices)
        strategy.run(lambda: v.assign_add(v * 2))
    v.assign(np.zeros(2))
    assert v.value.devices() == set(strategy.extended.parameter_devices)
    rx.function(lambda: v.assign_add(jnp.ones(2)))()
    assert v.value.devices() == set(strategy.extended.parameter_devices)
    assert [c.devices() for c in v.values] == (
        [{d} for d in strategy.extended.worker_devices]
        if len(strategy.extended.parameter_devices) > 1
        else [set(strategy.extended.parameter_devices)] * 2
    )


# --- assigning: ON_WRITE ------------------------------------------------------------------------------
# Two replicas, initial value 1; replica r gives r + 1.

ON_WRITE = {
    ("assign", "SUM"): 3.0,
    ("assign", "MEAN"): 1.5,
    ("assign", "ONLY_FIRST_REPLICA"): 1.0,
    ("assign_add", "SUM"): 4.0,
    ("assign_add", "MEAN"): 2.5,
    ("assign_add", "ONLY_FIRST_REPLICA"): 2.0,
    ("assign_sub", "SUM"): -2.0,
    ("assign_sub", "MEAN"): -0.5,
    ("assign_sub", "ONLY_FIRST_REPLICA"): 0.0,
}


@pytest.mark.parametrize(("method", "aggregation"), ON_WRITE)
@pytest.mark.parametrize("as_function", [False, True])
def test_on_write_in_replicas(strategy, method, aggregation, as_function):
    v = make(strategy, aggregation=aggregation)

    def step():
        return getattr(v, method)(own())

    result = rx.function(lambda: strategy.run(step))() if as_function else strategy.run(step)
    expected = ON_WRITE[method, aggregation]
    assert components(strategy, v) == [expected, expected]
    assert components(strategy, result) == [expected, expected]  # an assignment returns the new value
    assert float(v.value) == expected


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_on_write_none_in_replicas(strategy, method):
    v = make(strategy, name="w")
    with pytest.raises(errors.DivergenceError, match="'w'"):
        strategy.run(lambda: getattr(v, method)(own()))
    assert components(strategy, v) == [1.0, 1.0]
    expected = {"assign": 2.0, "assign_add": 3.0, "assign_sub": -1.0}[method]
    strategy.run(lambda: getattr(v, method)(2.0))  # the same on all: proven
    assert components(strategy, v) == [expected, expected]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("SUM", 5.0), ("MEAN", 3.0), ("ONLY_FIRST_REPLICA", 3.0)]
)
@pytest.mark.parametrize(
    "value", [2.0, 2, np.float32(2), jnp.float32(2)], ids=["float", "int", "numpy", "jax"]
)
def test_a_literal_is_what_every_replica_contributes(strategy, aggregation, expected, value):
    v = make(strategy, aggregation=aggregation)
    strategy.run(lambda: v.assign_add(value))
    assert components(strategy, v) == [expected, expected]


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("where", ["outside", "scope", "function", "update"])
def test_on_write_in_cross_replica_code_is_not_aggregated(strategy, aggregation, where):
    v = make(strategy, aggregation=aggregation)

    def change():
        v.assign_add(2.0)
        v.assign_sub(0.5)

    if where == "outside":
        assert v.assign_add(2.0) is v
        v.assign_sub(0.5)
    elif where == "scope":
        with strategy.scope():
            change()
    elif where == "function":
        rx.function(change)()
    else:
        strategy.extended.update(v, lambda v: change())
    assert components(strategy, v) == [2.5, 2.5]


def test_an_array_made_while_tracing_is_what_every_replica_contributes(strategy):
    v = make(strategy, aggregation="SUM")
    constant = {"two": jnp.float32(2), "name": "x"}  # not arrays alone, so it is no input of the program
    strategy.run(lambda: v.assign_add(constant["two"]))
    rx.function(lambda: v.assign_add(constant["two"]))()
    assert components(strategy, v) == [7.0, 7.0]


def test_assigning_several_times_in_one_step(strategy):
    v = make(strategy, 0.0, aggregation="SUM")

    def step():
        v.assign_add(own())
        after = v + 0.0
        v.assign(v * own() / 3)
        return after

    after = strategy.run(step)
    assert components(strategy, after) == [3.0, 3.0]
    assert components(strategy, v) == [3.0, 3.0]  # 3 * 1/3 + 3 * 2/3


def test_bool_and_integer_variables(strategy):
    flag = make(strategy, False, aggregation="ONLY_FIRST_REPLICA")
    strategy.run(lambda: flag.assign(own(0) == 0))
    assert components(strategy, flag) == [True, True]
    count = make(strategy, 0, aggregation="SUM")
    strategy.run(lambda: count.assign_add(own(1)))
    assert components(strategy, count) == [3, 3]
    assert count.value.dtype == jnp.int32


def test_per_replica_value_outside_run(strategy):
    for kwargs in ({}, {"aggregation": "SUM"}, {"synchronization": "ON_READ", "aggregation": "SUM"}):
        v = make(strategy, name="w", **kwargs)
        before = components(strategy, v)
        values = strategy.run(lambda: own())
        for method in ("assign", "assign_add", "assign_sub"):
            with pytest.raises(errors.VariableError, match=r"'w'.*PerReplica.*2 components.*Reduce it first"):
                getattr(v, method)(values)
        assert components(strategy, v) == before
    v = make(strategy)
    v.assign(strategy.run(lambda: jnp.float32(7)))  # proven to be the same
    v.assign_add(strategy.replicate(jnp.float32(1)))
    assert components(strategy, v) == [8.0, 8.0]


# --- assigning and reading: ON_READ -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "initial", "assigned"),
    [("SUM", 2.0, 3.0), ("MEAN", 1.0, 1.5), ("ONLY_FIRST_REPLICA", 1.0, 1.0)],
)
@pytest.mark.parametrize("where", ["outside", "scope", "function", "merge_call"])
def test_on_read_is_aggregated_when_read(strategy, aggregation, initial, assigned, where):
    v = make(strategy, synchronization="ON_READ", aggregation=aggregation)

    def read():
        if where == "outside":
            return v.value, v + 0, np.asarray(v), jnp.asarray(v), v.read_value(), v.numpy()
        if where == "scope":
            with strategy.scope():
                return v.value, v + 0
        if where == "function":
            return rx.function(lambda: (v.value, v + 0))()
        merged = strategy.run(lambda: rx.get_replica_context().merge_call(lambda strategy: (v.value, v + 0)))
        return [component for each in merged for component in each.values]

    assert [float(x) for x in read()] == [initial] * len(read())
    result = strategy.run(lambda: v.assign(own()))
    assert components(strategy, result) == [1.0, 2.0]
    assert components(strategy, v) == [1.0, 2.0]
    assert [float(x) for x in read()] == [assigned] * len(read())
    inside = strategy.run(lambda: (v.value, v * 1))
    assert [components(strategy, x) for x in inside] == [[1.0, 2.0]] * 2  # a replica reads its own


def test_on_read_none_has_no_value_outside(strategy):
    v = make(strategy, name="w", synchronization="ON_READ")
    strategy.run(lambda: v.assign_add(own()))
    assert components(strategy, v) == [2.0, 3.0]
    for use in (lambda: v.value, lambda: v + 1, lambda: float(v), lambda: np.asarray(v), lambda: jnp.sum(v)):
        with pytest.raises(
            errors.VariableError, match=r"`tf.VariableAggregation`.*NONE.*'w'.*experimental_local"
        ):
            use()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("SUM", [3.0, 3.0]), ("MEAN", [6.0, 6.0]), ("ONLY_FIRST_REPLICA", [6.0, 6.0]), ("NONE", [6.0, 6.0])],
)
@pytest.mark.parametrize("as_function", [False, True])
def test_on_read_assigned_in_cross_replica_code(strategy, aggregation, expected, as_function):
    v = make(strategy, synchronization="ON_READ", aggregation=aggregation)
    strategy.run(lambda: v.assign(own()))
    rx.function(lambda: v.assign(6.0))() if as_function else v.assign(6.0)
    assert components(strategy, v) == expected
    if aggregation != "NONE":
        assert float(v.value) == 6.0


@pytest.mark.parametrize("aggregation", ["MEAN", "ONLY_FIRST_REPLICA", "NONE"])
def test_on_read_added_to_in_cross_replica_code(strategy, aggregation):
    v = make(strategy, synchronization="ON_READ", aggregation=aggregation)
    strategy.run(lambda: v.assign(own()))
    v.assign_add(6.0)
    v.assign_sub(1.0)
    assert components(strategy, v) == [6.0, 7.0]


@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
def test_on_read_sum_added_to_in_cross_replica_code(strategy, method):
    v = make(strategy, name="w", synchronization="ON_READ", aggregation="SUM")
    with pytest.raises(errors.VariableError) as caught:
        getattr(v, method)(1.0)
    assert f"SyncOnReadVariable does not support `{method}` in cross-replica context" in str(caught.value)
    assert "'w'" in str(caught.value)
    assert float(v.value) == 2.0


def test_on_read_integers(strategy):
    v = make(strategy, 0, synchronization="ON_READ", aggregation="SUM")
    v.assign(5)
    assert components(strategy, v) == [2, 2]  # as TensorFlow: the cast to integers loses one
    strategy.run(lambda: v.assign_add(own(1)))
    assert int(v.value) == 7


def test_on_read_with_one_replica_is_plain():
    one = rx.OneDeviceStrategy("cpu:1")
    v = make(one, 1.0, synchronization="ON_READ")
    assert float(v.value) == 1.0
    v.assign_add(2.0)
    one.run(lambda: v.assign_add(1.0))
    assert float(v.value) == 4.0


def test_reduce_of_variables(strategy):
    v = make(strategy, 2.0)
    on_read = make(strategy, 1.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: on_read.assign(own()))
    assert float(strategy.reduce("MEAN", v, axis=None)) == 2.0
    assert float(strategy.reduce("SUM", on_read, axis=None)) == 3.0
    assert float(strategy.reduce("MEAN", on_read, axis=None)) == 1.5


# --- errors of assignment -----------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"synchronization": "ON_READ", "aggregation": "MEAN"}])
def test_shapes_cannot_change(strategy, inside, kwargs):
    v = make(strategy, [1.0, 2.0], name="w", **kwargs)
    call = (lambda fn: strategy.run(fn)) if inside else (lambda fn: fn())
    for wrong in (3.0, jnp.ones(3), jnp.ones((1, 2))):
        with pytest.raises(errors.VariableError, match=r"'w'.*\(2,\)"):
            call(lambda wrong=wrong: v.assign(wrong))
    with pytest.raises(errors.VariableError, match=r"assign_add of variable 'w'.*\(2, 2\)"):
        call(lambda: v.assign_add(jnp.ones((2, 2))))
    with pytest.raises(errors.VariableError, match=r"assign_add of variable 'w'.*\(3,\)"):
        call(lambda: v.assign_add(jnp.ones(3)))
    call(lambda: v.assign_add(1.0))  # broadcasts, as TensorFlow
    assert np.asarray(v).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("inside", [False, True])
def test_dtypes(strategy, inside):
    call = (lambda fn: strategy.run(fn)) if inside else (lambda fn: fn())
    whole = make(strategy, 1, name="w")
    with pytest.raises(errors.VariableError, match=r"'w', whose dtype is int32, got float32.*value.astype"):
        call(lambda: whole.assign(jnp.float32(1.5)))
    with pytest.raises(errors.VariableError, match="fraction would be lost"):
        call(lambda: whole.assign_add(0.5))
    half = make(strategy, np.float16(1))
    call(lambda: half.assign_add(jnp.float32(2)))
    call(lambda: half.assign_add(1))
    assert half.value.dtype == jnp.float16
    assert float(half.value) == 4.0


def test_values_from_other_devices(strategy):
    far = jax.device_put(jnp.float32(2), jax.devices()[7])
    v = make(strategy)
    v.assign_add(far)
    v.assign_sub(jax.device_put(1.0, jax.devices()[2]))
    v.assign_add(strategy.reduce("SUM", strategy.run(lambda: own(0.0)), axis=None))
    rows = make(strategy, [1.0, 2.0, 3.0])
    rows.scatter_add(rx.IndexedSlices(far[None], jax.device_put(jnp.array([1]), jax.devices()[6])))
    on_read = make(strategy, synchronization="ON_READ", aggregation="MEAN")
    on_read.assign_add(far)
    assert (float(v.value), float(on_read.value)) == (3.0, 3.0)
    assert np.asarray(rows).tolist() == [1.0, 4.0, 3.0]
    assert v.value.devices() == set(strategy.extended.parameter_devices)


def test_reduced_values_can_be_computed_with_variables(strategy):
    v = make(strategy, 1.0)
    values = strategy.run(lambda: own(0.0))
    total = strategy.reduce("SUM", values, axis=None)
    rows = strategy.gather(strategy.run(lambda x: x[None], (values,)), axis=0)
    assert float(v.value + total) == 2.0
    assert (v * rows + total).tolist() == [1.0, 2.0]


def test_invalid_values(strategy):
    v = make(strategy)
    for wrong in ("text", None, object()):
        with pytest.raises(
            errors.VariableError, match=f"must be an array or a number.*got {type(wrong).__name__}"
        ):
            v.assign(wrong)
    assert float(v.value) == 1.0


# --- scatter ------------------------------------------------------------------------------------------


def slices(values, indices):
    return rx.IndexedSlices(jnp.asarray(values, jnp.float32), jnp.asarray(indices), (3,))


SCATTER = {
    "scatter_add": [1.0, 7.0, 4.0],
    "scatter_sub": [1.0, -3.0, 4.0],
    "scatter_mul": [1.0, 10.0, 4.0],
    "scatter_div": [1.0, 0.4, 4.0],
    "scatter_min": [1.0, 2.0, 4.0],
    "scatter_max": [1.0, 5.0, 4.0],
    "scatter_update": [1.0, 5.0, 4.0],
}


@pytest.mark.parametrize("method", SCATTER)
@pytest.mark.parametrize("where", ["outside", "function", "run"])
def test_scatter_with_the_same_rows_everywhere(strategy, method, where):
    v = make(strategy, [1.0, 2.0, 4.0])

    def call():
        return getattr(v, method)(slices([5.0], [1]))

    if where == "outside":
        assert call() is v
    elif where == "function":
        rx.function(lambda: call())()
    else:
        strategy.run(call)
    np.testing.assert_allclose(components(strategy, v), [SCATTER[method]] * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("SUM", [2.0, 2.0, 0.0]), ("MEAN", [1.0, 1.0, 0.0]), ("ONLY_FIRST_REPLICA", [2.0, 0.0, 0.0])],
)
def test_scatter_add_of_different_rows(strategy, aggregation, expected):
    v = make(strategy, [0.0, 0.0, 0.0], aggregation=aggregation)
    strategy.run(lambda: v.scatter_add(slices([2.0], own(0)[None])))
    assert components(strategy, v) == [expected, expected]
    v.assign(jnp.zeros(3))
    strategy.run(lambda: v.scatter_sub(slices([2.0], own(0)[None])))
    assert components(strategy, v) == [[-x for x in expected]] * 2


def test_scatter_of_one_row_by_all_replicas(strategy):
    v = make(strategy, [0.0, 0.0, 0.0], aggregation="SUM")
    strategy.run(lambda: v.scatter_add(slices([1.0, 10.0], [2, 2])))
    assert components(strategy, v) == [[0.0, 0.0, 22.0]] * 2


def test_scatter_max_only_first(strategy):
    v = make(strategy, [0.0, 0.0, 0.0], aggregation="ONLY_FIRST_REPLICA")
    strategy.run(lambda: v.scatter_max(slices(own(1.0)[None], own(0)[None])))
    assert components(strategy, v) == [[1.0, 0.0, 0.0]] * 2


def test_scatter_none_of_different_rows_would_diverge(strategy):
    v = make(strategy, [0.0, 0.0, 0.0], name="w")
    with pytest.raises(errors.DivergenceError, match="'w'"):
        strategy.run(lambda: v.scatter_add(slices([1.0], own(0)[None])))


@pytest.mark.parametrize("method", ["scatter_min", "scatter_max", "scatter_update"])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_scatter_that_cannot_be_aggregated(strategy, method, aggregation):
    v = make(strategy, [0.0, 0.0, 0.0], aggregation=aggregation)
    with pytest.raises(
        NotImplementedError, match=f"{method} is only supported for mirrored variable"
    ) as caught:
        strategy.run(lambda: getattr(v, method)(slices([1.0], [0])))
    assert "NONE or `ONLY_FIRST_REPLICA` aggregation, got: " in str(caught.value)
    assert aggregation in str(caught.value)


@pytest.mark.parametrize("method", SCATTER)
def test_scatter_of_on_read_variables(strategy, method):
    v = make(strategy, [0.0, 0.0, 0.0], name="w", synchronization="ON_READ", aggregation="SUM")
    for call in (lambda fn: fn(), strategy.run):
        with pytest.raises(
            NotImplementedError, match=f"{method} is not supported for variable 'w': it is ON_READ"
        ):
            call(lambda: getattr(v, method)(slices([1.0], [0])))


def test_scatter_takes_indexed_slices(strategy):
    v = make(strategy, [0.0])
    with pytest.raises(
        errors.VariableError, match=r"scatter_add takes rx.IndexedSlices\(values, indices\), got tuple"
    ):
        v.scatter_add((1.0, 0))


# --- as arrays ----------------------------------------------------------------------------------------

EXPRESSIONS = {
    "add": lambda v: v + 1,
    "radd": lambda v: 1 + v,
    "sub": lambda v: 1.0 - v,
    "mul": lambda v: v * v,
    "div": lambda v: 2 / v,
    "floordiv": lambda v: v // 2,
    "mod": lambda v: v % 2,
    "pow": lambda v: v**2,
    "rpow": lambda v: 2**v,
    "neg": lambda v: -v,
    "abs": lambda v: abs(-v),
    "matmul": lambda v: v @ v,
    "less": lambda v: v < 2,
    "equal": lambda v: v == 2,
    "not equal": lambda v: v != 2,
    "index": lambda v: v[1],
    "slice": lambda v: v[:2],
    "jnp": lambda v: jnp.sum(jnp.sqrt(v)),
    "where": lambda v: jnp.where(v > 1, v, 0),
    "stack": lambda v: jnp.stack([v, v * 2]),
    "numpy operand": lambda v: np.ones(3, np.float32) + v,
    "grad": lambda v: jax.grad(lambda x: jnp.sum(x * v))(jnp.ones(3)),
    "jit": lambda v: jax.jit(lambda x: x * 2)(v),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_variable_acts_as_its_array(name):
    strategy = STRATEGIES["mirrored"]()
    expression, array = EXPRESSIONS[name], jnp.array([1.0, 2.0, 3.0])
    v = make(strategy, array)
    expected = np.asarray(expression(array))
    with strategy.scope():
        in_scope = expression(v)
    for result in (expression(v), in_scope, rx.function(lambda: expression(v))()):
        np.testing.assert_allclose(np.asarray(result), expected)
        assert np.asarray(result).dtype == expected.dtype
    for component in strategy.experimental_local_results(strategy.run(lambda: expression(v))):
        np.testing.assert_allclose(np.asarray(component), expected)


def test_conversions(strategy):
    v = make(strategy, 3)
    assert int(v) == 3
    assert float(v) == 3.0
    assert bool(v)
    assert list(range(5))[v] == 3
    assert f"{make(strategy, 1.5):.2f}" == "1.50"
    w = make(strategy, [1.0, 2.0])
    assert len(w) == 2
    assert [float(x) for x in w] == [1.0, 2.0]
    copied = w.numpy()
    copied[0] = 9
    assert np.asarray(w).tolist() == [1.0, 2.0]
    assert {w: 1}[w] == 1  # hashable by identity
    assert np.asarray(w, np.float64).dtype == np.float64


def test_augmented_assignment_of_a_name_raises(strategy):
    v = w = make(strategy, 1.0)
    w += 1.0
    assert float(w) == 2.0
    assert float(v.value) == 1.0


def test_a_variable_as_an_argument_of_run_is_passed_itself(strategy):
    v = make(strategy, 1.0, aggregation="SUM")

    def step(given, nested):
        assert given is v
        assert nested["v"][0] is v
        given.assign_add(1.0)
        return given

    assert strategy.run(step, (v, {"v": [v]})) is v
    assert components(strategy, v) == [3.0, 3.0]


def test_variables_in_pytrees_of_local_results(strategy):
    on_read = make(strategy, 0.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: on_read.assign(own()))
    first, second = strategy.experimental_local_results({"v": on_read, "n": 5})
    assert (float(first["v"]), first["n"], float(second["v"])) == (1.0, 5, 2.0)
