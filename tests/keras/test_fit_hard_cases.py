"""Cases found by reading the code, and by programs of new users; each failed once."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx
from replicax import errors

pytestmark = pytest.mark.rest

ROWS, BATCH = 22, 8


@pytest.fixture(scope="module", params=["one_device", "mirrored", "central"])
def strategy(request):
    return {
        "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
        "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
        "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    }[request.param]()


@pytest.fixture(scope="module")
def mirrored():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def features():
    return np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")


def targets():
    return features().sum(axis=1, keepdims=True)


def model_of(strategy=None, *, units=1, **options):
    keras.utils.set_random_seed(0)
    if strategy is None:
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(units)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
        return model
    with strategy.scope():
        return model_of(units=units, **options)


def generator():
    for start in range(0, ROWS, BATCH):
        yield features()[start : start + BATCH], targets()[start : start + BATCH]


def weights_of(model):
    return [np.array(variable.value) for variable in model.variables]


class Batches:
    """A dataset without a length."""

    def __iter__(self):
        return generator()


class ReadsWeights(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        weights_of(self.model)

    def on_test_batch_end(self, batch, logs=None):
        weights_of(self.model)


@pytest.mark.filterwarnings("ignore:.*Your input ran out of data")  # plain Keras warns too
def test_data_end_while_a_callback_reads_the_weights(strategy):
    def run(model):
        history = model.fit(
            generator(),
            callbacks=[ReadsWeights()],
            validation_data=(features(), targets()),
            shuffle=False,
            verbose=0,
        )
        evaluated = model.evaluate(generator(), callbacks=[ReadsWeights()], verbose=0)
        return history.history, evaluated, weights_of(model)

    expected, got = run(model_of()), run(model_of(strategy))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


@pytest.mark.parametrize(
    ("is_built", "on_device"),
    [
        pytest.param(True, False, id="built-on_host"),
        pytest.param(True, True, id="built-on_device", marks=pytest.mark.long),
        pytest.param(False, False, id="not_built-on_host", marks=pytest.mark.long),
        pytest.param(False, True, id="not_built-on_device"),
    ],
)
def test_a_dataset_of_unknown_length(strategy, monkeypatch, on_device, is_built, recwarn):
    """On accelerators Keras puts batches on a device, and reads one ahead."""
    model = model_of(strategy)
    if not is_built:
        with strategy.scope():
            model = keras.Sequential([layers.Dense(1)])
            model.compile("sgd", "mse")
    if on_device:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    once = strategy.experimental_distribute_dataset(generator())
    assert np.isfinite(model.fit(once, verbose=0).history["loss"]).all()
    dataset = strategy.experimental_distribute_dataset(Batches())
    assert len(model.fit(dataset, epochs=3, validation_data=dataset, verbose=0).history["val_loss"]) == 3
    assert model.predict(dataset, verbose=0).shape == (ROWS, 1)
    loss = model.evaluate(features(), targets(), batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(model.evaluate(dataset, verbose=0), loss, rtol=1e-5)
    assert not [str(w.message) for w in recwarn if "ran out of data" in str(w.message)]


@pytest.mark.parametrize("in_scope", [True, False])
def test_a_dataset_of_unknown_length_on_one_device(in_scope, tmp_path):
    path = tmp_path / "rows.csv"
    np.savetxt(path, np.hstack([features(), targets()]), delimiter=",", header="a,b,c,y", comments="")

    def row(columns):
        return np.float32([columns[name] for name in "abc"]), np.float32([columns["y"]])

    dataset = rx.data.from_csv(str(path)).map(row).batch(BATCH)
    model = model_of(rx.get_strategy() if in_scope else None)
    got = model.fit(dataset, epochs=2, verbose=0).history["loss"]
    expected = model_of().fit(features(), targets(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(got, expected.history["loss"], rtol=1e-4)  # CSV has the rows in decimals
    assert model.predict(dataset, verbose=0).shape == (ROWS, 1)


def test_batches_in_one_buffer_with_several_steps_per_execution(strategy):
    class Reuses(keras.utils.PyDataset):
        num_batches = 6

        def __init__(self):
            super().__init__()
            self.buffer = np.empty((4, 3), "float32")

        def __getitem__(self, index):
            self.buffer[:] = index
            return (self.buffer,)

    got = model_of(strategy, steps_per_execution=4).predict(Reuses(), verbose=0)
    expected = model_of().predict(
        np.repeat(np.arange(6.0, dtype="float32"), 4)[:, None] * np.ones(3), verbose=0
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_layers_that_change_between_calls(strategy):
    model = model_of(strategy)
    model.predict(features(), verbose=0)
    model.pop()
    with strategy.scope():
        model.add(layers.Dense(5))
    assert model.predict(features(), verbose=0).shape == (ROWS, 5)
    model = model_of(strategy, units=4)
    y = np.repeat(targets(), 4, axis=1)
    losses = []
    for first, second in ((False, True), (True, False)):
        model.layers[0].trainable, model.layers[1].trainable = first, second
        losses.append(model.evaluate(features(), y, verbose=0))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_arrays_of_the_user_survive(strategy):
    model = model_of(strategy)
    mine = jnp.ones((3, 4))
    model.layers[0].kernel.assign(mine)
    model.layers[1].bias.assign(jnp.zeros(1))
    held = model.layers[1].kernel.value
    before = np.array(held)
    model.predict(features(), verbose=0)
    model.fit(features(), targets(), batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(mine, np.ones((3, 4)))
    np.testing.assert_array_equal(held, before)


def test_one_array_in_two_models(strategy):
    online, target = model_of(strategy), model_of(strategy)
    for ours, theirs in zip(target.trainable_variables, online.trainable_variables, strict=True):
        ours.assign(theirs.value)
    weights = weights_of(online)
    for model in (online, target):
        model.evaluate(features(), targets(), verbose=0)
    target.fit(features(), targets(), batch_size=BATCH, verbose=0)
    for weight, kept in zip(weights_of(online), weights, strict=True):
        np.testing.assert_array_equal(weight, kept)


def test_integer_logs_are_the_mean_over_the_rows(mirrored):
    class Counts(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layers.Dense(1)

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            return {"n": ops.sum(ops.cast(data[0][:, 0] > 0, "int32"))}

    with mirrored.scope():
        model = Counts()
        model.compile("sgd")
    first, second = features()[:4, 0] > 0, features()[4:7, 0] > 0
    logs = model.train_on_batch(features()[:7], targets()[:7], return_dict=True)
    np.testing.assert_allclose(logs["n"], (4 * first.sum() + 3 * second.sum()) / 7, rtol=1e-6)


def test_a_batch_on_one_device_in_a_step_that_is_not_compiled(mirrored):
    x = jax.device_put(features(), jax.devices()[1])
    got = model_of(mirrored, run_eagerly=True).train_on_batch(x, targets())
    np.testing.assert_allclose(got, model_of().train_on_batch(features(), targets()), rtol=1e-5)


# --- messages -----------------------------------------------------------------------------------------


def refused(error, call, *words):
    with pytest.raises(error) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.quick
def test_fit_without_compile_raises(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    refused(ValueError, lambda: model.fit(features(), targets(), verbose=0), "compile()")


def test_a_dataset_without_end(mirrored):
    model = model_of(mirrored)
    dataset = rx.data.from_arrays((features(), targets())).repeat().batch(BATCH)
    error = errors.InvalidArgumentError
    refused(error, lambda: model.fit(dataset), "infinite", "steps_per_epoch")
    refused(error, lambda: model.evaluate(dataset), "`steps`")
    given = (features(), targets())
    refused(error, lambda: model.fit(*given, validation_data=dataset, verbose=0), "validation_steps")
    assert len(model.fit(dataset, steps_per_epoch=2, verbose=0).history["loss"]) == 1


@pytest.mark.quick
def test_arguments_that_conflict_with_a_dataset(mirrored):
    model = model_of(mirrored)
    dataset = rx.data.from_arrays((features(), targets())).batch(BATCH)
    refused(errors.InvalidArgumentError, lambda: model.fit(dataset, targets()), "`y`", "ArrayDataset")
    refused(errors.InvalidArgumentError, lambda: model.fit(dataset, validation_split=0.5), "validation_split")
    given = (features(), targets())
    assert "val_loss" in model.fit(*given, validation_data=(dataset,), verbose=0).history


def test_elements_of_a_distributed_dataset(mirrored):
    model = model_of(mirrored)
    element = next(iter(mirrored.experimental_distribute_dataset(list(generator()))))
    for method in (model.train_on_batch, model.test_on_batch, model.fit):
        refused(
            errors.InvalidArgumentError, lambda m=method: m(*element), "per-replica", "DistributedDataset"
        )
    refused(errors.InvalidArgumentError, lambda: model.predict(element[0]), "per-replica")


def test_a_distributed_dataset_for_a_model_made_outside(mirrored):
    dataset = mirrored.experimental_distribute_dataset(list(generator()))
    refused(errors.KerasScopeError, lambda: model_of().fit(dataset), "outside of every scope", "one device")


def test_steps_that_return_something_else(mirrored):
    def trained(result):
        class Returns(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = layers.Dense(1)

            def call(self, x):
                return self.layer(x)

            def train_step(self, state, data):
                return result(state)

        with mirrored.scope():
            model = Returns()
            model.compile("sgd", "mse")
        model.train_on_batch(features(), targets())

    error = errors.InvalidArgumentError
    refused(error, lambda: trained(lambda state: {"loss": 0.0}), "Returns.train_step", "(logs, state)")
    refused(error, lambda: trained(lambda state: ({"loss": 0.0}, state[:3])), "optimizer_variables")


def test_a_step_in_tensorflows_style_without_logs(mirrored):
    class Nothing(keras.Sequential):
        def train_step(self, data):
            pass

    with mirrored.scope():
        model = Nothing([keras.Input((3,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    refused(
        errors.InvalidArgumentError, lambda: model.train_on_batch(features(), targets()), "a dict of logs"
    )


def test_keras_distribution_beside_a_strategy(mirrored):
    model = model_of(mirrored)
    with keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope():
        refused(errors.UnsupportedError, lambda: model.fit(features(), targets()), "keras.distribution")


def classes():
    return (np.arange(ROWS) % 3).astype("int32")


def test_class_weights_count_for_the_elements_of_a_dataset(mirrored):
    """Keras applies them to data that it knows only."""

    def losses(data, **given):
        keras.utils.set_random_seed(0)
        with mirrored.scope():
            model = keras.Sequential([keras.Input((3,)), layers.Dense(3)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        given |= {"class_weight": {0: 0.5, 2: 3.0}, "epochs": 2, "verbose": 0}
        return model.fit(*data, **given).history["loss"]

    dataset = rx.data.from_arrays((features(), classes())).batch(BATCH)
    expected = losses((features(), classes()), batch_size=BATCH, shuffle=False)
    np.testing.assert_allclose(losses((dataset,)), expected, rtol=1e-6)
    weighted = rx.data.from_arrays((features(), classes(), np.ones(ROWS, "float32"))).batch(BATCH)
    with pytest.raises(errors.InvalidArgumentError, match="`class_weight`"):
        losses((weighted,))


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_a_batch_that_builds_a_model_is_read_once(mirrored, method):
    """A pass over a file, or a random one, cannot be begun again for its first batch."""
    begun = []

    class Source:
        def __iter__(self):
            begun.append(len(begun))
            return generator()

    with mirrored.scope():
        model = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])
        model.compile("sgd", "mse")
    dataset = mirrored.experimental_distribute_dataset(Source())
    before = len(begun)
    result = getattr(model, method)(dataset, verbose=0)
    assert len(begun) - before == 1
    if method == "predict":
        np.testing.assert_allclose(result, model.predict(features(), verbose=0), rtol=1e-5, atol=1e-6)
