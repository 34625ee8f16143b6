"""``RunOptions(eager=True)``: real values in the calling thread, and the results of the compiled step."""

import gc
import io
import logging
import pdb
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.lowering import eager
from replicax._src.vocabulary import errors as rx_errors

EAGER = rx.RunOptions(eager=True)


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def per_replica(strategy, *components):
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.asarray(components[c.replica_id_in_sync_group])
    )


def numbers(strategy):
    """Two rows for each of two replicas."""
    return per_replica(strategy, np.float32([1.0, 2.0]), np.float32([3.0, -4.0]))


def plain(pytree):
    """The values of a pytree whose leaves have one component each, on the host."""

    def of_leaf(leaf):
        if isinstance(leaf, rx.DistributedValues):
            (leaf,) = leaf.values
        return np.asarray(leaf) if hasattr(leaf, "dtype") else leaf

    return jax.tree_util.tree_map(of_leaf, pytree, is_leaf=lambda x: isinstance(x, rx.DistributedValues))


def assert_alike(a, b):
    """Two pytrees have the same structure, and equal values up to rounding."""
    (left, tree), (right, other) = map(jax.tree_util.tree_flatten, (plain(a), plain(b)))
    assert tree == other
    for x, y in zip(left, right, strict=True):
        assert type(x) is type(y)
        if not isinstance(x, np.ndarray):
            assert x == y
            continue
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def as_one_device(strategy, fn, x):
    """The result of ``fn(x, v)`` in an eager run. It equals the computation of one device on the rows of all replicas."""
    one = rx.OneDeviceStrategy("cpu:0")
    results = []
    for each, value, options in ((strategy, x, EAGER), (one, strategy.gather(x, axis=0), None)):
        with each.scope():
            v = rx.Variable(0.5)
        results.append((each.run(lambda x, v=v: fn(x, v), args=(value,), options=options), v.value))
    assert_alike(*results)
    return plain(results[0][0])


# --- real values --------------------------------------------------------------------------------------


def test_eager_run_calls_the_function_once_on_the_rows_of_all_replicas(strategy, capsys):
    threads = []

    def fn(x):
        threads.append(threading.current_thread())
        print("rows", x.tolist())
        return x

    strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert capsys.readouterr().out == "rows [1.0, 2.0, 3.0, -4.0]\n"
    assert threads == [threading.current_thread()]


def test_python_if_works_on_values(strategy):
    def fn(x):
        if rx.get_replica_context().replica_id_in_sync_group == 0 and float(jnp.sum(x)) > 1:
            return x * 2
        return x

    result = strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert plain(result).tolist() == [2, 4, 6, -8]


def test_pdb_works(strategy, monkeypatch):
    output = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("p float(y[2])\ncontinue\n"), stdout=output, nosigint=True)
    debugger.prompt, debugger.use_rawinput = "", False
    monkeypatch.setattr(sys, "breakpointhook", lambda: debugger.set_trace(sys._getframe(1)))

    def fn(x):
        y = x + 0.5
        breakpoint()
        return y

    strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert output.getvalue().endswith("3.5\n")


def test_one_replica_returns_plain_arrays():
    strategy = rx.OneDeviceStrategy("cpu:0")

    def fn(x):
        replica = rx.get_replica_context()
        return replica.all_reduce("MEAN", x), replica.all_gather(x, 0), "kept"

    result = strategy.run(fn, args=(jnp.float32([1, 2]),), options=EAGER)
    assert isinstance(result[0], jax.Array)
    assert_alike(result, strategy.run(fn, args=(jnp.float32([1, 2]),)))


def test_the_default_strategy_runs_eagerly():
    result = rx.get_strategy().run(lambda x: x + 1 if x > 0 else x, args=(jnp.float32(1),), options=EAGER)
    assert float(result) == 2


def test_first_use_logs_what_belongs_to_one_replica(strategy, caplog):
    eager._say_what_differs.cache_clear()
    with caplog.at_level(logging.WARNING, logger="replicax"):
        rx.OneDeviceStrategy("cpu:0").run(lambda: None, options=EAGER)
        assert caplog.records == []  # of one replica nothing differs
        for _ in range(2):
            strategy.run(lambda: None, options=EAGER)
    (record,) = caplog.records
    assert "random numbers" in record.getMessage()


# --- arguments: the rows of all replicas are one batch --------------------------------------------------


def seen(strategy, *components):
    """The argument that the function gets for a per-replica value."""
    got = []
    strategy.run(got.append, args=(per_replica(strategy, *components),), options=EAGER)
    return got[0]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 0), (0, 0)])
