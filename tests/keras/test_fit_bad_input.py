"""Bad input of ``fit`` and similar methods: the errors and their messages, and that the model is unharmed.

Also the bridge: what it replaces in ``keras.Model``, and that models without a scope are not affected.
"""

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
from checks import in_a_process_of_its_own, message
from replicax import errors
from replicax._src.input.elements import EmptyDatasetError

# Keras's own Variable does not yet take the `copy` argument of NumPy 2.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)

ROWS = 12


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def other_strategy():
    return rx.MirroredStrategy(["cpu:2", "cpu:3", "cpu:4"])


@pytest.fixture(autouse=True)
def contexts_are_clean_afterwards():
    yield
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()
    assert rx.get_replica_context() is not None


def features(num_rows=ROWS):
    return np.random.default_rng(1).normal(size=(num_rows, 4)).astype("float32")


def targets(num_rows=ROWS):
    return np.random.default_rng(2).normal(size=(num_rows, 1)).astype("float32")


def model_named(name):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), layers.Dense(1, name="dense")], name=name)


def compiled(name="small", optimizer="sgd"):
    model = model_named(name)
    model.compile(optimizer, loss="mse", metrics=["mae"])
    return model


def fit(model, *args, **options):
    args = args or (features(), targets())
    return model.fit(*args, **{"batch_size": 6, "verbose": 0, **options}).history


@pytest.fixture(scope="module")
def one_device_loss():
    return fit(compiled(), shuffle=False)["loss"]


def assert_usable(model, expected):
    """It trains as if nothing had been wrong."""
    np.testing.assert_allclose(fit(model, shuffle=False)["loss"], expected, rtol=1e-5)


# --- made in no scope, or in another ------------------------------------------------------------------


def test_keras_scope_error_is_a_value_error_of_replicax():
    assert issubclass(errors.KerasScopeError, (errors.ReplicaxError, ValueError))
    assert issubclass(errors.KerasScopeError, errors.ReplicaxError)
    assert errors.KerasScopeError.__name__ in errors.__all__


def test_model_made_outside_cannot_be_compiled_in_a_scope(strategy, one_device_loss):
    model = model_named("outer")
    with strategy.scope():
        message(
            errors.KerasScopeError,
            lambda: model.compile("sgd", loss="mse"),
            "'outer'",
            "made outside the scope",
            "compile() was called inside",
            "with strategy.scope():",
        )
    assert not model.compiled
    model.compile("sgd", loss="mse")
    assert_usable(model, one_device_loss)


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_a_model_made_and_compiled_outside_is_not_trained_in_a_scope(strategy, one_device_loss, method):
    model = compiled("outer")
    before = model.get_weights()
    with strategy.scope():
        message(
            errors.KerasScopeError,
            lambda: getattr(model, method)(features(), targets()),
            "'outer'",
            "made outside the scope",
            f"{method}() was called inside",
            "with strategy.scope():",
        )
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)
    assert_usable(model, one_device_loss)


def test_a_model_of_the_default_strategys_scope_is_keras_own(one_device_loss):
    with rx.get_strategy().scope():
        model = compiled()
    assert_usable(model, one_device_loss)
    (number,) = {len(variable.value.sharding.device_set) for variable in model.variables}
    assert number == 1


def test_metrics_made_outside_every_scope(strategy):
    metric = keras.metrics.MeanAbsoluteError(name="outer_error")
    with strategy.scope():
        model = model_named("inner")
    for given in (metric, [metric], ["mse", metric], [[metric]], {"dense": metric}):
        for argument in ("metrics", "weighted_metrics"):
            message(
                errors.KerasScopeError,
                lambda given=given, argument=argument: model.compile("sgd", "mse", **{argument: given}),
                "'outer_error'",
                "compile()",
                "'inner'",
                "made outside the scope",
                "with strategy.scope():",
            )
    with strategy.scope():
        message(
            errors.KerasScopeError, lambda: model.compile("sgd", "mse", metrics=[metric]), "'outer_error'"
        )
    with strategy.scope():
        made_inside = keras.metrics.MeanAbsoluteError(name="mae")
    model.compile("sgd", "mse", metrics=[made_inside, "mse", keras.losses.mean_squared_error])
    assert list(fit(model)) == ["loss", "mae", "mean_squared_error", "mse"]


