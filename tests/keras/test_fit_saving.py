"""Models of a strategy are saved, loaded, copied and combined like Keras models: strategies leave no trace in them.

Everything is compared with the same done by plain Keras on one device.
"""

import contextlib
import copy
import functools
import json
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx

# Keras's own Variable does not yet take the `copy` argument of NumPy 2.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.rest,
]

ROWS, BATCH = 21, 7


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


@pytest.fixture(scope="module")
def other_strategy():
    return rx.MirroredStrategy(["cpu:3", "cpu:4"])


def scope_of(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def features(num_rows=ROWS):
    return np.random.default_rng(1).normal(size=(num_rows, 4)).astype("float32")


def targets(num_rows=ROWS):
    return np.random.default_rng(2).normal(size=(num_rows, 1)).astype("float32")


@keras.saving.register_keras_serializable("tests")
class Users(keras.Model):
    """A subclass, as a user writes it."""

    def __init__(self, width=5, **options):
        super().__init__(**options)
        self.width = width
        self.hidden = layers.Dense(width, activation="tanh")
        self.outputs_layer = layers.Dense(1)

    def call(self, x):
        return self.outputs_layer(self.hidden(x))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def sequential():
    return keras.Sequential(
        [
            keras.Input((4,), name="x"),
            layers.Dense(5, activation="tanh", name="h"),
            layers.Dense(1, name="y"),
        ],
        name="sequential_model",
    )


def functional():
    x = keras.Input((4,), name="x")
    return keras.Model(x, layers.Dense(1, name="y")(layers.Dense(5, name="h")(x)), name="functional_model")


def subclassed():
    return Users(name="users_model")


BUILDERS = {"sequential": sequential, "functional": functional, "subclassed": subclassed}


def compiled(model, optimizer=None):
    model.compile(optimizer or keras.optimizers.Adam(0.01, name="adam"), loss="mse", metrics=["mae"])
    return model


def make_model(strategy, build=sequential, optimizer=None):
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        return compiled(build(), optimizer)


def train(model, epochs=1):
    """The rows are in order, because Keras shuffles a model's first training differently from its second."""
    options = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(features(), targets(), **options).history


def values_of(variables):
    return [np.asarray(variable.value) for variable in variables]


def assert_same(got, expected):
    for one, other in zip(values_of(got.variables), values_of(expected.variables), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    bindings = zip(values_of(got.optimizer.variables), values_of(expected.optimizer.variables), strict=True)
    for one, other in bindings:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def assert_trains_alike(got, expected, epochs=1):
    """One more training gives the same history and state, optimizer state included."""
    histories = train(got, epochs), train(expected, epochs)
    assert list(histories[0]) == list(histories[1])
    for name, losses in histories[1].items():
        np.testing.assert_allclose(histories[0][name], losses, rtol=2e-5)
    assert_same(got, expected)


def num_devices(model):
    """The number of devices of the model's variables, which must be the same for all."""
    (number,) = {len(variable.value.sharding.device_set) for variable in model.variables}
    return number


def in_a_process_without_replicax(program, *args):
    """Runs Python code in which replicax cannot be imported."""
    preamble = "import sys\nsys.modules['replicax'] = None\n"
    result = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(program), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- files --------------------------------------------------------------------------------------------


def contents(path):
    """The contents of a .keras file besides the weights."""
    with zipfile.ZipFile(path) as file:
        config = json.loads(file.read("config.json"))
        return sorted(file.namelist()), config


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.quick
def test_saved_file_equals_that_of_one_device(strategy, tmp_path, name):
    """Entries, classes, configuration and compilation are equal, whether the model was trained or not."""
    model, expected = make_model(strategy, BUILDERS[name]), make_model(None, BUILDERS[name])
    for one, file in ((model, "replicas.keras"), (expected, "one.keras")):
        train(one)
        one.save(tmp_path / file)
    assert contents(tmp_path / "replicas.keras") == contents(tmp_path / "one.keras")
    _, config = contents(tmp_path / "replicas.keras")
    assert config["class_name"] == {"subclassed": "Users"}.get(name, type(expected).__name__)
    assert config["compile_config"]["optimizer"]["class_name"] == "Adam"


def test_a_saved_model_is_loaded_by_a_program_without_replicax(strategy, tmp_path):
    model = make_model(strategy)
    train(model)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    np.save(tmp_path / "x.npy", features(5))
    program = """
    import keras
    import numpy as np
    folder = sys.argv[1]
    model = keras.models.load_model(f"{folder}/model.keras")
    x = np.load(f"{folder}/x.npy")
    np.save(f"{folder}/predictions.npy", model.predict(x, verbose=0))
    model.load_weights(f"{folder}/model.weights.h5")
    np.save(f"{folder}/again.npy", model.predict(x, verbose=0))
    print(type(model).__module__, type(model).__name__, int(model.optimizer.iterations.value))
    """
    printed = in_a_process_without_replicax(program, tmp_path)
    assert printed.split()[1:] == ["Sequential", "3"]
    expected = model.predict(features(5), verbose=0)
    for file in ("predictions.npy", "again.npy"):
        np.testing.assert_allclose(np.load(tmp_path / file), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "saves"),
    [
        ("sequential", "replicas"),
        ("functional", "one_device"),
        ("subclassed", "replicas"),
        ("subclassed", "one_device"),
    ],
)
def test_a_model_that_is_loaded_in_a_scope_trains_on_as_one_device(strategy, tmp_path, name, saves):
    build = BUILDERS[name]
    source, expected = make_model(strategy if saves == "replicas" else None, build), make_model(None, build)
    train(source)
    train(expected)
    source.save(tmp_path / "model.keras")
    with strategy.scope():
        model = keras.models.load_model(tmp_path / "model.keras")
    assert type(model) is type(expected)
    assert_same(model, expected)
    assert_trains_alike(model, expected)
    assert num_devices(model) == 3


def test_a_model_that_is_loaded_outside_scopes_trains_on_one_device(strategy, tmp_path):
    source, expected = make_model(strategy), make_model(None)
    train(source)
    train(expected)
    source.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    assert_trains_alike(model, expected)
    assert num_devices(model) == 1


def test_a_model_is_loaded_in_the_scope_of_another_strategy(strategy, other_strategy, tmp_path):
    source, expected = make_model(strategy), make_model(None)
    train(source)
    train(expected)
    source.save(tmp_path / "model.keras")
    with other_strategy.scope():
        model = keras.models.load_model(tmp_path / "model.keras")
    assert_trains_alike(model, expected)
    assert num_devices(model) == 2


@pytest.mark.parametrize("is_in_scope", [False, True], ids=["outside", "in_scope"])
def test_weights_are_saved_and_loaded_in_and_out_of_the_scope(strategy, tmp_path, is_in_scope):
    source, expected = make_model(strategy), make_model(None)
    train(source)
    train(expected)
    model, plain = make_model(strategy), make_model(None)
    for one in (model, plain):
        one.optimizer.build(one.trainable_variables)
    path = tmp_path / "model.weights.h5"
    with scope_of(strategy if is_in_scope else None):
        source.save_weights(path)
        model.load_weights(path)
    plain.load_weights(path)
    assert_same(model, expected)
    assert_same(plain, expected)
    assert_trains_alike(model, expected)
    assert num_devices(model) == 3


def test_weights_are_loaded_into_a_model_that_has_been_trained(strategy, tmp_path):
    expected = make_model(None)
    train(expected)
    expected.save_weights(tmp_path / "model.weights.h5")
    model = make_model(strategy)
    train(model, epochs=2)
    model.load_weights(tmp_path / "model.weights.h5")
    assert_trains_alike(model, expected)


# --- copies -------------------------------------------------------------------------------------------


COPIES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("is_in_scope", [False, True], ids=["outside", "in_scope"])
@pytest.mark.parametrize("name", COPIES)
def test_copies_train_on_as_one_device(strategy, name, is_in_scope):
    """A copy belongs to the scope in which it is made, and shares nothing with its original."""
    model, expected = make_model(strategy), make_model(None)
    train(model)
    train(expected)
    with scope_of(strategy if is_in_scope else None):
        made = COPIES[name](model)
    assert type(made) is type(model)
    before = values_of(model.variables)
    assert_trains_alike(made, expected)
    assert num_devices(made) == (3 if is_in_scope else 1)
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(variable.value, value)


@pytest.mark.parametrize("is_in_scope", [False, True], ids=["outside", "in_scope"])
def test_clone_model(strategy, is_in_scope):
    model, expected = make_model(strategy), make_model(None)
    train(model)
    train(expected)
    with scope_of(strategy if is_in_scope else None):
        clone = compiled(keras.models.clone_model(model))
    clone.set_weights(model.get_weights())
    fresh = compiled(keras.models.clone_model(expected))
    fresh.set_weights(expected.get_weights())
    assert_trains_alike(clone, fresh)
    assert num_devices(clone) == (3 if is_in_scope else 1)


@pytest.mark.quick
def test_get_weights_and_set_weights(strategy):
    model, expected = make_model(strategy), make_model(None)
    train(model)
    train(expected)
    weights = model.get_weights()
    assert all(type(weight) is np.ndarray for weight in weights)
    for got, value in zip(weights, expected.get_weights(), strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-6)
    for one in (model, expected):
        one.set_weights([2 * weight for weight in expected.get_weights()])
    assert_trains_alike(model, expected)


def test_weights_of_a_model_that_was_never_trained(strategy):
    for one, other in zip(make_model(strategy).get_weights(), make_model(None).get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


# --- models made of models ----------------------------------------------------------------------------


def base_of_two_layers():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, name="first"),
            layers.BatchNormalization(name="normalised"),
            layers.Dense(3, activation="tanh", name="second"),
        ]
    )