def test_components_with_any_number_of_rows_are_concatenated(strategy, sizes):
    parts = [np.full((size, 3), 10 * r, np.float32) + np.arange(3) for r, size in enumerate(sizes)]
    np.testing.assert_array_equal(seen(strategy, *parts), np.concatenate(parts))


def test_equal_scalars_are_passed_as_they_are(strategy):
    assert (seen(strategy, 7, 7).shape, int(seen(strategy, 7, 7))) == ((), 7)


@pytest.mark.parametrize(
    "components", [(1.0, 2.0), (np.zeros((1, 2)), np.zeros((1, 3)))], ids=["scalars", "widths"]
)
def test_components_that_are_not_rows_of_one_batch_raise(strategy, components):
    with pytest.raises(rx_errors.UnsupportedError, match="shapes"):
        seen(strategy, *components)


def test_random_keys_are_those_of_the_first_replica(strategy):
    keys = strategy.experimental_distribute_values_from_function(
        lambda c: jax.random.fold_in(jax.random.key(3), c.replica_id_in_sync_group)
    )
    result = strategy.run(lambda key: jax.random.normal(key, (2,)), args=(keys,), options=EAGER)
    np.testing.assert_array_equal(
        plain(result), jax.random.normal(jax.random.fold_in(jax.random.key(3), 0), (2,))
    )


def test_values_that_all_replicas_have_are_passed_once(strategy):
    mirrored = strategy.replicate(np.float32([5, 6]))
    equal = strategy.run(lambda x: rx.get_replica_context().all_reduce("SUM", x), args=(numbers(strategy),))
    assert equal.is_equal
    result = strategy.run(lambda a, b: (a, b), args=(mirrored, equal), options=EAGER)
    assert [value.tolist() for value in plain(result)] == [[5, 6], [4, -2]]


def test_values_of_another_strategy(strategy):
    other = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with pytest.raises(rx_errors.MixedStrategiesError):
        strategy.run(lambda x: x, args=(per_replica(other, 1.0, 2.0, 3.0),), options=EAGER)


def test_arrays_bound_to_devices_mix(strategy):
    far = jax.device_put(jnp.float32(1), jax.devices()[5])
    mirrored = strategy.replicate({"w": jnp.float32(5)})
    everywhere = {"spread": strategy.reduce("SUM", numbers(strategy), axis=0)}

    def fn(state, host, x):
        return state["w"] * host + far + x + [everywhere][0]["spread"]

    result = strategy.run(fn, args=(mirrored, np.float32(2), numbers(strategy)), options=EAGER)
    assert plain(result).tolist() == [14, 15, 16, 9]


def test_arguments_are_copies(strategy):
    x = numbers(strategy)
    strategy.run(lambda x: x + 1, args=(x,), options=EAGER)
    strategy.run(lambda x: x + 1, args=(x,), options=rx.RunOptions(donate_args=(0,)))


def test_state_goes_through_several_eager_runs(strategy):
    state = strategy.replicate({"w": np.float32(1)})
    for _ in range(2):
        state = strategy.run(
            lambda s, x: {"w": s["w"] + rx.get_replica_context().all_reduce("SUM", jnp.sum(x))},
            args=(state, numbers(strategy)),
            options=EAGER,
        )
    assert float(state["w"]) == 5
    with pytest.raises(rx_errors.MixedStrategiesError, match="replicate"):
        strategy.run(lambda s: s, args=(state,))
    again = strategy.run(lambda s: s["w"], args=(strategy.replicate(state),))
    assert [float(value) for value in again.values] == [5, 5]


# --- what comes back ----------------------------------------------------------------------------------


def test_results(strategy):
    marker = object()
    result = strategy.run(
        lambda x: {"same": marker, "none": None, "text": "a", "number": 1, "array": x},
        args=(numbers(strategy),),
        options=EAGER,
    )
    array = result.pop("array")
    assert result == {"same": marker, "none": None, "text": "a", "number": 1}
    assert isinstance(array, rx.PerReplica)
    assert array.values[0].shape == (4,)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 0)])
def test_reducing_a_result_gives_the_number_of_the_compiled_step(strategy, sizes):
    rng = np.random.default_rng(0)
    x = per_replica(strategy, *(rng.normal(size=n).astype(np.float32) for n in sizes))

    def fn(x):
        return rx.nn.compute_average_loss(x**2), jnp.sum(x), x

    def reduced(options):
        loss, total, rows = strategy.run(fn, args=(x,), options=options)
        mean, largest = (strategy.reduce("MEAN", rows, axis=0), strategy.gather(rows, axis=0))
        return strategy.reduce("SUM", (loss, total), axis=None), mean, largest

    assert_alike(reduced(EAGER), reduced(None))