def test_metrics_of_another_strategy(strategy, other_strategy):
    with other_strategy.scope():
        metric = keras.metrics.MeanAbsoluteError(name="their_error")
    with strategy.scope():
        model = model_named("inner")
    message(
        errors.MixedStrategiesError,
        lambda: model.compile("sgd", "mse", metrics=[metric]),
        "Mixing different tf.distribute.Strategy objects",
        "'their_error'",
        "'inner'",
    )


@pytest.mark.parametrize(
    "method",
    ["compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"],
)
def test_methods_in_the_scope_of_another_strategy(strategy, other_strategy, one_device_loss, method):
    with strategy.scope():
        model = compiled("inner")
    args = {"compile": ("sgd", "mse"), "predict": (features(),), "predict_on_batch": (features(),)}
    with other_strategy.scope():
        message(
            errors.MixedStrategiesError,
            lambda: getattr(model, method)(*args.get(method, (features(), targets()))),
            "Mixing different tf.distribute.Strategy objects",
        )
    assert_usable(model, one_device_loss)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_methods_in_a_replica_function(strategy, one_device_loss, method):
    with strategy.scope():
        model = compiled("inner")
    args = (features(),) if method == "predict" else (features(), targets())

    def step():
        getattr(model, method)(*args, verbose=0)

    message(
        errors.CrossReplicaContextError,
        lambda: strategy.run(step),
        "Call it outside",
        "strategy.run",
    )
    assert_usable(model, one_device_loss)


def test_fit_in_a_replica_function_of_another_strategy(strategy, other_strategy, one_device_loss):
    with strategy.scope():
        model = compiled("inner")
    with pytest.raises((errors.CrossReplicaContextError, errors.MixedStrategiesError)):
        other_strategy.run(lambda: fit(model) and None)
    assert_usable(model, one_device_loss)


# --- data ---------------------------------------------------------------------------------------------


def rows_of(strategy, num_rows=ROWS):
    return strategy.experimental_distribute_dataset(
        rx.data.from_arrays((features(num_rows), targets(num_rows))).batch(6)
    )


def test_a_dataset_of_another_strategy(strategy, other_strategy, one_device_loss):
    with strategy.scope():
        model = compiled("inner")
    theirs = rows_of(other_strategy)
    for call in (
        lambda: fit(model, theirs, batch_size=None),
        lambda: model.evaluate(theirs, verbose=0),
        lambda: model.predict(theirs, verbose=0),
        lambda: fit(model, validation_data=theirs),
    ):
        message(
            errors.MixedStrategiesError,
            call,
            "Mixing different tf.distribute.Strategy objects",
            "dataset",
            "Distribute it with that one",
        )
    assert_usable(model, one_device_loss)


def test_targets_and_weights_beside_a_distributed_dataset(strategy, one_device_loss):
    with strategy.scope():
        model = compiled("inner")
    dataset = rows_of(strategy)
    for call, name in (
        (lambda: model.fit(dataset, targets(), verbose=0), "y"),
        (lambda: model.fit(dataset, y=targets(), verbose=0), "y"),
        (lambda: model.fit(dataset, sample_weight=np.ones(ROWS), verbose=0), "sample_weight"),
        (lambda: model.evaluate(dataset, targets(), verbose=0), "y"),
    ):
        message(
            errors.InvalidArgumentError,
            call,
            f"`{name}` was given beside a DistributedDataset",
            "(x, y)",
            f"Leave `{name}` out",
        )
    assert_usable(model, one_device_loss)