@functools.cache
def pretrained_weights():
    keras.utils.set_random_seed(3)
    base = base_of_two_layers()
    train(compiled(keras.Sequential([base, layers.Dense(1)]), keras.optimizers.SGD(0.1)))
    return base.get_weights()


def pretrained():
    """A base with batch normalisation, made and trained outside every scope."""
    base = base_of_two_layers()
    base.set_weights(pretrained_weights())
    return base


def with_head(base):
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(1)(layers.Dropout(0.3, seed=1)(base(x, training=False))))


def fine_tuned(strategy):
    """The base's first layers are frozen; then the model is compiled again, and all of them are trained."""
    base = pretrained()
    frozen = [base.get_layer("first"), base.get_layer("normalised")]
    before = [values_of(layer.variables) for layer in frozen]
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        for layer in frozen:
            layer.trainable = False
        model = compiled(with_head(base), keras.optimizers.SGD(0.05, momentum=0.9))
    losses = train(model, epochs=2)["loss"]
    for layer, values in zip(frozen, before):
        for variable, value in zip(layer.variables, values):
            np.testing.assert_array_equal(variable.value, value)
    base.trainable = True
    compiled(model, keras.optimizers.SGD(0.01))
    return model, losses + train(model)["loss"]


def test_a_pretrained_base_is_fine_tuned_as_on_one_device(strategy):
    model, losses = fine_tuned(strategy)
    expected, expected_losses = fine_tuned(None)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    assert_same(model, expected)
    assert num_devices(model) == 3