def test_mean_of_a_replicated_value_is_the_value(strategy):
    def fn(x):
        return rx.get_replica_context().all_reduce("SUM", jnp.sum(x))

    for options in (EAGER, None):
        result = strategy.run(fn, args=(numbers(strategy),), options=options)
        assert float(strategy.reduce("MEAN", result, axis=None)) == 2
        assert float(strategy.unreplicate(result)) == 2


def test_local_results_have_one_component(strategy):
    result = strategy.run(lambda x: {"x": x, "n": 1}, args=(numbers(strategy),), options=EAGER)
    (pytree,) = strategy.experimental_local_results(result)
    assert (pytree["x"].tolist(), pytree["n"]) == ([1, 2, 3, -4], 1)
    assert len(strategy.experimental_local_results(result["x"])) == 1


# --- one replica --------------------------------------------------------------------------------------


def test_there_is_one_replica_inside(strategy):
    def fn(x):
        replica = rx.get_replica_context()
        assert (replica.num_replicas_in_sync, strategy.num_replicas_in_sync) == (1, 1)
        return replica.replica_id_in_sync_group, jnp.sum(x) / replica.num_replicas_in_sync

    index, total = strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert (int(index), float(total)) == (0, 2)
    assert strategy.num_replicas_in_sync == 2


def test_collectives(strategy):
    def fn(x, v):
        replica = rx.get_replica_context()
        slices = rx.IndexedSlices(x[None], jnp.asarray([replica.replica_id_in_sync_group]), (2, 4))
        return (
            replica.all_reduce("SUM", {"a": x, "b": [x * 2, jnp.int32(3)]}),
            replica.all_reduce(rx.ReduceOp.MEAN, x.astype(jnp.int32)),
            replica.all_reduce("SUM", slices).to_dense(),
            replica.all_gather(x[:, None], 1),
            replica.all_gather(x, 0),
            jax.jit(lambda x: replica.all_reduce("SUM", x))(x),
            rx.nn.scale_regularization_loss(v),
        )

    as_one_device(strategy, fn, numbers(strategy))


def test_sums_over_all_rows_are_those_of_the_compiled_step(strategy):
    def fn(x):
        replica = rx.get_replica_context()
        return (
            replica.all_reduce("SUM", jnp.sum(x)),
            replica.all_reduce("MEAN", jnp.mean(x)),
            replica.all_gather(x, 0),
            replica.all_reduce("SUM", rx.nn.compute_average_loss(x)),
            replica.all_reduce("SUM", rx.nn.scale_regularization_loss(jnp.float32(6))),
        )

    eager, compiled = (strategy.run(fn, args=(numbers(strategy),), options=o) for o in (EAGER, None))
    assert_alike(strategy.unreplicate(eager), strategy.unreplicate(compiled))


def test_merge_call(strategy):
    def merge(strategy, x, v):
        assert rx.get_replica_context() is None
        total = strategy.reduce("SUM", x, axis=None)
        v.assign(jnp.sum(total))
        return total, strategy.gather(x, 0), x, strategy.experimental_local_results(x)

    as_one_device(
        strategy, lambda x, v: rx.get_replica_context().merge_call(merge, args=(x, v)), numbers(strategy)
    )


def test_a_users_cross_device_ops():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=rx.ReductionToOneDevice())
    result = strategy.run(
        lambda x: rx.get_replica_context().all_reduce("SUM", x), args=(numbers(strategy),), options=EAGER
    )
    assert strategy.reduce("SUM", result, axis=0) == 2