def test_a_distributed_iterator(strategy, one_device_loss):
    with strategy.scope():
        model = compiled("inner")
    iterator = iter(rows_of(strategy))
    for call in (
        lambda: model.fit(iterator, verbose=0),
        lambda: model.evaluate(iterator, verbose=0),
        lambda: model.predict(iterator, verbose=0),
        lambda: fit(model, validation_data=iterator),
    ):
        message(errors.InvalidArgumentError, call, "DistributedIterator", "Pass the DistributedDataset")
    iterator.close()
    assert_usable(model, one_device_loss)


def test_a_distributed_dataset_given_to_a_model_of_no_scope(strategy, one_device_loss):
    model = compiled("outer")
    message(errors.KerasScopeError, lambda: model.fit(rows_of(strategy), verbose=0), "dataset", "scope")
    assert_usable(model, one_device_loss)


def test_datasets_without_a_batch(strategy, one_device_loss):
    with strategy.scope():
        model = compiled("inner")
    empty = rx.data.from_arrays((features(0), targets(0))).batch(6)
    for x in (empty, strategy.experimental_distribute_dataset(empty)):
        for call in (model.fit, model.evaluate, model.predict):
            message(EmptyDatasetError, lambda call=call, x=x: call(x, verbose=0), "has no batch")
    assert_usable(model, one_device_loss)
    for call in (
        model.fit,
        model.evaluate,
        model.predict,
    ):  # also where the model was built and trained before
        message(EmptyDatasetError, lambda call=call: call(empty, verbose=0), "has no batch")


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_arrays_without_rows_raise_a_clear_error(strategy, method):
    """The first batch builds an unbuilt model; ``predict`` concatenates the outputs of its batches."""
    with strategy.scope():
        model = keras.Sequential([layers.Dense(1)], name="small")
        model.compile("sgd", "mse")
    data = (features(0), targets(0)) if method != "predict" else (features(0),)
    says = [f"{method}() of model 'small'", "without a single batch: arrays of no rows"]
    message(EmptyDatasetError, lambda: getattr(model, method)(*data), *says)
    getattr(model, method)(*(values[:3] for values in (features(), targets())[: len(data)]), verbose=0)
    for nothing in (
        data,
        (NoBatches(),),
    ):  # Keras ends as if there had been a step, and its model has no values then
        message(
            EmptyDatasetError, lambda nothing=nothing: getattr(model, method)(*nothing, verbose=0), says[0]
        )
    assert np.isfinite(model.get_weights()[0]).all()


