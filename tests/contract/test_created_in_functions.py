"""Variables that a function creates: in its first call they equal variables created before; in each call they are an
error."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import tpu_strategy
from replicax.errors import VariableError

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = X.sum(1, keepdims=True)
STRATEGIES = {
    "default": rx.get_strategy,
    "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "mirrored_3": lambda: rx.MirroredStrategy(["cpu:1", "cpu:2", "cpu:3"]),
    "central_storage_2": lambda: rx.CentralStorageStrategy(["cpu:1", "cpu:2"]),
    "tpu_2x2": lambda: tpu_strategy(num_replicas=2, num_logical_devices=2),
}
LONG = {"one_device"}  # as the default one
WAYS = ("run", "function", "eager")
OPTIONS = {"eager": rx.RunOptions(eager=True)}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in STRATEGIES],
    scope="module",
)
def strategy(request):
    return STRATEGIES[request.param]()


def returned(strategy, fn, way, *args):
    """The results of ``run``, ``rx.function``, or an eager run."""

    def run(*args):
        return strategy.run(fn, args, options=OPTIONS.get(way))

    return rx.function(run)(*args) if way == "function" else run(*args)


def called(strategy, fn, way, *args):
    """The result of the first replica."""
    return float(strategy.experimental_local_results(returned(strategy, fn, way, *args))[0])


class Subclassed(keras.Model):
    """Its variables are created in ``build``."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, kernel_initializer="ones", kernel_regularizer="l2")

    def build(self, shape):
        self.scale = self.add_weight(shape=(4,), initializer="ones", regularizer="l1")

    def call(self, x):
        return self.hidden(x) * self.scale


class InCall:
    """The class is not a Keras module, which would raise: its variables and its layer are created where they are first
    needed."""

    def __init__(self):
        self.layer = None

    def __call__(self, x):
        if self.layer is None:
            self.offset = rx.Variable(0.5)
            self.scale = keras.Variable(np.ones(x.shape[-1:], "float32"))
            self.layer = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer="l2")
        return self.layer(x * self.scale) + self.offset

    @property
    def trainable_variables(self):
        return [self.scale, *self.layer.trainable_variables]


def trained(strategy, way, is_built_before):
    """Losses, the mean of a metric and weights of a step whose model, optimizer and metric are created late, or before
    it."""
    with strategy.scope():
        sequential = keras.Sequential(
            [
                keras.layers.Dense(3, kernel_initializer="ones", kernel_regularizer="l2"),
                keras.layers.Dense(2, activity_regularizer="l2", kernel_initializer="ones"),
            ]
        )
        models = [sequential, Subclassed(), InCall()]
        (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    late = {}

    def predicted(x):
        return functools.reduce(lambda value, model: model(value), models, x)

    def create():
        late["optimizer"] = keras.optimizers.SGD(1e-3, momentum=0.9)
        late["metric"] = keras.metrics.Mean()

    if is_built_before:
        with strategy.scope():
            predicted(X)
            create()
            late["optimizer"].build([v for model in models for v in model.trainable_variables])

    def step(x, y):
        if not late:
            create()
        with rx.GradientTape() as tape:
            error = jnp.square(predicted(x) - y)[:, 0]
            own = [*sequential.losses, *models[1].losses, *models[2].layer.losses]
            assert len(own) == 5
            loss = rx.nn.compute_average_loss(error) + rx.nn.scale_regularization_loss(sum(own))
        variables = [v for model in models for v in model.trainable_variables]
        late["optimizer"].apply(tape.gradient(loss, variables), variables)
        late["metric"].update_state(error)
        return loss

    losses = [strategy.reduce("SUM", returned(strategy, step, way, *batch), axis=None) for _ in range(2)]
    weights = [np.asarray(v.value) for model in models for v in model.trainable_variables]
    return losses, float(late["metric"].result()), weights


@functools.cache
def built_before(strategy):
    return trained(strategy, "run", is_built_before=True)


# Variables are created in all of the ways below.
@pytest.mark.parametrize(
    "way", ["run", *(pytest.param(way, marks=pytest.mark.rest) for way in ("function", "eager"))]
)
def test_models_optimizers_and_metrics_may_be_created_in_the_first_call(strategy, way):
    losses, mean, weights = trained(strategy, way, is_built_before=False)
    # Keras's activity losses are means over a replica's rows, and an eager run has one replica.
    expected = built_before(rx.OneDeviceStrategy("cpu:0") if way == "eager" else strategy)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    np.testing.assert_allclose(mean, expected[1], rtol=1e-5)
    for value, other in zip(weights, expected[2], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [rx.Variable, keras.Variable])
def test_a_variable_created_in_the_first_call_keeps_its_value(strategy, kind, way):
    held = []

    def count():
        if not held:
            held.append(kind(1.0))
        held[0].assign_add(1.0)
        return held[0] + 0.0

    assert [called(strategy, count, way) for _ in range(3)] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [rx.Variable, keras.Variable])
def test_a_variable_created_in_every_call_is_an_error_in_the_first(strategy, kind, way):
    calls = []

    def count():
        calls.append(1)
        variable = kind(1.0)
        variable.assign_add(1.0)
        return variable + 0.0

    with pytest.raises(VariableError, match=rf"{__file__}:\d+ in count"):
        called(strategy, count, way)
    assert len(calls) <= 2 * strategy.num_replicas_in_sync


@pytest.mark.parametrize(
    "create",
    [
        lambda: keras.metrics.Mean(),
        lambda: keras.layers.Dense(1)(jnp.ones((1, 2))),
        lambda: keras.optimizers.SGD().build([]),
        lambda: keras.random.SeedGenerator(0),
    ],
    ids=["metric", "layer", "optimizer", "seed_generator"],
)
def test_objects_with_variables_cannot_be_created_in_every_call(create):
    with pytest.raises(VariableError):
        rx.MirroredStrategy(["cpu:0", "cpu:1"]).run(create)


def test_inner_function_that_creates_one_in_each_call_is_an_error():
    """Each replica function keeps its variable, but each call of the outer function makes a new replica function."""
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    @rx.function
    def outer():
        held = []

        def inner():
            if not held:
                held.append(rx.Variable(1.0))
            return held[0] + 0.0

        return strategy.run(inner)

    with pytest.raises(VariableError):
        outer()


def test_another_signature_may_create_further_variables():
    strategy, tables = rx.MirroredStrategy(["cpu:0", "cpu:1"]), {}

    def count(x):
        if x.shape not in tables:
            tables[x.shape] = rx.Variable(np.zeros(x.shape, "float32"))
        tables[x.shape].assign_add(x)
        return jnp.sum(tables[x.shape])

    got = [called(strategy, count, "run", np.ones(n, np.float32)) for n in (2, 3, 2, 3)]
    assert got == [2.0, 3.0, 4.0, 6.0]


def test_a_function_of_jax_may_create_variables_in_the_first_call():
    strategy, dense = (
        rx.MirroredStrategy(["cpu:0", "cpu:1"]),
        keras.layers.Dense(1, kernel_initializer="ones"),
    )

    def step(x):
        total, _ = jax.lax.scan(lambda total, row: (total + dense(row[None])[0, 0], None), 0.0, x)
        return total + jax.checkpoint(dense)(x)[0, 0]

    assert called(strategy, step, "run", np.ones((2, 3), np.float32)) == 9.0