def test_a_base_that_is_shared_by_two_models_of_two_strategies(strategy, other_strategy):
    """Its variables move to the model that trains it."""

    def trained(first, second):
        base, models = pretrained(), []
        for home in (first, second):
            with scope_of(home):
                keras.utils.set_random_seed(0)
                models.append(compiled(with_head(base), keras.optimizers.SGD(0.05)))
        histories = [train(model)["loss"] for model in (*models, models[0])]
        return histories, values_of(base.variables)

    histories, weights = trained(strategy, other_strategy)
    expected_histories, expected_weights = trained(None, None)
    np.testing.assert_allclose(histories, expected_histories, rtol=2e-5)
    for got, value in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5)


# --- compiled again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_scope", [False, True], ids=["outside", "in_scope"])
def test_compiled_again_with_another_optimizer_loss_and_metrics(strategy, is_in_scope):
    model, expected = make_model(strategy), make_model(None)
    train(model)
    train(expected)
    for one, home in ((model, strategy if is_in_scope else None), (expected, None)):
        with scope_of(home):
            one.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mae", metrics=["mse", "mape"])
    assert_trains_alike(model, expected)
    assert list(model.history.history) == list(expected.history.history)
    assert num_devices(model) == 3


def test_a_layer_frozen_and_compiled_again(strategy):
    model, expected = make_model(strategy), make_model(None)
    for one in (model, expected):
        train(one)
        one.get_layer("h").trainable = False
        compiled(one)
    kernel = np.asarray(model.get_layer("h").kernel.value)
    assert_trains_alike(model, expected)
    np.testing.assert_array_equal(model.get_layer("h").kernel.value, kernel)