class NoBatches(keras.utils.PyDataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


def test_validation_data_without_rows_raise_before_training(strategy):
    with strategy.scope():
        model = compiled()
    before = model.get_weights()
    nothing = features(0), targets(0)
    call = lambda: model.fit(features(), targets(), validation_data=nothing, verbose=0)  # noqa: E731
    message(EmptyDatasetError, call, "'small'", "validation_data")
    for got, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_stop_iteration_of_a_callback_is_raised_unchanged(strategy):
    class Exhausted(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            next(iter([]))

    with strategy.scope():
        model = compiled()
    with pytest.raises(StopIteration):
        model.fit(features(), targets(), callbacks=[Exhausted()], verbose=0)


def keras_says(call):
    """The type and message of Keras's own error."""
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value), str(caught.value)


def wrong_calls():
    return {
        "lengths": lambda model: model.fit(features(12), targets(11), verbose=0),
        "no_batches": lambda model: model.fit((batch for batch in ()), shuffle=False, verbose=0),
        "no_x": lambda model: model.fit(verbose=0),
        "unknown_argument": lambda model: model.fit(features(), targets(), epoch=1),
        "too_many_arguments": lambda model: model.predict(*[features()] * 9),
        "text": lambda model: model.fit("rows.csv", targets(), verbose=0),
        "two_weights": lambda model: model.train_on_batch(
            features(), targets(), sample_weight=np.ones(ROWS), class_weight={0: 1.0}
        ),
        "width": lambda model: model.evaluate(features()[:, :3], targets(), verbose=0),
        "targets_width": lambda model: model.fit(features(), np.ones((ROWS, 2, 3)), verbose=0),
        "callbacks": lambda model: fit(model, callbacks=[3]),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_errors_of_keras_keep_their_messages(strategy, one_device_loss, name):
    call = wrong_calls()[name]
    expected = keras_says(lambda: call(compiled("same")))
    with strategy.scope():
        model = compiled("same")
    assert keras_says(lambda: call(model)) == expected
    assert_usable(model, one_device_loss)


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_a_model_that_is_not_compiled(strategy, method):
    with strategy.scope():
        model = model_named("same")
    call = lambda model: getattr(model, method)(features(), targets())  # noqa: E731
    assert keras_says(lambda: call(model)) == keras_says(lambda: call(model_named("same")))


def test_a_model_that_is_not_compiled_predicts(strategy):
    with strategy.scope():
        model = model_named("same")
    expected = model_named("same").predict(features(), verbose=0)
    np.testing.assert_allclose(model.predict(features(), verbose=0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.long), 2])  # the last has 1
def test_batches_of_fewer_rows_than_replicas(other_strategy, batch_size):
    with other_strategy.scope():
        model = compiled()
    expected = compiled()
    for one in (model, expected):
        history = one.fit(features(3), targets(3), batch_size=batch_size, shuffle=False, verbose=0).history
        history["evaluated"] = one.evaluate(features(3), targets(3), batch_size=batch_size, verbose=0)
        history["predicted"] = one.predict(features(3), batch_size=batch_size, verbose=0)
        one.seen = history
    for name, value in expected.seen.items():
        np.testing.assert_allclose(model.seen[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("num_rows", [1, pytest.param(2, marks=pytest.mark.long), 4])
def test_single_batches_of_few_rows(other_strategy, num_rows):
    with other_strategy.scope():
        model = compiled()
    expected = compiled()
    x, y = features(num_rows), targets(num_rows)
    for method, args in (("train_on_batch", (x, y)), ("test_on_batch", (x, y)), ("predict_on_batch", (x,))):
        got = getattr(model, method)(*args)
        np.testing.assert_allclose(got, getattr(expected, method)(*args), rtol=1e-5, atol=1e-6)


def test_losses_that_are_not_numbers_are_reported_as_keras_does(strategy):
    y = targets()
    y[7] = np.nan
    with strategy.scope():
        model = compiled()
    history, expected = fit(model, features(), y, epochs=2), fit(compiled(), features(), y, epochs=2)
    assert list(history) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.isnan(history[name]), np.isnan(values), err_msg=name)
    assert np.isnan(history["loss"][1])


# --- the bridge ---------------------------------------------------------------------------------------


@pytest.mark.rest
def test_the_methods_of_models_are_keras_own_before_and_after():
    """In every class of models, also with the attributes of a model made outside scopes."""
    program = """
    import inspect
    import keras
    import numpy as np
    from keras import layers

    NAMES = ["compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
    classes = {*keras.Model.__mro__, *keras.Sequential.__mro__, type(keras.Model(x := keras.Input((1,)), layers.Dense(1)(x)))} - {object}

    def functions():
        found = {(cls, name): value for cls in classes for name, value in vars(cls).items() if callable(value)}
        return {**found, **{name: getattr(keras.Model, name) for name in NAMES}}

    def trained(seed=0):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.random.default_rng(1).normal(size=(10, 4)).astype("float32")
        loss = model.fit(x, x[:, :1], batch_size=4, verbose=0).history["loss"]
        loss += [model.evaluate(x, x[:, :1], verbose=0), float(model.predict(x, verbose=0).sum())]
        kinds = {name: type(value).__name__ for name, value in vars(model).items()}
        where = [getattr(model, f"{phase}_function").__class__.__name__ for phase in ("train", "test", "predict")]
        return model, loss, kinds, where

    def assert_as_before():
        _, loss, kinds, where = trained()
        assert (loss, kinds, where) == (first_loss, first_kinds, first_where), (loss, kinds, where)

    before = functions()
    _, first_loss, first_kinds, first_where = trained()
    import replicax as rx
    strategy = rx.OneDeviceStrategy("cpu:0")
    assert functions() == before, "replaced before a scope was opened"
    with strategy.scope():
        inside, loss, _, _ = trained()
    assert np.allclose(loss, first_loss, rtol=1e-5)
    changed = {name for name in NAMES if functions()[name] is not before[name]}
    assert changed == set(NAMES), changed
    for name in NAMES:
        assert functions()[name].__name__ == before[name].__name__
        assert functions()[name].__doc__ == before[name].__doc__
        assert inspect.signature(functions()[name]) == inspect.signature(before[name])
    assert_as_before()
    from replicax._src.keras import bridge
    bridge.uninstall()
    for name in NAMES:
        assert getattr(keras.Model, name) is before[name], name
    assert functions() == before
    assert_as_before()
    bridge.install()
    with strategy.scope():
        inside, loss, _, _ = trained()
    assert np.allclose(loss, first_loss, rtol=1e-5)
    assert_as_before()
    bridge.uninstall()
    assert functions() == before
    print("good")
    """
    assert in_a_process_of_its_own(program).strip() == "good"


def test_replicax_imports_no_keras_and_keras_may_be_imported_after_the_strategy_was_made():
    program = """
    import sys
    import numpy as np
    import replicax as rx
    rx.config.set_local_devices(2)
    strategy = rx.MirroredStrategy()
    with strategy.scope():
        rx.Variable(1.0)
    strategy.run(lambda x: x, args=(1.0,))
    for batch in strategy.experimental_distribute_dataset([np.ones(2)]):
        pass
    print([name for name in ("keras", "tensorflow", "torch", "flax", "optax") if name in sys.modules])
    import keras
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((3, 4)), np.ones((3, 1)), verbose=0)
    print({len(variable.value.sharding.device_set) for variable in model.variables})
    """
    assert in_a_process_of_its_own(program).splitlines() == ["[]", "{2}"]


# --- last, as Keras was of no use in the process where this went wrong ---------------------------------


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_methods_in_a_function_of_replicax(strategy, one_device_loss, method):
    """Their loops are Python's and read weights, so they cannot be traced; TensorFlow says the same of its
    ``tf.function``."""
    with strategy.scope():
        model = compiled("inner")
    args = (features(),) if method == "predict" else (features(), targets())

    @rx.function
    def call():
        getattr(model, method)(*args, verbose=0)

    with pytest.raises(errors.ContextError, match=rf"{method}.*rx\.function"):
        call()
    assert_usable(model, one_device_loss)


# --- numbers of 64 bits -------------------------------------------------------------------------------


def model_of_ids():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), layers.Embedding(4, 2), layers.Flatten(), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model


IDS, TARGETS = np.arange(12).reshape(6, 2) % 4, np.ones((6, 1))


def wrong(array, number):
    array = array.copy()
    array[3, 0] = number
    return array


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.arrays = x, y

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return tuple(array[2 * index : 2 * index + 2] for array in self.arrays)


def memory_mapped(array, path):
    np.save(path, array)
    return np.load(path, mmap_mode="r")


CALLS_OF_KERAS = {
    "arrays": lambda model, strategy, x, y: model.fit(x, y, batch_size=2, verbose=0),
    "validation_data": lambda model, strategy, x, y: model.fit(
        IDS, TARGETS, batch_size=2, validation_data=(x, y), verbose=0
    ),
    "dataset": lambda model, strategy, x, y: model.fit(rx.data.from_arrays((x, y)).batch(2), verbose=0),
    "distributed": lambda model, strategy, x, y: model.fit(
        strategy.experimental_distribute_dataset(rx.data.from_arrays((x, y)).batch(2)), verbose=0
    ),
    "py_dataset": lambda model, strategy, x, y: model.fit(Batches(x, y), verbose=0),
    "generator": lambda model, strategy, x, y: model.fit(
        (Batches(x, y)[i] for i in range(3)), steps_per_epoch=3, shuffle=False, verbose=0
    ),
    "evaluate": lambda model, strategy, x, y: model.evaluate(x, y, batch_size=2, verbose=0),
    "train_on_batch": lambda model, strategy, x, y: model.train_on_batch(x, y),
}


@pytest.mark.parametrize("call", CALLS_OF_KERAS)
def test_a_number_that_jax_would_change_is_an_error(strategy, call):
    with strategy.scope():
        model = model_of_ids()
    run = CALLS_OF_KERAS[call]
    run(model, strategy, IDS, TARGETS)  # 64 bits, which fit: no warning
    for x, y in ((wrong(IDS, 2**40), TARGETS), (IDS, wrong(TARGETS, 1e300))):
        with pytest.raises(errors.NarrowingError):
            run(model, strategy, x, y)


def test_predict_and_mapped_files_are_checked_too(strategy, tmp_path):
    with strategy.scope():
        model = model_of_ids()
    message(
        errors.NarrowingError,
        lambda: model.predict(wrong(IDS, 2**40), verbose=0),
        "x has 1099511627776 at [3, 0]",
    )
    mapped = memory_mapped(wrong(IDS, 2**40), tmp_path / "ids.npy")
    message(errors.NarrowingError, lambda: model.predict(mapped, batch_size=2, verbose=0), "1099511627776")


def test_arrays_of_models_without_a_scope_are_left_to_keras(strategy):
    with strategy.scope():
        model_of_ids()  # from here on Keras's methods are replaced
    assert model_of_ids().predict(wrong(IDS, 2**40), verbose=0).shape == (6, 1)


# --- text -----------------------------------------------------------------------------------------------


class OneBatch(keras.utils.PyDataset):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.batch


def of_two_inputs():
    inputs = {"x": keras.Input((4,), name="x"), "city": keras.Input((1,), name="city")}
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([inputs["x"], inputs["city"]])))
    model.compile("sgd", loss="mse")
    return model


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_text_names_its_argument_or_column_and_what_to_write(num_replicas):
    texts = np.array(["a", "b", "c"] * 4)
    x, y = features(), targets()
    with rx.MirroredStrategy(num_replicas).scope():
        small, two = compiled(), of_two_inputs()
    columns = {"x": x, "city": texts}
    for name, call in {
        "y:": lambda: small.fit(x, texts, verbose=0),
        "x:": lambda: small.predict(texts.astype(object), verbose=0),
        "y[0]": lambda: small.evaluate(x, list(texts), verbose=0),
        "sample_weight:": lambda: small.fit(x, y, sample_weight=texts, verbose=0),
        "validation_data[1]": lambda: small.fit(x, y, validation_data=(x, texts), verbose=0),
        "x['city']": lambda: two.fit(columns, y, verbose=0),
        "x['city'] ": lambda: two.train_on_batch(columns, y),
        "batch[0]['city']": lambda: two.fit(OneBatch((columns, y)), verbose=0),
        "batch[0]['city'] ": lambda: two.predict(OneBatch((columns, y)), verbose=0),
        "[0]['city']": lambda: two.fit(rx.data.from_arrays((columns, y)).batch(4), verbose=0),
    }.items():
        message(
            errors.UnsupportedElementError, call, f"The component {name.strip()}", "np.unique", "token ids"
        )
    assert two.fit({"x": x, "city": y}, y, verbose=0)
