"""``RunOptions(eager=True)``: real values, and the same results as the traced program."""

import gc
import io
import pdb
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src import errors as rx_errors

EAGER = rx.RunOptions(eager=True)


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("replica "):
            thread.join(60)  # one that has done all may not have left
            assert not thread.is_alive()


def per_replica(strategy, *components):
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.asarray(components[c.replica_id_in_sync_group])
    )


def numbers(strategy):
    return per_replica(strategy, np.float32([1.0, 2.0]), np.float32([3.0, -4.0]))


def assert_alike(a, b):
    """Nests of per-replica values are equal to rounding."""

    def components(value):
        if isinstance(value, rx.DistributedValues):
            return [np.asarray(v) for v in value.values]
        return [np.asarray(value)] if hasattr(value, "dtype") else value

    flat = [
        jax.tree_util.tree_flatten(nest, is_leaf=lambda x: isinstance(x, rx.DistributedValues))
        for nest in (a, b)
    ]
    assert flat[0][1] == flat[1][1]
    for x, y in zip(flat[0][0], flat[1][0], strict=True):
        assert type(x) is type(y)
        if isinstance(x, rx.DistributedValues) or hasattr(x, "dtype"):
            assert x.dtype == y.dtype
            for left, right in zip(components(x), components(y), strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
        else:
            assert x == y


def run_both(strategy, fn, *args):
    eager = strategy.run(fn, args=args, options=EAGER)
    assert_alike(eager, strategy.run(fn, args=args))
    return eager


# --- real values --------------------------------------------------------------------------------------


def test_prints_show_values_and_do_not_mix(strategy, capsys):
    def fn(x):
        replica = rx.get_replica_context()
        print("start", replica.replica_id_in_sync_group, x)
        total = replica.all_reduce("SUM", x)
        print("between", replica.replica_id_in_sync_group)
        print("end", total)

    strategy.run(fn, args=(per_replica(strategy, 1, 2),), options=EAGER)
    out = capsys.readouterr().out.splitlines()
    assert out == ["start 0 1", "start 1 2", "between 0", "end 3", "between 1", "end 3"]


def test_python_if_on_values_and_on_the_replica_id(strategy):
    def fn(x):
        is_first = rx.get_replica_context().replica_id_in_sync_group == 0
        if is_first:
            return jnp.float32(10)
        return x * 2 if float(x) > 1 else x

    result = strategy.run(fn, args=(per_replica(strategy, np.float32(1), np.float32(2)),), options=EAGER)
    assert [float(v) for v in result.values] == [10, 4]


def test_breakpoint_sees_real_values(strategy, monkeypatch):
    seen = []

    def hook(*_args, **_kwargs):
        frame = sys._getframe(1)
        seen.append((threading.current_thread().name, float(frame.f_locals["y"])))

    monkeypatch.setattr(sys, "breakpointhook", hook)

    def fn(x):
        y = x * 2
        breakpoint()
        return rx.get_replica_context().all_reduce("SUM", y)

    strategy.run(fn, args=(per_replica(strategy, 1.0, 2.0),), options=EAGER)
    assert seen == [("replica 0", 2.0), ("replica 1", 4.0)]


def test_pdb_works_in_a_replica(strategy, monkeypatch):
    output = io.StringIO()
    debugger = pdb.Pdb(
        stdin=io.StringIO("p float(y)\ncontinue\np float(y)\ncontinue\n"), stdout=output, nosigint=True
    )
    debugger.prompt, debugger.use_rawinput = "", False
    monkeypatch.setattr(sys, "breakpointhook", lambda: debugger.set_trace(sys._getframe(1)))

    def fn(x):
        y = x + 0.5
        breakpoint()
        return y

    strategy.run(fn, args=(per_replica(strategy, 1.0, 2.0),), options=EAGER)
    assert "1.5" in output.getvalue()
    assert "2.5" in output.getvalue()


def test_one_replica_runs_in_the_callers_thread():
    strategy = rx.OneDeviceStrategy("cpu:0")
    names = []

    def fn(x):
        names.append(threading.current_thread() is threading.main_thread())
        replica = rx.get_replica_context()
        return replica.all_reduce("MEAN", x), replica.all_gather(x, 0), "kept"

    result = strategy.run(fn, args=(jnp.float32([1, 2]),), options=EAGER)
    assert names == [True]
    assert_alike(result, strategy.run(fn, args=(jnp.float32([1, 2]),)))


def test_the_default_strategy_runs_eagerly():
    result = rx.get_strategy().run(lambda x: x + 1 if x > 0 else x, args=(jnp.float32(1),), options=EAGER)
    assert float(result) == 2


def test_options_of_the_callers_thread_hold(strategy):
    with jax.default_matmul_precision("float32"), jax.debug_nans(True):
        got = strategy.run(
            lambda: (jax.config.jax_default_matmul_precision, bool(jax.config.jax_debug_nans)), options=EAGER
        )
    assert got == ("float32", True)


# --- what comes back ----------------------------------------------------------------------------------


def test_results(strategy):
    marker = object()

    def fn(x):
        first = rx.get_replica_context().replica_id_in_sync_group == 0
        return {
            "same": marker,
            "none": None,
            "text": "a",
            "array": x,
            "number": 1 if first else 2,
            "rows": x[: 1 + int(first)],
        }

    result = strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert result["same"] is marker
    assert (result["none"], result["text"]) == (None, "a")
    assert [v.shape for v in result["rows"].values] == [(2,), (1,)]
    assert [int(v) for v in result["number"].values] == [1, 2]
    assert isinstance(result["array"], rx.PerReplica)


@pytest.mark.parametrize(
    "pair",
    [
        (lambda x: (x, x), lambda x: x),
        (lambda x: "a", lambda x: "b"),
        (lambda x: x, lambda x: None),
        (lambda x: x, lambda x: x.sum()),
    ],
    ids=["structures", "texts", "an array and none", "ranks"],
)
def test_different_structures(strategy, pair):
    def fn(x):
        return pair[int(rx.get_replica_context().replica_id_in_sync_group)](x)

    with pytest.raises(rx_errors.StructureError):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


# --- collectives --------------------------------------------------------------------------------------


def collectives(x):
    replica = rx.get_replica_context()
    slices = rx.IndexedSlices(x[None], jnp.asarray([replica.replica_id_in_sync_group]), (2, 2))
    return (
        replica.all_reduce("SUM", {"a": x, "b": [x * 2, jnp.int32(3)]}),
        replica.all_reduce(rx.ReduceOp.MEAN, x.astype(jnp.int32)),
        replica.all_reduce("SUM", slices).to_dense(),
        replica.all_gather(x[:, None], 1),
        replica.all_gather(x, 0),
        rx.nn.compute_average_loss(x * x),
        rx.nn.scale_regularization_loss(x),
    )


def test_collectives(strategy):
    run_both(strategy, collectives, numbers(strategy))


def test_all_gather_of_different_sizes(strategy):
    x = per_replica(strategy, np.float32([1, 2, 3]), np.float32([4]))

    def fn(x):
        gathered = rx.get_replica_context().all_gather(x, 0)
        return jnp.sum(x), rx.nn.compute_average_loss(x), gathered

    eager = run_both(strategy, fn, x)
    np.testing.assert_array_equal(eager[2].values[1], [1, 2, 3, 4])


def test_merge_call(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)

    def merge(strategy, x, factor):
        total = strategy.reduce("SUM", x, axis=None)
        v.assign(jnp.sum(total) * factor)
        return total, strategy.gather(x, 0), x

    def fn(x):
        assert rx.get_replica_context() is not None
        return rx.get_replica_context().merge_call(merge, args=(x, 2.0))

    eager = strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert float(v.value) == 4.0
    assert_alike(eager, strategy.run(fn, args=(numbers(strategy),)))


def test_a_users_cross_device_ops():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=rx.ReductionToOneDevice())
    run_both(strategy, lambda x: rx.get_replica_context().all_reduce("SUM", x), numbers(strategy))


