"""``rx.keras.callbacks.LocalUpdatesCallback``: groups in threads of one process ``fit`` through a server on loopback."""

import threading

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._ps.local_updates.attached_arrays import AttachedArrays
from replicax.errors import ContextError, InvalidArgumentError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
WAIT_S = 60.0
X = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
Y = X[:, :1] - 0.5


@pytest.fixture
def group(monkeypatch):
    """Makes a group by its number and the number of groups."""
    made = []
    with rx.Server({"ps": ["localhost:0"]}, "ps", 0) as server:

        def make(index, num_groups, **options):
            monkeypatch.setenv("REPLICAX_GROUP", f"{index}/{num_groups}")
            monkeypatch.setenv("REPLICAX_SYNCERS", server.target.removeprefix("grpc://"))
            made.append(rx.experimental.LocalUpdates(**{"every": 2, "fragments": 1, **options}))
            return made[-1]

        yield make
        for each in made:
            each.close()


def model_of(seed, optimizer="sgd", **options):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", **options)
    return model


def fit(model, groups, *others, **options):
    callbacks = [*others, rx.keras.callbacks.LocalUpdatesCallback(groups, finish_timeout_s=WAIT_S)]
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": callbacks, **options}
    return model.fit(X, Y, **options)


def values_of(model):
    return [np.array(weight.value) for weight in model.weights]


def values_of_optimizer(optimizer):
    return [np.array(variable.value) for variable in optimizer.variables]


def assert_equal(values, others):
    for value, other in zip(values, others, strict=True):
        np.testing.assert_array_equal(value, other)


class Stop(keras.callbacks.Callback):
    """Calls ``groups.stop()`` after an epoch."""

    def __init__(self, groups, epoch):
        super().__init__()
        self.groups, self.epoch = groups, epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.groups.stop()


class Seen(keras.callbacks.Callback):
    """Keeps the model's values at events."""

    def __init__(self):
        super().__init__()
        self.of_validation, self.of_epoch = [], []

    def on_test_begin(self, logs=None):
        self.of_validation.append(values_of(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.of_epoch.append(values_of(self.model))


def test_groups_count_rows_stop_together_and_end_with_the_same_outer_parameters(group):
    groups = [group(number, 2, quorum=2) for number in range(2)]
    with rx.OneDeviceStrategy("cpu:1").scope():
        placed = model_of(1)
    models = [model_of(0), placed]
    others = threading.Thread(target=fit, args=(placed, groups[1], Stop(groups[1], 2)), kwargs={"epochs": 3})
    others.start()
    history = fit(models[0], groups[0], epochs=2000)
    others.join(WAIT_S)
    assert len(history.epoch) < 2000
    assert_equal(*map(values_of, models))
    counts = groups[1].statistics()
    assert (counts["steps"], counts["tokens"]) == (9, 33)  # batches of 4, 4 and 3 rows
    counts = groups[0].statistics()
    assert counts["steps"] <= 3 * len(history.epoch)
    assert counts["tokens"] / counts["steps"] == pytest.approx(11 / 3, rel=0.1)


def test_validation_and_saved_files_have_the_outer_parameters(group, tmp_path):
    groups = [group(number, 2, quorum=2) for number in range(2)]
    other, model, seen = model_of(0), model_of(1), Seen()
    groups[1].attach(other)
    first = values_of(other)  # the outer parameters, until the other group has pushed
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    ending = threading.Timer(0.0, groups[1].finish, [WAIT_S])
    end = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch and ending.start())
    fit(model, groups[0], seen, saving, stopping, end, epochs=2, validation_data=(X, Y))
    ending.join(WAIT_S)
    for values in seen.of_validation:
        assert_equal(values, first)
    for before, own in zip([first, seen.of_epoch[0]], seen.of_epoch, strict=True):
        assert all(np.any(new != old) for new, old in zip(own, before, strict=True))
    for epoch in (1, 2):
        saved = model_of(2)
        saved.load_weights(tmp_path / f"{epoch}.weights.h5")
        assert_equal(values_of(saved), first)
    assert_equal(stopping.best_weights, first)


def test_without_groups_fit_computes_what_it_computes_without_the_callback(monkeypatch):
    monkeypatch.delenv("REPLICAX_GROUP", raising=False)
    results = []
    for is_grouped in (False, True):
        groups = rx.experimental.LocalUpdates(every=4, fragments=2)
        model = model_of(
            0, keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9)), steps_per_execution=2
        )
        options = {"epochs": 2, "validation_data": (X, Y), "shuffle": True}
        history = fit(model, groups, **options) if is_grouped else fit(model, groups, callbacks=[], **options)
        results.append([*values_of(model), *values_of_optimizer(model.optimizer), *history.history.values()])
    assert_equal(*results)
    # 3 batches in an epoch: an execution with 2 steps, and one with 1.
    assert groups.statistics() == {"steps": 6, "tokens": 22, "version": 0}