@pytest.mark.parametrize("is_jitted", [False, True])
def test_collectives_of_jax_itself(strategy, is_jitted):
    def fn(x):
        total = lambda x: jax.lax.psum(x, "replica")  # noqa: E731
        return (jax.jit(total) if is_jitted else total)(x)

    with pytest.raises(rx_errors.UnsupportedError, match="all_reduce"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


# --- tapes --------------------------------------------------------------------------------------------


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


@jax.custom_jvp
def tripled_gradient(x):
    return x * x


tripled_gradient.defjvp(
    lambda primals, tangents: (tripled_gradient(*primals), 3 * 2 * primals[0] * tangents[0])
)


def tape_simple(x, v):
    with rx.GradientTape() as tape:
        y = jnp.sum(jnp.where(x > 0, x, 0.1 * x) * v.value) ** 2
    return tape.gradient(y, [v])


def tape_all_reduce(x, v):
    replica = rx.get_replica_context()
    with rx.GradientTape() as tape:
        tape.watch(x)
        y = replica.all_reduce("SUM", x * (replica.replica_id_in_sync_group + 1)) * v.value
    return tape.gradient(y, [x, v])


def tape_all_gather(x, v):
    replica = rx.get_replica_context()
    with rx.GradientTape() as tape:
        tape.watch(x)
        y = replica.all_gather(x * v.value, 0) * jnp.arange(4.0)
    return tape.gradient(y, [x, v])


def tape_nested(x, v):
    with rx.GradientTape() as outer:
        outer.watch(x)
        with rx.GradientTape() as inner:
            inner.watch(x)
            y = jnp.sum(jnp.sin(x) * x * v.value)
        first = inner.gradient(y, x)
        penalty = jnp.sum(first**2)
    return first, outer.gradient(penalty, [x, v])


def tape_nested_through_a_collective(x, v):
    replica = rx.get_replica_context()
    with rx.GradientTape() as outer:
        with rx.GradientTape() as inner:
            inner.watch(x)
            y = jnp.sum(replica.all_reduce("SUM", x**2 * v.value) ** 2)
        penalty = jnp.sum(inner.gradient(y, x) ** 2)
    return outer.gradient(penalty, v)


def tape_custom(x, v):
    with rx.GradientTape() as tape:
        tape.watch(x)
        y = jnp.sum(doubled_gradient(x) * tripled_gradient(x) + jax.nn.softplus(x) + jax.nn.relu(x)) * v.value
    return tape.gradient(y, [x, v])


def tape_scan(x, v):
    with rx.GradientTape() as tape:
        tape.watch(x)
        w = v.value * 2  # closed over by the scan's body
        y, rows = jax.lax.scan(lambda carry, row: (jnp.tanh(carry * w + row) * v.value, carry), 0.5, x)
    return tape.gradient(y + jnp.sum(rows), [x, v])


def tape_jit(x, v):
    with rx.GradientTape() as tape:
        tape.watch(x)
        w = jnp.sin(v.value)
        inner = jax.jit(lambda x: x * w)
        y = jnp.sum(jax.jit(lambda x: inner(x) * v.value + jnp.sum(w * x))(x))
    return tape.gradient(y, [x, v])


@jax.jit
def jitted_reader(x):
    return x * KEPT[0].value


KEPT = []


def tape_jit_that_reads_a_variable(x, v):
    KEPT[:] = [v]
    with rx.GradientTape() as tape:
        y = jnp.sum(jitted_reader(x) ** 2)
    return y, tape.gradient(y, v)


def tape_no_derivative_before_stop_gradient(x, v):
    with rx.GradientTape() as tape:
        tape.watch(x)
        bound = jax.lax.while_loop(lambda n: n < 10.0, lambda n: n * 2, jax.lax.stop_gradient(v.value))
        y = jnp.sum(x) * v.value * bound
    return tape.gradient(y, [x, v])


def tape_cond_and_checkpoint(x, v):
    with rx.GradientTape() as tape:
        tape.watch(x)
        w = v.value
        y = jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.sum(x * w), lambda x: jnp.sum(jnp.cos(x)), x)
        y = y + jax.checkpoint(lambda x: jnp.sum(jnp.sin(x) * w))(x)
    return tape.gradient(y, [x, v])


def tape_while_off_the_path(x, v):
    with rx.GradientTape() as tape:
        count = jax.lax.while_loop(lambda n: n < jnp.max(x) + 10, lambda n: n * 2, v.value * 0 + 1.0)
        y = jnp.sum(x) * v.value * jax.lax.stop_gradient(count)
    return tape.gradient(y, v)


def tape_stop_gradient(x, v):
    with rx.GradientTape() as tape:
        tape.watch(x)
        y = jnp.sum(x * jax.lax.stop_gradient(x)) * jax.lax.stop_gradient(v.value)
    return tape.gradient(y, [x, v])


def tape_intermediate(x, v):
    with rx.GradientTape() as tape:
        tape.watch(x)
        middle = x * v.value
        y = jnp.sum(middle * middle * x)
    return tape.gradient(y, [middle, x, v])


def tape_watched_late(x, v):
    with rx.GradientTape() as tape:
        y = x * x
        tape.watch(x)
        y = jnp.sum(y * x)
    return tape.gradient(y, x)


def tape_not_watched(x, v):
    with rx.GradientTape(watch_accessed_variables=False) as tape:
        y = jnp.sum(x * x * v.value)
    return tape.gradient(y, [x, v]), tape._was_used


def tape_unconnected(x, v):
    with rx.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = jnp.sum(v.value**2)
    return tape.gradient(y, [x, v]), tape.gradient(y, [x, v], unconnected_gradients="zero")


