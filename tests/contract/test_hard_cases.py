"""Cases at the boundaries between parts; each gave a wrong result without an error once."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import replicax as rx
from replicax import errors


@pytest.fixture(params=["mirrored", "default"])
def strategy(request):
    return rx.MirroredStrategy(["cpu:0", "cpu:1"]) if request.param == "mirrored" else rx.get_strategy()


@pytest.fixture
def num_replicas(strategy):
    return strategy.num_replicas_in_sync


def first(strategy, value):
    return np.asarray(strategy.experimental_local_results(value)[0])


def with_helper(w):
    def helper(x):
        return x * w

    return lambda x: helper(x)


def with_decorator(w):
    def decorate(fn):
        return functools.wraps(fn)(lambda x: fn(x))

    return decorate(lambda x: x * w)


def with_partial(w):
    return functools.partial(lambda x: x * w)


def with_value_and_grad(w):
    return lambda x: rx.value_and_grad(lambda y: y * w)(x)[1] * x


@pytest.mark.parametrize("make", [with_helper, with_decorator, with_partial, with_value_and_grad])
def test_arrays_in_nested_closures_are_not_stale(strategy, make):
    x = np.float32(2.0)
    results = [float(first(strategy, strategy.run(make(jnp.float32(w)), (x,)))) for w in (3.0, 5.0)]
    assert results == [6.0, 10.0]


def test_debug_callbacks_in_an_uneven_step_see_each_replicas_rows(strategy, num_replicas):
    seen = []
    (batch,) = list(strategy.experimental_distribute_dataset([np.arange(3.0, dtype=np.float32)]))

    def step(x):
        jax.debug.callback(lambda total: seen.append(float(total)), jnp.sum(x * 10))
        return jnp.sum(x)

    jax.block_until_ready(strategy.experimental_local_results(strategy.run(step, (batch,))))
    jax.effects_barrier()
    assert sorted(seen) == ([10.0, 20.0] if num_replicas == 2 else [30.0])


def test_scan_with_a_collective_that_depends_on_the_local_size_raises(strategy, num_replicas):
    (batch,) = list(strategy.experimental_distribute_dataset([np.ones((3, 2), np.float32)]))

    def step(x):
        total, rows = jnp.sum(x, 0), x.shape[0]

        def body(carry, _):
            return carry + rx.get_replica_context().all_reduce("sum", total / rows), None

        return jax.lax.scan(body, jnp.zeros(2), None, length=2)[0]

    if num_replicas == 1:
        assert np.asarray(strategy.run(step, (batch,))).tolist() == [2.0, 2.0]
        return
    with pytest.raises(errors.StructureError, match=r"test_hard_cases\.py"):
        strategy.run(step, (batch,))


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_a_gradient_with_reduced_factors_is_still_summed(num_replicas):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        kernel = keras.Variable(np.array([1.0, 2.0], "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([kernel])

    def step(x):
        target = rx.get_replica_context().all_reduce("sum", x)
        gradient = jax.grad(lambda w: jnp.sum((w - target) ** 2))(kernel.value)
        optimizer.apply([gradient], [kernel])

    strategy.run(step, (np.ones(2, np.float32),))
    one = 2 * (np.array([1.0, 2.0]) - num_replicas)
    np.testing.assert_allclose(np.asarray(kernel.value), np.array([1.0, 2.0]) - num_replicas * one)


@pytest.mark.parametrize(
    "ops", [None, rx.ReductionToOneDevice(accumulation_fn=lambda values: jnp.sum(jnp.stack(values), 0))]
)
def test_an_all_reduced_gradient_is_not_summed_again(ops):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    with strategy.scope():
        kernel = keras.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([kernel])

    def step(x):
        gradient = rx.get_replica_context().all_reduce("sum", x)
        optimizer.apply([jnp.clip(gradient, -10, 10)], [kernel])

    strategy.run(step, (np.ones(2, np.float32),))
    assert np.asarray(kernel.value).tolist() == [-2.0, -2.0]


def test_indexed_slices_that_were_reduced_are_not_summed_again(strategy, num_replicas):
    with strategy.scope():
        kernel = keras.Variable(np.zeros((3, 1), "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([kernel])

    def step():
        slices = rx.IndexedSlices(jnp.ones((1, 1)), jnp.array([1]), (3, 1))
        total = rx.get_replica_context().all_reduce("sum", slices)
        optimizer.apply([total.to_dense()], [kernel])

    strategy.run(step)
    assert np.asarray(kernel.value).ravel().tolist() == [0.0, -num_replicas, 0.0]


def test_a_metric_updated_in_merge_call_counts_once(strategy, num_replicas):
    with strategy.scope():
        metric = keras.metrics.Sum()

    def step(x):
        def merged(strategy, x):
            metric.update_state(strategy.reduce("SUM", x, axis=None))

        rx.get_replica_context().merge_call(merged, args=(x,))

    for _ in range(2):
        strategy.run(step, (np.float32(3.0),))
    assert float(metric.result()) == 2 * 3.0 * num_replicas


def test_update_of_an_on_read_variable_sees_components(strategy, num_replicas):
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], synchronization="ON_READ", aggregation="SUM")
    strategy.extended.update(v, lambda v, by: v.assign(v * by), args=(np.array([2.0, 3.0], np.float32),))
    assert [c.tolist() for c in v.values] == [[2.0, 6.0]] * num_replicas


def test_nnx_modules_are_rejected_with_functions(strategy):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    x = np.ones((2, 2), np.float32)
    with pytest.raises(errors.UnsupportedError, match=r"nnx\.split"):
        rx.function(lambda x: strategy.run(lambda m, x: m(x), (model, x)))(x)
    with pytest.raises(errors.UnsupportedError, match=r"nnx\.split"):
        rx.function(lambda m, x: m(x))(model, x)


def test_run_without_arguments_inside_jax_jit_changes_nothing(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    strategy.run(lambda: v.assign_add(1.0))
    with pytest.raises(errors.TraceError, match=r"rx\.function"):
        jax.jit(lambda x: (strategy.run(lambda: v.assign_add(1.0)), x)[1])(1.0)
    strategy.run(lambda: v.assign_add(1.0))
    assert float(v.value) == 3.0


def test_means_of_half_precision_count_in_full(strategy):
    losses = strategy.run(
        lambda: rx.nn.compute_average_loss(jnp.ones(257, jnp.bfloat16), global_batch_size=257)
    )
    assert float(first(strategy, losses)) == pytest.approx(1.0, rel=1e-2)  # bfloat16 has 8 bits
    x = strategy.experimental_distribute_values_from_function(lambda ctx: np.ones(40000, np.float16))
    assert float(strategy.reduce("mean", x, axis=0)) == pytest.approx(1.0, rel=1e-2)


def test_components_of_an_on_read_variable_everywhere(strategy, num_replicas):
    with strategy.scope():
        v = rx.Variable([0.0, 0.0], synchronization="ON_READ", aggregation="SUM")

    def step(x):
        v.assign(jnp.stack([x, x * 10]))
        context = rx.get_replica_context()

        def scoped(strategy):
            with strategy.scope():
                return v.read_value()

        return v.values[-1], context.merge_call(scoped)

    x = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1)
    )
    last, total = strategy.run(step, (x,))
    expected = [3.0, 30.0] if num_replicas == 2 else [1.0, 10.0]
    assert first(strategy, last).tolist() == [num_replicas, 10.0 * num_replicas]
    assert first(strategy, total).tolist() == expected
    assert np.asarray(rx.function(lambda: strategy.reduce("SUM", v, axis=None))()).tolist() == expected


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 6])
def test_value_made_before_a_collective_on_some_replicas_and_after_on_others(num_rows):
    """The gradient of a replica without rows is zeros before the sum; others compute the same zeros after it."""
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    aggregate = rx.optax.aggregate_gradients()
    weights = np.ones((4, 8), np.float32)

    def step(weights, x):
        gradient = jax.grad(lambda w: rx.nn.compute_average_loss(jnp.tanh(x @ w).sum(1)))(weights)
        (gradient,), _ = aggregate.update((gradient,), aggregate.init((gradient,)))
        return gradient + jnp.zeros_like(gradient)

    rows = np.random.default_rng(0).normal(size=(num_rows, 4)).astype(np.float32)
    (batch,) = strategy.experimental_distribute_dataset([rows])
    results = strategy.experimental_local_results(strategy.run(step, args=(weights, batch)))
    expected = jax.grad(lambda w: jnp.mean(jnp.tanh(rows @ w).sum(1)))(weights)
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
