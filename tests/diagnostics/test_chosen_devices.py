"""Code that chooses devices, in a program of a strategy or around one, is an error that says what to write."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax as rx
from checks import message
from replicax.errors import TraceError, TransformationError, UnknownAxisError

X = np.ones((4, 4), "float32")
SPEC = PartitionSpec("d")


@pytest.fixture(params=[1, 2], ids="{} replica(s)".format)
def strategy(request):
    return rx.MirroredStrategy(request.param)


def mesh(num_devices=2):
    return Mesh(np.array(jax.devices()[:num_devices]), ("d",))


def pmap(x):
    return jax.pmap(lambda row: 2 * row, devices=jax.devices()[: len(x)])(x)


def shard_map(x):
    return jax.shard_map(lambda rows: 2 * rows, mesh=mesh(), in_specs=SPEC, out_specs=SPEC)(x)


def pjit(x):
    return jax.jit(lambda x: 2 * x, in_shardings=NamedSharding(mesh(), SPEC))(x)


def constraint(x):
    return 2 * jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), SPEC))


def device_put(x):
    return 2 * jax.device_put(x, NamedSharding(mesh(), SPEC))


def in_an_inner_function(x):
    return jax.lax.map(lambda row: jax.lax.with_sharding_constraint(row, NamedSharding(mesh(), SPEC)), x)


CHOOSING = {
    pmap: "jax.pmap",
    shard_map: "jax.shard_map",
    pjit: "jax.jit with shardings",
    constraint: "jax.lax.with_sharding_constraint",
    device_put: "jax.device_put with a sharding",
    in_an_inner_function: "jax.lax.with_sharding_constraint",
}


@pytest.mark.parametrize("fn", CHOOSING, ids=lambda fn: fn.__name__)
def test_replica_function_that_chooses_devices(strategy, fn):
    says = (f"{__file__}:{fn.__code__.co_firstlineno + 1} in ", CHOOSING[fn], "own device")
    message(TransformationError, lambda: strategy.run(fn, args=(X,)), *says)
    inside = rx.function(lambda x: strategy.run(fn, args=(x,)))
    message(TransformationError, lambda: inside(jnp.asarray(X)), *says)
    np.testing.assert_array_equal(strategy.unreplicate(strategy.run(lambda x: 2 * x, args=(X,))), 2 * X)


TWICE = jax.pmap(lambda row: 2 * row)


def one_row_for_each_of_other_devices(x):
    return jax.pmap(lambda row: 2 * row, devices=jax.devices()[:3])(x)


def made_before(x):
    return TWICE(x[:, None])


def indivisible(x):
    return jax.shard_map(lambda x: x, mesh=mesh(), in_specs=SPEC, out_specs=SPEC)(x[:3])


@pytest.mark.parametrize("fn", [one_row_for_each_of_other_devices, made_before, indivisible])
def test_map_over_devices_that_fails_while_it_is_traced(strategy, fn):
    name = "jax.shard_map" if fn is indivisible else "jax.pmap"
    says = (f"{__file__}:{fn.__code__.co_firstlineno + 1} in ", name, "own device")
    message(TransformationError, lambda: strategy.run(fn, args=(X,)), *says)


@pytest.mark.parametrize("fn", CHOOSING, ids=lambda fn: fn.__name__)
def test_program_of_other_devices_than_those_that_its_code_chooses(fn):
    says = (f"{__file__}:{fn.__code__.co_firstlineno + 1} in ", CHOOSING[fn], "runs on cpu:0")
    message(TransformationError, lambda: rx.function(fn)(X), *says)


def test_layer_may_choose_the_devices_of_the_strategy_but_no_others():
    class Layer(keras.layers.Layer):
        def call(self, x):
            return shard_map(x)

        def compute_output_shape(self, shape):
            return shape

    def model(num_replicas):
        with rx.MirroredStrategy(num_replicas).scope():
            model = keras.Sequential([keras.Input((4,)), Layer()])
            model.compile("sgd", "mse")
        return model

    assert model(2).fit(X, 2 * X, verbose=0).history["loss"] == [0.0]
    np.testing.assert_array_equal(model(2).predict(X, verbose=0), 2 * X)
    for call in (
        lambda m: m.fit(X, X, verbose=0),
        lambda m: m.evaluate(X, X, verbose=0),
        lambda m: m.predict(X, verbose=0),
    ):
        message(
            TransformationError,
            lambda call=call: call(model(1)),
            "shard_map",
            "cpu:0, cpu:1",
            "runs on cpu:0",
        )


def test_function_may_choose_the_devices_of_the_strategy_that_it_uses():
    strategy = rx.MirroredStrategy(2)

    @rx.function
    def step(x):
        strategy.run(lambda x: x, args=(x,))
        return shard_map(x)

    np.testing.assert_array_equal(step(X), 2 * X)


def test_code_for_the_devices_of_one_replica_is_allowed():
    strategy = rx.MirroredStrategy(4, devices_per_replica=2)
    sharding = NamedSharding(strategy.topology.mesh, PartitionSpec("logical"))
    got = strategy.run(lambda x: 2 * jax.lax.with_sharding_constraint(x, sharding), args=(X,))
    np.testing.assert_array_equal(strategy.unreplicate(got), 2 * X)
    wrong = NamedSharding(strategy.topology.mesh, PartitionSpec("replica"))
    step = lambda x: 2 * jax.lax.with_sharding_constraint(x, wrong)  # noqa: E731
    message(TransformationError, lambda: strategy.run(step, args=(X,)), "with_sharding_constraint")


def test_mesh_that_is_set_in_or_around_run(strategy):
    def step(x):
        with jax.set_mesh(mesh()):
            return 2 * x

    message(TransformationError, lambda: strategy.run(step, args=(X,)), "jax.set_mesh", "Leave it out")

    def double(x):
        return 2 * x

    strategy.run(double, args=(X,))
    with jax.set_mesh(mesh()):
        message(
            TransformationError, lambda: strategy.run(double, args=(X,)), "under jax.set_mesh", "the axes d"
        )
    strategy.run(double, args=(X,))


# --- collectives ----------------------------------------------------------------------------------------


def over_another_axis(x):
    return jax.lax.psum(x, "batch")


def over_the_replicas(x):
    return jax.lax.pmean(x, "replica")


def says(fn, *others):
    return f"{__file__}:{fn.__code__.co_firstlineno + 1} in {fn.__name__}", "axis", *others


def test_axis_that_does_not_exist_in_a_replica_function(strategy):
    message(
        UnknownAxisError,
        lambda: strategy.run(over_another_axis, args=(X,)),
        *says(over_another_axis, "jax.lax.psum(x, 'replica')", "all_reduce"),
    )
    strategy.run(over_the_replicas, args=(X,))


def test_axis_of_the_replicas_outside_of_them(strategy):
    outside = says(over_the_replicas, "'replica'", "strategy.run")
    message(UnknownAxisError, lambda: rx.function(over_the_replicas)(X), *outside, "strategy.reduce")

    def in_scope():
        with strategy.scope():
            over_the_replicas(jnp.ones(2))

    message(UnknownAxisError, in_scope, *outside)


def test_collective_on_the_result_of_run():
    strategy = rx.MirroredStrategy(2)
    result = strategy.run(lambda: jnp.ones(2))
    for call in (over_the_replicas, over_another_axis):
        message(
            UnknownAxisError, lambda call=call: call(result), *says(call, "PerReplica", "strategy.reduce")
        )
    message(UnknownAxisError, lambda: over_the_replicas(strategy.replicate(jnp.ones(2))), "Mirrored")
    assert jax.tree.map(lambda x: x, result).num_replicas == 2


def test_collective_in_a_layer_that_fit_runs(strategy):
    class Layer(keras.layers.Layer):
        def call(self, x):
            return over_the_replicas(x)

        def compute_output_shape(self, shape):
            return shape

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Layer()])
        model.compile("sgd", "mse")
    for call in (lambda: model.fit(X, X, verbose=0), lambda: model.predict(X, verbose=0)):
        message(UnknownAxisError, call, *says(over_the_replicas, "global batch", "Leave the collective out"))
    np.testing.assert_array_equal(strategy.unreplicate(strategy.run(model, args=(X,))), X)


# --- JAX around a program ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("around", "write"),
    [
        (jax.jit, "inside rx.function instead of jax.jit"),
        (jax.checkpoint, "leave jax.jit out"),
        (lambda fn: jax.vmap(fn), "Call jax.vmap in the function"),
        (lambda fn: jax.grad(lambda x: jnp.sum(fn(x))), "Differentiate in the function"),
        (lambda fn: lambda x: jax.jvp(fn, (x,), (x,)), "Differentiate in the function"),
    ],
    ids=["jit", "checkpoint", "vmap", "grad", "jvp"],
)
def test_program_that_starts_in_a_function_that_jax_traces(strategy, around, write):
    with strategy.scope():
        v = rx.Variable(1.0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    double = rx.function(lambda x: 2 * x)
    calls = {
        "strategy.run": lambda x: strategy.run(lambda x: 2 * x, args=(x,)),
        "strategy.run ": lambda x: (strategy.run(lambda: v.assign_add(1.0)), x)[1],
        "rx.function": double,
        "fit()": lambda x: (model.fit(X, X[:, :1], verbose=0), x)[1],
    }
    for name, call in calls.items():
        message(TraceError, lambda call=call: around(call)(jnp.ones(3)), name.strip(), __file__, write)
    assert float(v.value) == 1.0


def test_jax_transforms_inside_a_function_that_replicax_traces_work(strategy):
    def total(x):
        return strategy.reduce("SUM", strategy.run(lambda x: jnp.sum(x**2), args=(x,)), axis=None)

    gradient = rx.function(lambda x: jax.grad(total)(x))(jnp.ones(3))
    np.testing.assert_allclose(gradient, 2.0 * strategy.num_replicas_in_sync * np.ones(3))
