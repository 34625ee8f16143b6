"""Training on GPUs gives the numbers of one CPU device, also if the rows do not divide."""

import functools

import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close
from fit_models import SUBJECTS

# Keras's own warnings, which it gives on one device too.
pytestmark = [pytest.mark.rest, pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")]

# The other device's exponentials and sums round differently.
RTOL, ATOL = 1e-4, 1e-5

STRATEGIES = {
    "default": lambda names: rx.OneDeviceStrategy(names[0]),
    "mirrored_one": lambda names: rx.MirroredStrategy(names[:1]),
    "mirrored_all": rx.MirroredStrategy,
    "central_all": lambda names: rx.CentralStorageStrategy(names, names[0]),
}


# With CPU devices as stand-ins these add nothing to the other tests.
LONG = {"default", "mirrored_one", "central_all", "convolution", "attention", "mixed_bfloat16"}


def named(names):
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in names]


@pytest.fixture(params=named(STRATEGIES))
def strategy(request, names):
    return STRATEGIES[request.param](names)


@functools.cache
def on_one_cpu_device(train, *args):
    return train(rx.OneDeviceStrategy("cpu:0"), *args)[:-1]


def weights_of(model):
    return [np.asarray(variable.value) for variable in [*model.variables, *model.optimizer.variables]]


def assert_at(model, strategy, platform):
    for variable in model.trainable_variables:
        devices = variable.value.sharding.device_set
        assert {device.platform for device in devices} == {platform}, variable.path


# --- run ----------------------------------------------------------------------------------------------


def trained(strategy, num_rows, batch_size):
    """Losses, counted rows and weights of a loop of steps with momentum and a global norm."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 8, 8, 1)).astype("float32")
    y = rng.integers(0, 3, num_rows).astype("int32")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.7)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(features, labels):
        with rx.GradientTape() as tape:
            logits = model(features, training=True)
            loss = rx.nn.compute_average_loss(loss_of(labels, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, logits)
        return loss

    @rx.function
    def train(features, labels):
        return strategy.reduce("SUM", strategy.run(step, args=(features, labels)), axis=None)

    data = rx.data.from_arrays((x, y)).shuffle(1000, seed=1).batch(batch_size)
    losses = [
        float(train(*batch)) for _ in range(2) for batch in strategy.experimental_distribute_dataset(data)
    ]
    return losses, float(accuracy.result()), weights_of(model), model


# The last batch has 5 rows; the second leaves replicas without a row.
@pytest.mark.parametrize(("num_rows", "batch_size"), [(37, 8), (3, 2)])
def test_steps_of_run_equal_one_cpu_device(strategy, platform, num_rows, batch_size):
    *got, model = trained(strategy, num_rows, batch_size)
    assert_close(got, list(on_one_cpu_device(trained, num_rows, batch_size)), RTOL, ATOL)
    assert_at(model, strategy, platform)


def test_collectives_give_each_replica_the_values_of_all(strategy):
    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.arange(3, dtype="float32") + 10 * context.replica_id_in_sync_group
    )
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(context.replica_id_in_sync_group + 1, 2.0, "float32")
    )

    def step(x):
        context = rx.get_replica_context()
        total, mean = context.all_reduce("SUM", [x, x + 1]), context.all_reduce("MEAN", x)
        return total, mean, context.all_gather(x[None], axis=0)

    total, mean, gathered = strategy.run(step, args=(values,))
    number = strategy.num_replicas_in_sync
    each = np.stack([np.arange(3) + 10 * replica for replica in range(number)])
    for local in strategy.experimental_local_results(total[1]):
        np.testing.assert_allclose(local, (each + 1).sum(0))
    for local in strategy.experimental_local_results(mean):
        np.testing.assert_allclose(local, each.mean(0))
    for local in strategy.experimental_local_results(gathered):
        np.testing.assert_allclose(local, each)
    assert float(strategy.reduce("SUM", rows, axis=0)) == 2.0 * sum(range(1, number + 1))
    assert np.asarray(strategy.gather(rows, axis=0)).shape == (sum(range(1, number + 1)),)


# --- fit ----------------------------------------------------------------------------------------------


def fitted(strategy, subject):
    """199 rows in batches of 64: the last has 7."""
    keras.utils.set_random_seed(7)
    x, y = subject.rows()
    with strategy.scope():
        model = subject.build()
    history = model.fit(x, y, batch_size=64, epochs=2, verbose=0).history
    evaluated = model.evaluate(x, y, batch_size=64, verbose=0, return_dict=True)
    predictions = np.asarray(model.predict(x, batch_size=64, verbose=0), "float32")
    return {"history": history, "evaluated": evaluated}, predictions, weights_of(model), model


@pytest.mark.parametrize("name", named(["dense", "convolution", "attention", "mixed_bfloat16"]))
def test_fit_evaluate_and_predict_equal_one_cpu_device(strategy, platform, name):
    subject = SUBJECTS[name]
    logs, predictions, weights = on_one_cpu_device(fitted, subject)
    got_logs, got_predictions, got_weights, model = fitted(strategy, subject)
    assert_close(got_logs, logs, max(RTOL, subject.rtol), ATOL)
    assert_close(got_predictions, predictions, max(RTOL, subject.rtol), max(ATOL, subject.prediction_atol))
    assert_close(got_weights, weights, max(RTOL, subject.weight_rtol), max(ATOL, subject.weight_atol))
    assert_at(model, strategy, platform)
