"""Plans of Keras's ``fit``: the step that it would run, in the global view."""

import keras
import numpy as np
import pytest

import replicax as rx
from replicax import errors

pytestmark = pytest.mark.rest

ROWS, IN, HIDDEN, OUT = 12, 16, 64, 4
F32 = 4
WEIGHTS = (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT) * F32


def make_model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((IN,)), keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(OUT)]
        )
        model.compile("adam", keras.losses.MeanSquaredError())
    return model


def weights_of(model):
    return [np.asarray(variable.value) for variable in model.variables]


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(3 * ROWS, IN)).astype("float32"), np.ones((3 * ROWS, OUT), "float32")


def test_step_of_fit_is_planned_and_fit_continues(strategy, data):
    model = make_model(strategy)
    old = weights_of(model)
    plan = strategy.plan(model.fit, data, {"batch_size": ROWS, "verbose": 0})
    for before, after in zip(old, weights_of(model), strict=True):
        np.testing.assert_array_equal(before, after)
    assert plan.global_batch == ROWS
    variables = {array.name: array.device_bytes for array in plan.arrays if array.role == "variable"}
    assert sum(variables.values()) == pytest.approx(3 * WEIGHTS, abs=64)
    assert plan.memory.arguments == sum(array.device_bytes for array in plan.arrays)
    products = 2 * (ROWS // 2) * (IN * HIDDEN * 2 + HIDDEN * OUT * 3)  # of the input there is no gradient
    assert plan.flops == {"float32": products}
    for collectives in (plan.requested, plan.compiled):  # of CPU devices, the step itself asks for the sum
        exchanged = sum(one.bytes * one.count for one in collectives if one.kind == "all-reduce")
        assert WEIGHTS <= exchanged <= WEIGHTS + 64

    model.fit(*data, batch_size=ROWS, epochs=1, verbose=0)
    program = next(iter(model.train_function._step._programs.values()))
    ran = program._compiled.lower(*program.described(_held(model, strategy))[1]).compile().memory_analysis()
    assert plan.memory.arguments == ran.argument_size_in_bytes
    assert plan.memory.temporaries == ran.temp_size_in_bytes
    assert np.isfinite(weights_of(model)[0]).all()


def _held(model, strategy):
    from replicax._src.keras.phases import TRAIN
    from replicax._src.lowering.held_state import HeldState

    held = HeldState(strategy.topology)
    held.hold([[variable.value for variable in group] for group in TRAIN.variables_of(model)])
    return held


def test_rows_are_kept_on_more_replicas_and_may_be_given(strategy, data):
    model = make_model(strategy)
    arguments = (model.fit, data, {"batch_size": ROWS, "verbose": 0})
    kept = strategy.plan(*arguments, topology="cpu:4")
    assert (kept.rows, kept.global_batch) == (ROWS // 2, 2 * ROWS)
    given = strategy.plan(*arguments, topology="cpu:4", global_batch=10)
    assert (given.rows, given.global_batch) == (3, 12)


@pytest.fixture
def forgotten():
    """Keras gives values to variables without values at its next trace, so it has to forget them."""
    yield
    keras.utils.clear_session()


def test_model_without_values_stays_without(strategy, forgotten):
    with strategy.scope(), keras.StatelessScope(initialize_variables=False):
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(1_000_000), keras.layers.Dense(4_000)]
        )
    with strategy.scope():
        model.compile(loss="mse")
    x, y = np.zeros((4, 4), "float32"), np.zeros((4, 4000), "float32")
    with strategy.scope(), keras.StatelessScope(initialize_variables=False):
        model.optimizer.build(model.trainable_variables)
    plan = strategy.plan(model.fit, (x, y), {"batch_size": 4, "verbose": 0})
    assert plan.memory.arguments > 32_000_000_000
    assert all(variable._value is None for variable in model.variables)


def test_other_models_make_no_values_for_a_model_that_was_only_planned(strategy):
    """A plan may be of a model that does not fit here, so only its own ``fit`` gives it values."""
    with strategy.scope():
        planned = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        planned.compile("adam", loss="mse")
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        other.compile("adam", loss="mse")
    x, y = np.zeros((4, 4), "float32"), np.zeros((4, 2), "float32")
    strategy.plan(planned.fit, (x, y), {"batch_size": 4, "verbose": 0})
    slots = [slot for slot in planned.optimizer.variables if slot.path.startswith("adam/sequential")]
    assert len(slots) == 4
    other.fit(x, y, verbose=0)
    strategy.run(lambda: other(x))
    assert all(slot._value is None for slot in slots)
    planned.fit(x, y, verbose=0)
    assert all(slot._value is not None for slot in slots)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


@pytest.mark.parametrize("global_batch", [None, 20])
def test_a_step_in_tensorflow_style(strategy, data, global_batch):
    with strategy.scope():
        layers = [keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(OUT)]
        model = OwnStep([keras.Input((IN,)), *layers])
        model.compile("adam", keras.losses.MeanSquaredError())
    old = weights_of(model)
    fit = {"batch_size": ROWS, "verbose": 0}
    plan = strategy.plan(model.fit, data, fit, topology="cpu:4", global_batch=global_batch)
    for before, after in zip(old, weights_of(model), strict=True):
        np.testing.assert_array_equal(before, after)
    rows = ROWS // 2 if global_batch is None else 5
    assert (plan.name, plan.rows, plan.global_batch) == ("OwnStep.train_step", rows, 4 * rows)
    assert plan.flops == {"float32": 2 * rows * (IN * HIDDEN * 2 + HIDDEN * OUT * 3)}
    summed = sum(
        one.bytes * one.count for one in plan.requested
    )  # it is a replica function: it asks for sums
    assert WEIGHTS <= summed <= WEIGHTS + 64

    model.fit(*data, batch_size=ROWS, epochs=1, verbose=0)
    here = strategy.plan(model.fit, data, fit).memory
    ran = strategy.runner.last_launcher
    batch = [np.zeros((2, ROWS // 2, n), "float32") for n in (IN, OUT)]
    analysis = ran.lower(strategy.topology.put_rows(batch)).compile().memory_analysis()
    assert (here.arguments, here.temporaries) == (
        analysis.argument_size_in_bytes,
        analysis.temp_size_in_bytes,
    )


def test_a_step_in_tensorflow_style_does_not_need_values(strategy, data, forgotten):
    with strategy.scope(), keras.StatelessScope(initialize_variables=False):
        model = OwnStep([keras.Input((4,)), keras.layers.Dense(1_000_000), keras.layers.Dense(4_000)])
    with strategy.scope():
        model.compile("sgd", "mse")
    x, y = np.zeros((4, 4), "float32"), np.zeros((4, 4000), "float32")
    plan = strategy.plan(model.fit, (x, y), {"batch_size": 4, "verbose": 0})
    assert plan.memory.arguments > 16_000_000_000
    assert all(variable._value is None for variable in model.trainable_variables)


def test_model_made_outside_the_scope_is_not_run(strategy, data):
    model = keras.Sequential([keras.Input((IN,)), keras.layers.Dense(OUT)])
    model.compile("sgd", "mse")
    old = weights_of(model)
    with pytest.raises(errors.KerasScopeError, match="made outside the scope"):
        strategy.plan(model.fit, data, {"verbose": 0})
    for before, after in zip(old, weights_of(model), strict=True):
        np.testing.assert_array_equal(before, after)