def test_models_of_two_strategies_are_trained_in_turns(strategy, other_strategy):
    homes = [strategy, other_strategy, None]
    models = [make_model(home) for home in homes]
    expected = make_model(None)
    for _ in range(2):
        loss = train(expected)["loss"]
        for model in models:
            np.testing.assert_allclose(train(model)["loss"], loss, rtol=2e-5)
    for model, count in zip(models, [3, 2, 1]):
        assert_same(model, expected)
        assert num_devices(model) == count


def test_a_model_of_another_strategy_gets_the_weights(strategy, other_strategy):
    model, other, expected = make_model(strategy), make_model(other_strategy), make_model(None)
    train(model)
    train(expected)
    other.set_weights(model.get_weights())
    fresh = make_model(None)
    fresh.set_weights(expected.get_weights())
    assert_trains_alike(other, fresh)


# --- fit and loops with strategy.run in turns ---------------------------------------------------------


def loop_of_steps(strategy, model, metric):
    """One epoch by hand: [loss per step], and the metric's result."""
    loss_object = keras.losses.MeanSquaredError(reduction=None)

    def step(x, y):
        with rx.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = rx.nn.compute_average_loss(loss_object(y, predictions))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        metric.update_state(y, predictions)
        return loss

    metric.reset_state()
    losses = []
    for start in range(0, ROWS, BATCH):
        batch = features()[start : start + BATCH], targets()[start : start + BATCH]
        (x, y) = next(iter(strategy.experimental_distribute_dataset([batch])))
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)))
    return losses, float(metric.result())


def loop_of_keras(model, metric):
    """The same on one device, from Keras's stateless functions and ``jax.grad``."""

    def mean_loss(weights, x, y):
        predictions, _ = model.stateless_call(
            weights, values(model.non_trainable_variables), x, training=True
        )
        return jnp.mean((y - predictions) ** 2), predictions

    def values(variables):
        return [variable.value for variable in variables]

    metric.reset_state()
    losses = []
    for start in range(0, ROWS, BATCH):
        x, y = features()[start : start + BATCH], targets()[start : start + BATCH]
        weights = values(model.trainable_variables)
        (loss, predictions), gradients = jax.value_and_grad(mean_loss, has_aux=True)(weights, x, y)
        model.optimizer.apply(gradients, model.trainable_variables)
        metric.update_state(y, predictions)
        losses.append(float(loss))
    return losses, float(metric.result())


def in_turns(strategy):
    """fit, a custom loop, evaluate, fit, the loop, predict, with one metric object in all of them."""
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model, metric = sequential(), keras.metrics.MeanAbsoluteError(name="mae")
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss="mse", metrics=[metric])
    seen = []
    for _ in range(2):
        seen.append(train(model)["mae"])
        seen.append(float(metric.result()))
        seen.extend(
            loop_of_keras(model, metric) if strategy is None else loop_of_steps(strategy, model, metric)
        )
        logs = model.evaluate(features(), targets(), batch_size=BATCH, verbose=0, return_dict=True)
        seen.append([logs["loss"], logs["mae"]])
    return seen, model


def test_fit_and_custom_loops_in_turns(strategy):
    seen, model = in_turns(strategy)
    expected_seen, expected = in_turns(None)
    for got, value in zip(seen, expected_seen, strict=True):
        np.testing.assert_allclose(got, value, rtol=2e-5)
    assert_same(model, expected)
    np.testing.assert_allclose(
        model.predict(features(), verbose=0), expected.predict(features(), verbose=0), rtol=1e-4, atol=1e-6
    )


def test_metric_continues_in_a_loop_after_evaluate(strategy):
    """The counts of ``evaluate`` are included once, not once per replica."""

    def counted(home):
        with scope_of(home):
            keras.utils.set_random_seed(0)
            model, metric = sequential(), keras.metrics.MeanAbsoluteError(name="mae")
            model.compile("sgd", loss="mse", metrics=[metric])
        model.evaluate(features(), targets(), batch_size=BATCH, verbose=0)
        x, y = features(7), targets(7) + 3
        if home is None:
            metric.update_state(y, model(x))
        else:
            (batch,) = home.experimental_distribute_dataset([(x, y)])
            home.run(lambda x, y: metric.update_state(y, model(x)), args=batch)
        after_loop = float(metric.result())
        model.evaluate(features(), targets(), batch_size=BATCH, verbose=0)
        return after_loop, float(metric.result())

    np.testing.assert_allclose(counted(strategy), counted(None), rtol=1e-5)