def tape_seeds_and_several_targets(x, v):
    with rx.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, z = x**2 * v.value, jnp.sum(x**3)
    return tape.gradient([y, z], [x, v]), tape.gradient(y, [x, v], output_gradients=jnp.arange(4.0))


def tape_paused(x, v):
    with rx.GradientTape() as tape:
        tape.watch(x)
        y = x * x
        with tape.stop_recording():
            factor = jnp.sum(x * v.value)
        y = jnp.sum(y * factor)
    return tape.gradient(y, [x, v])


def tape_assignment_between(x, v):
    with rx.GradientTape() as tape:
        y = v.value * jnp.sum(jnp.ones_like(x))
        v.assign(v.value * 3)
        y = y * v.value
    result = tape.gradient(y, v)
    v.assign(0.5)
    return result


def tape_in_a_scan(x, v):
    def body(carry, row):
        with rx.GradientTape() as tape:
            tape.watch(row)
            y = jnp.sin(row) * v.value * carry
        slope, by_variable = tape.gradient(y, [row, v])
        return carry + slope, by_variable

    return jax.lax.scan(body, 1.0, x)


def tape_in_a_jit(x, v):
    @jax.jit
    def slope(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = jnp.sum(jnp.sin(x) * v.value)
        return tape.gradient(y, [x, v])

    return slope(x)


def grad_of_jax(x, v):
    replica = rx.get_replica_context()

    def loss(x):
        return jnp.sum(replica.all_reduce("SUM", jnp.sin(x)) * v.value * replica.all_gather(x, 0))

    return jax.value_and_grad(loss)(x), rx.value_and_grad(lambda x: jnp.sum(x**3 * v.value))(x)


TAPES = [value for name, value in list(globals().items()) if name.startswith(("tape_", "grad_"))]


@pytest.mark.parametrize("fn", TAPES, ids=lambda fn: fn.__name__)
def test_tapes_give_the_gradients_of_traced_code(strategy, fn):
    as_one_device(strategy, fn, numbers(strategy))


def test_values_stay_real_under_a_tape(strategy):
    def fn(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x * x if float(x[0]) > 2 else x
            assert isinstance(y, jax.Array)
            assert not isinstance(y, jax.core.Tracer)
            np.asarray(y)
        return tape.gradient(y, x)

    result = strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert plain(result).tolist() == [1, 1, 1, 1]


def test_jitted_function_in_a_scan_closes_over_a_recorded_value(strategy):
    def fn(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            w = x * 2
            y = jax.lax.scan(lambda c, r: (c + jax.jit(lambda r: r * w)(r), None), x, x)[0]
        return tape.gradient(y, x)

    with pytest.raises(rx_errors.TapeError, match="as arguments"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


def test_function_that_jax_cached_before_the_tape(strategy):
    with strategy.scope():
        v = rx.Variable(0.5)

    def fn(x):
        read = jax.jit(lambda a: a * v.value)
        read(x)  # JAX does not call the function again
        with rx.GradientTape() as tape:
            y = jnp.sum(read(x) * v.value)
        return tape.gradient(y, v)

    result = strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert float(result) == 2  # sum(x) * 2 v


def test_an_operation_without_derivative_is_named_with_its_line(strategy):
    def fn(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = jax.lax.while_loop(lambda n: n < 10.0, lambda n: n * 2, jnp.max(x))  # the line
        return tape.gradient(y, x)

    with pytest.raises(ValueError, match="while_loop") as caught:
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    line = fn.__code__.co_firstlineno + 3
    assert f"test_eager.py:{line} in fn" in caught.value.__notes__[0]


def test_tape_used_twice(strategy):
    def fn(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return tape.gradient(y, x), tape.gradient(y, x)

    with pytest.raises(rx_errors.TapeError, match="persistent"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


# --- variables ----------------------------------------------------------------------------------------


def counted(strategy, options, method, aggregation, synchronization):
    """The value of a variable after an eager or compiled step, and after a following compiled one."""
    with strategy.scope():
        v = rx.Variable(jnp.int32([1, 2]), aggregation=aggregation, synchronization=synchronization)

    def fn(x):
        total = jnp.sum(x, axis=0)
        getattr(v, method)(
            rx.get_replica_context().all_reduce("SUM", total) if aggregation != "SUM" else total
        )

    shown = []
    for each in (options, None):
        rows = per_replica(strategy, np.int32([[1, 5], [2, 6]]), np.int32([[3, 7]]))
        strategy.run(fn, args=(rows,), options=each)
        shown.append(v.numpy().tolist())
    return shown


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("aggregation", ["SUM", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_assigning_totals_equals_the_compiled_step(strategy, method, aggregation, synchronization, request):
    eager, compiled = (
        counted(strategy, options, method, aggregation, synchronization) for options in (EAGER, None)
    )
    if (synchronization, aggregation) == ("ON_READ", "SUM"):
        # Each replica starts with the initial value, [1, 2], so that the variable shows [2, 4] before.
        assert eager[0] == {"assign": [6, 18], "assign_add": [8, 22], "assign_sub": [-4, -14]}[method]
    assert eager == compiled


def test_on_read_variable_reads_its_aggregated_value(strategy):
    def result(aggregation):
        with strategy.scope():
            v = rx.Variable(0.0, aggregation=aggregation, synchronization="ON_READ")
        strategy.run(lambda x: v.assign(jnp.max(x)), args=(numbers(strategy),))  # 2 and 3
        read = strategy.run(lambda: v.read_value() + 0, options=EAGER)
        strategy.run(lambda: v.assign_add(1), options=EAGER)
        return float(read), [float(value) for value in v.values]

    assert result("SUM") == (5, [6, 0])
    assert result("MEAN") == (2.5, [3.5, 3.5])
    assert result("ONLY_FIRST_REPLICA") == (2, [3, 3])
    assert result("NONE") == (2, [3, 3])


def test_scatter(strategy):
    def result(options):
        with strategy.scope():
            v = rx.Variable(jnp.zeros(3), aggregation="SUM")
        strategy.run(
            lambda x: v.scatter_add(rx.IndexedSlices(x, jnp.full(x.shape, 1))),
            args=(numbers(strategy),),
            options=options,
        )
        return v.value

    assert_alike(result(EAGER), result(None))


def test_a_variable_is_on_all_devices_afterwards(strategy):
    with strategy.scope():
        variables = [rx.Variable(1.0), keras.Variable(1.0)]
    strategy.run(lambda: [v.assign(2.0) for v in variables] and None, options=EAGER)
    for v in variables:
        assert (float(v.value), v.value.sharding.device_set) == (2, {*jax.devices()[:2]})


def test_sharded_variable_stays_sharded():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all")
    with strategy.scope():
        variables = [rx.Variable(jnp.ones((4096, 2))), keras.Variable(jnp.ones((4096, 2)))]

    def fn():
        for v in variables:
            v.assign_add(jnp.ones_like(v.value))

    for options in (None, EAGER):
        strategy.run(fn, options=options)
    for v in variables:
        assert not v.value.sharding.is_fully_replicated
        np.testing.assert_array_equal(np.asarray(v.value), np.full((4096, 2), 3))


def test_a_variable_made_in_the_function_is_that_of_all_replicas(strategy):
    made = []

    def fn(x):
        if not made:
            made.append(rx.Variable(0, aggregation="SUM", synchronization="ON_READ"))
            made.append(rx.Variable(1.0))
        made[0].assign_add(x.shape[0])

    for options in (EAGER, EAGER, None):
        strategy.run(fn, args=(numbers(strategy),), options=options)
    assert (int(made[0]), len(made[0].values)) == (12, 2)
    assert made[1].value.sharding.device_set == {*jax.devices()[:2]}


def test_cond_threads_assignments(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)

    def fn():
        rx.cond(v.value > 0, lambda: v.assign_add(1.0), lambda: v.assign(9.0))

    strategy.run(fn, options=EAGER)
    assert float(v.value) == 2


def test_assigning_inside_a_scan(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)

    def fn(x):
        return jax.lax.scan(lambda c, r: (v.assign(c + r), r), 0.0, x)

    with pytest.raises(rx_errors.TraceError, match=r"rx\.cond"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


# --- failures -----------------------------------------------------------------------------------------


class OfTheUser(Exception):
    pass


def test_exception_shows_the_users_line_and_changes_nothing(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
        state = keras.Variable(1.0)

    def fail_here():
        raise OfTheUser("sentence")

    def fn(x):
        v.assign(5.0)
        state.assign(5.0)
        if float(jnp.sum(x)) == 2:
            fail_here()

    with pytest.raises(OfTheUser, match="sentence") as caught:
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    last = caught.traceback[-1]
    assert (last.name, last.path.name) == ("fail_here", "test_eager.py")
    assert (float(v.value), float(state.value)) == (1, 1)
    assert rx.get_replica_context() is not None  # in the default context again
    assert strategy.num_replicas_in_sync == 2
    result = strategy.run(lambda x: jnp.sum(x), args=(numbers(strategy),))
    assert [float(value) for value in result.values] == [3, -1]


def test_an_exception_that_stops_the_program(strategy):
    def fn():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        strategy.run(fn, options=EAGER)


def test_inside_traced_functions(strategy):
    @rx.function
    def outer():
        return strategy.run(lambda: jnp.float32(1), options=EAGER)

    with pytest.raises(rx_errors.TraceError):
        outer()
    with pytest.raises(rx_errors.TraceError):
        jax.jit(lambda: strategy.run(lambda: jnp.float32(1), options=EAGER))()


def test_arrays_are_released_at_once(strategy):
    made = []

    def fn(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = jnp.sin(x)
            made.append(weakref.ref(y))
            made.append(weakref.ref(x))
            z = jnp.sum(y)
        return tape.gradient(z, x)

    gc.collect()
    gc.disable()
    try:
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)
        assert [reference() for reference in made] == [None] * 2
    finally:
        gc.enable()


# --- Keras --------------------------------------------------------------------------------------------


def batch(strategy, sizes=(4, 4), features=3):
    rng = np.random.default_rng(0)
    return (
        per_replica(strategy, *(rng.normal(size=(n, features)).astype(np.float32) for n in sizes)),
        per_replica(strategy, *(rng.integers(0, 2, size=n) for n in sizes)),
    )


def mlp(dropout=0.0, normalizes=False):
    return [
        keras.layers.Dense(5, activation="gelu"),
        *([keras.layers.BatchNormalization()] if normalizes else []),
        *([keras.layers.Dropout(dropout, seed=7)] if dropout else []),
        keras.layers.Dense(2),
    ]


@pytest.mark.rest
def test_nnx_modules_are_trained_as_by_the_compiled_step(strategy):
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    def trained(strategy, options, x, layers):
        model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), *layers(nnx))
        chain = optax.chain(rx.optax.aggregate_gradients(), optax.sgd(0.1))
        optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)

        def step(model, optimizer, x):
            def loss(model):
                return rx.nn.compute_average_loss(jnp.sum(model(x) ** 2, axis=-1))

            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        losses = [strategy.run(step, args=(model, optimizer, x), options=options) for _ in range(2)]
        state = jax.tree_util.tree_leaves(nnx.state(model, nnx.Param, nnx.BatchStat))
        return [strategy.reduce("SUM", loss, axis=None) for loss in losses], [np.asarray(v) for v in state]

    x, _ = batch(strategy, (3, 2))
    assert_alike(*(trained(strategy, options, x, lambda nnx: []) for options in (EAGER, None)))

    def random(nnx):
        return nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    one = rx.OneDeviceStrategy("cpu:0")
    alone = trained(one, None, strategy.gather(x, axis=0), random)
    assert_alike(trained(strategy, EAGER, x, random), alone)


def trained(strategy, options, layers, optimizer, batches, is_built=True, num_steps=3):
    """Losses, weights and metrics of some steps; with fresh weights that are always the same."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(layers())
        if is_built:
            model.build((None, 3))
        opt = optimizer()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x, y):
        with rx.GradientTape() as tape:
            logits = model(x, training=True)
            loss = rx.nn.compute_average_loss(loss_object(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        return loss, accuracy.result()

    losses, shown = [], []
    for number in range(num_steps):
        each = options[number % len(options)] if isinstance(options, list) else options
        loss, result = strategy.run(step, args=batches[number % len(batches)], options=each)
        losses.append(strategy.reduce("SUM", loss, axis=None))
        shown.append(strategy.reduce("MEAN", result, axis=None))
    weights = [np.asarray(w.value) for w in (*model.variables, *opt.variables, *accuracy.variables)]
    return losses, shown, weights, np.asarray(accuracy.result())


CASES = {
    "sgd": (mlp, lambda: keras.optimizers.SGD(0.1, momentum=0.9), {}),
    "adam with clipping": (mlp, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5), {}),
    "adamw with averages": (
        mlp,
        lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2),
        {},
    ),
    "loss scaling": (
        mlp,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2),
        {},
    ),
    "built in the step": (mlp, lambda: keras.optimizers.Adam(0.01), {"is_built": False}),
}
# The others are like these.
LONG = ("sgd", "adam with clipping", "adamw with averages")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES]
)
@pytest.mark.rest
def test_losses_weights_and_metrics_are_those_of_the_compiled_step(strategy, name):
    layers, optimizer, options = CASES[name]
    batches = [batch(strategy, (3, 2)), batch(strategy, (1, 0))]
    eager, mixed, compiled = (
        trained(strategy, each, layers, optimizer, batches, **options)
        for each in (EAGER, [None, EAGER], None)
    )
    assert_alike(eager, compiled)
    assert_alike(mixed, compiled)


@pytest.mark.parametrize("kind", ["dropout", "batch normalisation"])
@pytest.mark.rest
def test_random_numbers_and_batch_statistics_are_those_of_one_device(strategy, kind):
    def layers():
        return mlp(dropout=0.5) if kind == "dropout" else mlp(normalizes=True)

    def optimizer():
        return keras.optimizers.SGD(0.1)

    x, y = batch(strategy, (3, 2))
    one = rx.OneDeviceStrategy("cpu:0")
    alone = trained(one, None, layers, optimizer, [(strategy.gather(x, axis=0), strategy.gather(y, axis=0))])
    assert_alike(trained(strategy, EAGER, layers, optimizer, [(x, y)]), alone)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (1, 0)])
def test_losses_in_layers_are_those_of_one_device(strategy, sizes, num_calls):
    def losses(strategy, options, x):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Dense(2, activity_regularizer="l2", kernel_regularizer="l2"),
                ]
            )

        def step(x):
            for number in range(num_calls):  # a call of the model replaces the losses of the one before
                model(x * (number + 1))
            return rx.get_replica_context().all_reduce("SUM", model.losses)

        return strategy.run(step, args=(x,), options=options)

    x = batch(strategy, sizes)[0]
    eager = losses(strategy, EAGER, x)
    assert len(eager) == 2
    assert_alike(eager, losses(rx.OneDeviceStrategy("cpu:0"), None, strategy.gather(x, axis=0)))


@pytest.mark.parametrize("layer", [keras.layers.LSTM, pytest.param(keras.layers.GRU, marks=pytest.mark.long)])
@pytest.mark.rest
def test_recurrent_layers(strategy, layer):
    rng = np.random.default_rng(0)
    x = per_replica(strategy, *(rng.normal(size=(2, 3, 4)).astype(np.float32) for _ in range(2)))
    y = per_replica(strategy, *(rng.integers(0, 2, size=2) for _ in range(2)))

    def after(options):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3, 4)), layer(3), keras.layers.Dense(2)])
            opt = keras.optimizers.SGD(0.1)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

        def step(x, y):
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss(loss_object(y, model(x, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        losses = [
            strategy.reduce("SUM", strategy.run(step, args=(x, y), options=options), axis=None)
            for _ in range(2)
        ]
        return losses, [np.asarray(w.value) for w in model.variables]

    assert_alike(after(EAGER), after(None))


@pytest.mark.parametrize("work", ["none", "halved", "clipped"])
@pytest.mark.parametrize("by_tape", [True, False])
def test_gradients_that_were_reduced_are_applied_as_by_the_compiled_step(strategy, work, by_tape):
    def after(options):
        with strategy.scope():
            v = keras.Variable(jnp.float32([1.0, 1.0]), name="weight")
            opt = keras.optimizers.SGD(1.0)
            opt.build([v])

        def step(x):
            def loss(w):
                return jnp.sum(x @ w)

            if by_tape:
                with rx.GradientTape() as tape:
                    value = loss(v.value)
                gradient = tape.gradient(value, v)
            else:
                gradient = jax.grad(loss)(v.value)
            gradient = rx.get_replica_context().all_reduce("SUM", gradient)
            if work == "halved":
                gradient = gradient * 0.5
            elif work == "clipped":
                gradient = gradient * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(gradient**2)))
            opt.apply([gradient], [v])

        x = per_replica(strategy, np.float32([[1, 2], [3, 4]]), np.float32([[5, 6]]))
        strategy.run(step, args=(x,), options=options)
        return np.asarray(v.value)

    np.testing.assert_allclose(after(EAGER), after(None), rtol=1e-6)


def test_global_seed_generator_continues_as_outside(strategy):
    def draw():
        return keras.random.normal((3,))

    keras.utils.set_random_seed(5)
    eager = [plain(strategy.run(draw, options=EAGER)) for _ in range(3)]
    keras.utils.set_random_seed(5)
    np.testing.assert_array_equal(eager, [np.asarray(draw()) for _ in range(3)])


def test_mean_loss_is_the_mean_of_the_global_batch(strategy):
    """In a compiled step on several replicas it is an error, because gradients are summed over replicas."""
    x = per_replica(strategy, np.ones((3, 1), np.float32), np.full((1, 1), 3, np.float32))

    def fn(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            loss = keras.losses.MeanSquaredError()(jnp.zeros_like(x), x)
        return loss, tape.gradient(loss, x)

    loss, gradient = plain(strategy.run(fn, args=(x,), options=EAGER))
    assert float(loss) == 3
    assert gradient.ravel().tolist() == [0.5, 0.5, 0.5, 1.5]
    with pytest.raises(rx_errors.KerasLossError):
        strategy.run(fn, args=(x,))