def test_more_replicas():
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    x = per_replica(strategy, *np.arange(8, dtype=np.float32).reshape(4, 2))
    run_both(strategy, collectives_without_slices, x)


def collectives_without_slices(x):
    replica = rx.get_replica_context()
    return replica.all_reduce("SUM", x), replica.all_gather(x, 0), replica.replica_id_in_sync_group


def test_a_replica_that_ends_early(strategy):
    def fn(x):
        replica = rx.get_replica_context()
        x = replica.all_reduce("SUM", x)
        if replica.replica_id_in_sync_group == 0:
            x = replica.all_reduce("SUM", x)
        return x

    with pytest.raises(rx_errors.StructureError, match=r"replica 1.*1 collective.*number 2.*test_eager"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


def test_different_collectives(strategy):
    def fn(x):
        replica = rx.get_replica_context()
        if replica.replica_id_in_sync_group == 0:
            return replica.all_reduce("SUM", x)
        return replica.all_gather(x, 0)

    with pytest.raises(rx_errors.StructureError, match="different collectives"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


def test_sums_of_different_shapes(strategy):
    x = per_replica(strategy, np.float32([1, 2]), np.float32([1]))
    with pytest.raises(rx_errors.StructureError, match=r"not alike: float32\[2\], float32\[1\]"):
        strategy.run(lambda x: rx.get_replica_context().all_reduce("SUM", x), args=(x,), options=EAGER)


def test_a_replica_that_skips_the_optimizer(strategy):
    with strategy.scope():
        v = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([v])

    def fn(x):
        rx.get_replica_context().all_reduce("SUM", x)
        if rx.get_replica_context().replica_id_in_sync_group == 1:
            optimizer.apply([jnp.sum(x)], [v])

    with pytest.raises(rx_errors.StructureError, match=r"replica 1.*number 2.*optimizer"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert (float(v.value), int(optimizer.iterations.value)) == (1, 0)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_collectives_of_jax_itself(strategy, is_jitted):
    def fn(x):
        total = lambda x: jax.lax.psum(x, "replica")  # noqa: E731
        return (jax.jit(total) if is_jitted else total)(x)

    with pytest.raises(rx_errors.UnsupportedError, match="all_reduce"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


def test_a_collective_in_a_jitted_function(strategy):
    def fn(x):
        return jax.jit(lambda x: rx.get_replica_context().all_reduce("SUM", x))(x)

    with pytest.raises(rx_errors.UnsupportedError, match="disable_jit"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    with jax.disable_jit():
        result = strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert_alike(result, strategy.run(fn, args=(numbers(strategy),)))


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
    return tape.gradient([y, z], [x, v]), tape.gradient(y, [x, v], output_gradients=jnp.asarray([3.0, 5.0]))


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
        return jnp.sum(replica.all_reduce("SUM", jnp.sin(x)) * v.value * replica.all_gather(x, 0)[:2])

    return jax.value_and_grad(loss)(x), rx.value_and_grad(lambda x: jnp.sum(x**3 * v.value))(x)


TAPES = [value for name, value in list(globals().items()) if name.startswith(("tape_", "grad_"))]


@pytest.mark.parametrize("fn", TAPES, ids=lambda fn: fn.__name__)
def test_tapes_give_what_they_give_when_traced(strategy, fn):
    with strategy.scope():
        v = rx.Variable(0.5)
    run_both(strategy, lambda x: fn(x, v), numbers(strategy))
    assert float(v.value) == 0.5


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
    np.testing.assert_array_equal(result.values[0], [1, 1])
    np.testing.assert_array_equal(result.values[1], [6, -8])


def test_a_jitted_function_in_a_scan_that_closes_over_what_a_tape_knows(strategy):
    def fn(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            w = x * 2
            y = jax.lax.scan(lambda c, r: (c + jax.jit(lambda r: r * w)(r), None), x, x)[0]
        return tape.gradient(y, x)

    with pytest.raises(rx_errors.TapeError, match="as arguments"):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)


def test_a_function_that_jax_remembers_from_before_the_tape(strategy):
    with strategy.scope():
        v = rx.Variable(0.5)

    def fn(x):
        read = jax.jit(lambda a: a * v.value)
        read(x)  # JAX does not call the function again
        with rx.GradientTape() as tape:
            y = jnp.sum(read(x) * v.value)
        return tape.gradient(y, v)

    result = strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert [float(r) for r in result.values] == [3, -1]  # sum(x) * 2 v


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


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_assigning(strategy, method, aggregation, synchronization):
    def result(options):
        with strategy.scope():
            v = rx.Variable(jnp.float32([1, 2]), aggregation=aggregation, synchronization=synchronization)
        returned = strategy.run(lambda x: getattr(v, method)(x), args=(numbers(strategy),), options=options)
        again = strategy.run(lambda: v.read_value() + 1, options=options)
        return returned, again, v.value, strategy.experimental_local_results(v)

    assert_alike(result(EAGER), result(None))


def test_scatter(strategy):
    def result(options):
        with strategy.scope():
            v = rx.Variable(jnp.zeros((3, 2)), aggregation="SUM")
        strategy.run(
            lambda x: v.scatter_add(rx.IndexedSlices(x[None], jnp.asarray([1]))),
            args=(numbers(strategy),),
            options=options,
        )
        return v.value

    assert_alike(result(EAGER), result(None))


def test_a_mirrored_variable_that_differs(strategy):
    with strategy.scope():
        v = rx.Variable(1.0, name="scale")
        w = rx.Variable(1.0)

    def fn(x):
        w.assign(7.0)
        v.assign(jnp.sum(x))

    with pytest.raises(
        rx_errors.DivergenceError, match=r"'scale'.*test_eager\.py.*replica 0: 3.0, replica 1: -1.0"
    ):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert (float(v.value), float(w.value)) == (1, 1)


def test_equal_bits_are_no_divergence(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    strategy.run(lambda x: v.assign(jnp.sum(x * 0) + jnp.nan), args=(numbers(strategy),), options=EAGER)
    assert np.isnan(float(v.value))


def test_a_variable_made_in_the_function(strategy):
    made = []

    def fn(x):
        if not made:
            made.append(rx.Variable(1.0, aggregation="SUM"))
        made[0].assign_add(jnp.sum(x))

    for _ in range(2):
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert float(made[0].value) == 5


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


@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_in_one_replica(strategy, who):
    with strategy.scope():
        v = rx.Variable(1.0)
        state = keras.Variable(1.0)

    def fail_here():
        raise OfTheUser("sentence")

    def fn(x):
        replica = rx.get_replica_context()
        v.assign(5.0)
        state.assign(5.0)
        if replica.replica_id_in_sync_group == who:
            fail_here()
        return replica.all_reduce("SUM", x)

    with pytest.raises(OfTheUser, match="sentence") as caught:
        strategy.run(fn, args=(numbers(strategy),), options=EAGER)
    assert "fail_here" in [entry.name for entry in caught.traceback]
    assert (float(v.value), float(state.value)) == (1, 1)
    assert rx.get_replica_context() is not None  # in the default context again
    run_both(strategy, lambda x: rx.get_replica_context().all_reduce("SUM", x), numbers(strategy))


def test_an_exception_that_stops_the_program(strategy):
    def fn():
        if rx.get_replica_context().replica_id_in_sync_group == 1:
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


def test_values_of_another_strategy(strategy):
    other = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    x = per_replica(other, 1.0, 2.0, 3.0)
    with pytest.raises(rx_errors.MixedStrategiesError):
        strategy.run(lambda x: x, args=(x,), options=EAGER)


# --- arguments ----------------------------------------------------------------------------------------


def test_arrays_bound_to_devices_mix(strategy):
    far = jax.device_put(jnp.float32([1, 2]), jax.devices()[5])
    spread = strategy.reduce("SUM", numbers(strategy), axis=None)
    mirrored = strategy.replicate({"w": jnp.float32([5, 6])})
    x = numbers(strategy)
    everywhere = {"spread": spread}  # not lifted out of the closure: a nest in a list

    def fn(state, host):
        return state["w"] * host + far + x + [everywhere][0]["spread"]

    run_both(strategy, fn, mirrored, np.float32([1, 1]))


def test_random_keys(strategy):
    keys = jax.random.key(3)

    def fn(key):
        own = jax.random.fold_in(key, rx.get_replica_context().replica_id_in_sync_group)
        return jax.random.normal(own, (2,)), jax.random.key_data(own)

    run_both(strategy, fn, keys)


@pytest.mark.rest
def test_nnx_modules(strategy):
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    def trained(options):
        model = nnx.Sequential(
            nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
            nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
        )
        chain = optax.chain(rx.optax.aggregate_gradients(), optax.sgd(0.1))
        optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)

        def step(model, optimizer, x):
            def loss(model):
                return rx.nn.compute_average_loss(jnp.sum(model(x) ** 2, axis=-1))

            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        x, _ = batch(strategy, (3, 2))
        losses = [strategy.run(step, args=(model, optimizer, x), options=options) for _ in range(2)]
        state = jax.tree_util.tree_leaves(nnx.state(model, nnx.Param, nnx.BatchStat))
        return losses, [np.asarray(leaf) for leaf in state]

    assert_alike(trained(EAGER), trained(None))


def test_equal_results_are_known_to_be_equal(strategy):
    total = strategy.run(
        lambda x: rx.get_replica_context().all_reduce("SUM", x), args=(numbers(strategy),), options=EAGER
    )
    np.testing.assert_array_equal(strategy.unreplicate(total), [4, -2])
    np.testing.assert_array_equal(strategy.reduce("SUM", total, axis=None), [8, -4])


def test_arrays_are_let_go_at_once(strategy):
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
        deadline = time.monotonic() + 60
        while any(reference() is not None for reference in made) and time.monotonic() < deadline:
            time.sleep(0.001)  # a replica's thread may not have left the function yet
        assert [reference() for reference in made] == [None] * 4
    finally:
        gc.enable()


def test_arguments_are_copies(strategy):
    x = numbers(strategy)
    strategy.run(lambda x: x + 1, args=(x,), options=EAGER)
    strategy.run(lambda x: x + 1, args=(x,), options=rx.RunOptions(donate_args=(0,)))


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


def trained(strategy, options, layers, optimizer, batches, is_built=True, num_steps=3, watch_metric=True):
    """Weights, losses and metric after some steps; with fresh weights that are always the same."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(layers())
        if is_built:
            model.build((None, *batches[0][0].component_shape(0)[1:]))
        opt = optimizer()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x, y):
        with rx.GradientTape() as tape:
            logits = model(x, training=True)
            loss = rx.nn.compute_average_loss(loss_object(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if watch_metric:
            accuracy.update_state(y, logits)
        return loss, accuracy.result() if watch_metric else loss

    losses = [strategy.run(step, args=batches[i % len(batches)], options=options) for i in range(num_steps)]
    weights = [np.asarray(w.value) for w in (*model.variables, *opt.variables, *accuracy.variables)]
    return losses, weights, np.asarray(accuracy.result())


CASES = {
    "sgd": (mlp, lambda: keras.optimizers.SGD(0.1, momentum=0.9), {}),
    "adam with clipping": (mlp, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5), {}),
    "adamw with averages": (
        mlp,
        lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2),
        {},
    ),
    "dropout": (lambda: mlp(dropout=0.5), lambda: keras.optimizers.SGD(0.1), {}),
    "batch normalisation": (lambda: mlp(normalizes=True), lambda: keras.optimizers.SGD(0.1), {}),
    "loss scaling": (
        mlp,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2),
        {},
    ),
    "built in the step": (mlp, lambda: keras.optimizers.Adam(0.01), {"is_built": False}),
}


UNEVEN = ("sgd", "batch normalisation", "dropout")


# The others have what these have: optimizers do in "built in the step" and "loss scaling", uneven rows, batch normalisation and
# dropout in test_training_with_an_empty_replica and test_steps_may_be_mixed.
LONG = ("sgd", "adam with clipping", "adamw with averages", "dropout", "batch normalisation")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES]
)
@pytest.mark.rest
def test_training(strategy, name):
    layers, optimizer, options = CASES[name]
    batches = [batch(strategy, (3, 2) if name in UNEVEN else (3, 3))]
    eager = trained(strategy, EAGER, layers, optimizer, batches, **options)
    assert_alike(eager, trained(strategy, None, layers, optimizer, batches, **options))


@pytest.mark.rest
def test_training_with_an_empty_replica(strategy):
    batches = [batch(strategy, (4, 4)), batch(strategy, (1, 0))]
    layers, optimizer, _ = CASES["batch normalisation"]
    eager = trained(strategy, EAGER, layers, optimizer, batches, num_steps=2)
    assert_alike(eager, trained(strategy, None, layers, optimizer, batches, num_steps=2))


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (1, 0)])
def test_losses_that_are_read_after_a_collective_are_those_of_the_replica(strategy, sizes, num_calls):
    """Keras keeps the losses of activities in the layers, where each replica replaces them."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, activity_regularizer="l2", kernel_regularizer="l2")]
        )

    def step(x):
        context = rx.get_replica_context()
        for number in range(num_calls):  # a call of the model replaces the losses of the one before
            model(x * (number + 1))
            context.all_reduce("SUM", x.sum())
        before = model.losses
        context.all_reduce("SUM", x.sum())
        return before, model.losses

    before, after = run_both(strategy, step, batch(strategy, sizes)[0])
    assert len(before) == len(after) == 2
    assert_alike(before, after)


@pytest.mark.parametrize("layer", [keras.layers.LSTM, pytest.param(keras.layers.GRU, marks=pytest.mark.long)])
@pytest.mark.rest
def test_recurrent_layers(strategy, layer):
    rng = np.random.default_rng(0)
    x = per_replica(strategy, *(rng.normal(size=(2, 3, 4)).astype(np.float32) for _ in range(2)))
    y = per_replica(strategy, *(rng.integers(0, 2, size=2) for _ in range(2)))

    def layers():
        return [layer(3), keras.layers.Dense(2)]

    def optimizer():
        return keras.optimizers.SGD(0.1)

    eager = trained(strategy, EAGER, layers, optimizer, [(x, y)], num_steps=2)
    assert_alike(eager, trained(strategy, None, layers, optimizer, [(x, y)], num_steps=2))


@pytest.mark.rest
def test_steps_may_be_mixed(strategy):
    """An eager step in the middle of traced ones: state goes on."""

    def result(which):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(mlp(dropout=0.3, normalizes=True))
            model.build((None, 3))
            opt = keras.optimizers.Adam(0.01)
            mean = keras.metrics.Mean()
        x, _ = batch(strategy)

        def step(x):
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss(jnp.sum(model(x, training=True) ** 2, axis=-1))
            opt.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )
            mean.update_state(loss)

        for options in which:
            strategy.run(step, args=(x,), options=options)
        return [np.asarray(w.value) for w in (*model.variables, *opt.variables)], np.asarray(mean.result())

    assert_alike(result([None, EAGER, None]), result([None, None, None]))


def test_data_that_was_reduced_does_not_make_a_reduced_gradient(strategy):
    def after(options, by_tape):
        with strategy.scope():
            v = keras.Variable(jnp.float32([1.0, 1.0]))
            opt = keras.optimizers.SGD(1.0)
            opt.build([v])

        def step(x):
            def loss(w):
                return jnp.sum(rx.get_replica_context().all_reduce("SUM", x) * w)

            if by_tape:
                with rx.GradientTape() as tape:
                    value = loss(v.value)
                gradient = tape.gradient(value, v)
            else:
                gradient = jax.grad(loss)(v.value)
            opt.apply([gradient], [v])

        strategy.run(step, args=(numbers(strategy),), options=options)
        return np.asarray(v.value)

    for by_tape in (False, True):
        np.testing.assert_allclose(after(EAGER, by_tape), after(None, by_tape), rtol=1e-6)


@pytest.mark.parametrize("work", ["none", "halved", "clipped"])
def test_gradients_that_were_reduced_are_not_summed_again(strategy, work):
    def after(options):
        with strategy.scope():
            v = keras.Variable(jnp.float32([1.0, 1.0]), name="weight")
            opt = keras.optimizers.SGD(1.0)
            opt.build([v])

        def step(x):
            with rx.GradientTape() as tape:
                loss = jnp.sum(v.value * x)
            gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, v))
            if work == "halved":
                gradient = gradient * 0.5
            elif work == "clipped":
                gradient = gradient * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(gradient**2)))
            opt.apply([gradient], [v])

        strategy.run(step, args=(numbers(strategy),), options=options)
        return np.asarray(v.value)

    np.testing.assert_allclose(after(EAGER), after(None), rtol=1e-6)


def test_the_global_seed_generator(strategy):
    def drawn(options):
        keras.utils.set_random_seed(5)
        return [strategy.run(lambda: keras.random.normal((3,)), options=options) for _ in range(3)]

    first = drawn(EAGER)
    assert_alike(first, drawn(EAGER))
    values = [np.asarray(v) for result in first for v in result.values]
    assert len({v.tobytes() for v in values}) == len(values)  # streams go on, and differ between replicas


def test_the_dtype_policy_of_the_caller_holds(strategy):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        name = strategy.run(lambda: keras.config.dtype_policy().name, options=EAGER)
    finally:
        keras.config.set_dtype_policy(policy)
    assert name == "mixed_bfloat16"


def test_a_mean_loss_is_refused(strategy):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.build((None, 3))
    x, _ = batch(strategy)

    def fn(x):
        with rx.GradientTape():
            keras.losses.MeanSquaredError()(x, model(x))

    with pytest.raises(rx_errors.KerasLossError):
        strategy.run(fn, args=(x,), options=EAGER)