def test_statistics_of_a_late_group_stay_between_those_of_all_groups(group):
    groups = [group(number, 2, every=1, quorum=1, grace_s=0.0) for number in range(2)]
    models = [model_of(number) for number in range(2)]
    for each, model in zip(groups, models, strict=True):
        each.attach(model)
    for each, model, variance in zip(groups, models, (0.1, 0.2), strict=True):  # 1 before the first step
        model.layers[0].moving_variance.assign([variance] * 3)
        each.step(tokens=1)
        each.wait(WAIT_S)
    ending = threading.Timer(0.0, groups[0].finish, [WAIT_S])
    ending.start()
    groups[1].finish(WAIT_S)
    ending.join(WAIT_S)
    for model in models:
        variances = np.array(model.layers[0].moving_variance.value)
        assert (variances >= 0.1 - 1e-6).all()
        assert (variances <= 0.2 + 1e-6).all()


@pytest.mark.rest
def test_rows_that_make_the_parameters_nan_are_dropped(group):
    groups, model = group(0, 1), model_of(0)
    x = X.copy()
    x[5] = np.nan
    callbacks = [rx.keras.callbacks.LocalUpdatesCallback(groups, finish_timeout_s=WAIT_S)]
    model.fit(x, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert all(np.isfinite(value).all() for value in values_of(model))
    assert groups.statistics()["lost_pushes"] >= 1


@pytest.mark.rest
def test_learning_rate_schedule_of_a_late_group_follows_the_job(group):
    groups = [group(number, 2, every=1, quorum=1, grace_s=0.0) for number in range(2)]
    first = model_of(0)
    groups[0].attach(first)
    for _ in range(3):
        groups[0].step(tokens=1)
        groups[0].wait(WAIT_S)
    late = model_of(1, keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)))
    ending = threading.Timer(0.0, groups[0].finish, [WAIT_S])
    ending.start()
    fit(late, groups[1], steps_per_epoch=1)
    ending.join(WAIT_S)
    assert int(late.optimizer.iterations.value) >= 4
    assert late.optimizer.iterations.value <= groups[1].version + 1


def test_fit_that_fails_leaves_the_groups_open_and_the_values_of_the_group(group):
    groups, model, seen = group(0, 1, every=100), model_of(0), Seen()
    callback = rx.keras.callbacks.LocalUpdatesCallback(groups)

    def fail(batch, logs):
        if fails:
            raise ValueError("in the validation")

    options = {
        "validation_data": (X, Y),
        "callbacks": [seen, callback, keras.callbacks.LambdaCallback(on_test_batch_end=fail)],
    }
    fails = True
    with pytest.raises(ValueError, match="in the validation"):
        fit(model, groups, **options)
    own = values_of(model)
    assert any(np.any(new != old) for new, old in zip(own, seen.of_validation[0], strict=True))
    fails = False
    fit(model, groups, **options)
    assert groups.statistics()["steps"] == 6
    own = values_of(model)
    with pytest.raises(ContextError, match=r"in a fit that has ended.*Make another LocalUpdates"):
        fit(model, groups, **options)
    assert_equal(values_of(model), own)  # no step was made


def test_bad_arguments_say_what_to_write(group):
    with pytest.raises(InvalidArgumentError, match=r"LocalUpdatesCallback\(rx.experimental.LocalUpdates"):
        rx.keras.callbacks.LocalUpdatesCallback(2)
    groups = group(0, 1, every=4, fragments=2)
    with pytest.raises(InvalidArgumentError, match=r"Allowed are 1, 2;.*multiple of 4"):
        fit(model_of(0, steps_per_execution=4), groups)
    with pytest.raises(InvalidArgumentError, match=r"Group 0 of 1 .*has no batch"):
        model_of(0).fit(X[:0], Y[:0], callbacks=[rx.keras.callbacks.LocalUpdatesCallback(groups)])
    with pytest.raises(UnsupportedError, match="SwapEMAWeights"):
        fit(model_of(0), groups, keras.callbacks.SwapEMAWeights())


def frozen_model(seed, seed_of_frozen):
    """A frozen block, then one that is tuned by LoRA."""
    keras.utils.set_random_seed(seed_of_frozen)
    layers = [
        keras.Input((3,)),
        keras.layers.Normalization(),
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
    ]
    block, tuned = keras.Sequential(layers), keras.layers.Dense(2)
    tuned.build((None, 4))
    block.trainable = False
    keras.utils.set_random_seed(seed)
    tuned.enable_lora(1)
    return keras.Sequential([block, tuned, keras.layers.BatchNormalization()])


def test_frozen_weights_stay_in_their_groups_and_must_be_equal(group):
    groups = [group(number, 3) for number in range(3)]
    models = [frozen_model(number, seed_of_frozen) for number, seed_of_frozen in enumerate((7, 7, 8))]
    travelling = {spec.name.rpartition("/")[2]: spec.is_state for spec in AttachedArrays(models[0]).specs}
    trained = ("bias", "lora_kernel_a", "lora_kernel_b", "gamma", "beta")
    assert travelling == {**dict.fromkeys(trained, False), "moving_mean": True, "moving_variance": True}
    assert len(AttachedArrays(models[0]).specs) == 7
    for each, model in zip(groups[:2], models, strict=False):
        each.attach(model)
    assert_equal(values_of(models[0]), values_of(models[1]))
    with pytest.raises(
        InvalidArgumentError, match=r"seed it alike\) is .*kernel\) in group 2, and .* in group 0"
    ):
        groups[2].attach(models[2])
