"""The bridge to Keras: its replaced attributes, its removal, and its errors."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import in_a_process_of_its_own, message
from replicax._src.keras import bridge
from replicax._src.vocabulary.errors import KerasLossError, VariableError

ATTRIBUTES_OF_KERAS = """
    def attributes():
        modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("keras.")]
        classes = {cls for module in modules for cls in vars(module).values()
                   if isinstance(cls, type) and cls.__module__.startswith("keras.")}
        found = {(cls, name): value for cls in classes for name, value in vars(cls).items() if name != "__doc__"}
        return found, {cls: cls.__bases__ for cls in classes}

    def changed():
        values, bases = attributes()
        names = {f"{cls.__name__}.{name}" for (cls, name), value in before[0].items() if values[cls, name] is not value}
        return names | {f"{cls.__name__}.__bases__" for cls, value in before[1].items() if bases[cls] != value}
"""
REPLACED = {
    "Variable.__bases__",
    "Optimizer.__bases__",
    "Model.__bases__",
    "LossScaleOptimizer.apply",
    "Loss.__call__",
    "Layer.losses",
    "Layer._maybe_build",
    "L1.__init__",
    "OrthogonalRegularizer.__init__",
    "StatelessScope.__enter__",
    "StatelessScope.add_update",
    "StatelessScope.add_loss",
    "JAXEpochIterator._get_iterator",
}


def test_thirteen_attributes_of_keras_are_replaced_from_the_first_scope_until_uninstall():
    """Importing replicax and making a strategy replaces nothing; uninstalling restores the original functions."""
    program = (
        ATTRIBUTES_OF_KERAS
        + """
    import sys
    import keras
    import numpy as np
    metric = keras.metrics.Mean()
    before = attributes()
    import replicax as rx
    strategy = rx.OneDeviceStrategy("cpu:0")
    assert not changed()
    with strategy.scope():
        layer = keras.layers.Dense(1)
    strategy.run(lambda x: (layer(x), metric.update_state(x))[0], args=(np.ones((1, 2)),))
    replaced = changed()
    from replicax._src.keras import bridge
    bridge.uninstall()
    assert not changed()
    bridge.install()
    assert changed() == {name for name in replaced if not name.endswith(".result")}
    bridge.uninstall()
    assert not changed()
    print(*replaced)
    """
    )
    printed = set(in_a_process_of_its_own(program, "-W", "error").split())
    results = {name for name in printed if name.endswith(".result")}
    assert "Mean.result" in results
    assert printed - results == REPLACED


def test_keras_on_another_backend_raises_in_run_and_before_a_model_is_made():
    program = """
    import keras
    import numpy as np
    assert keras.backend.backend() == "numpy"
    import replicax as rx
    from replicax.errors import KerasBackendError
    strategy = rx.OneDeviceStrategy("cpu:0")
    try:
        strategy.run(lambda x: x + 1, args=(1.0,))
    except KerasBackendError as error:
        print(error)
    try:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.predict(np.ones((2, 4)), verbose=0)
    except KerasBackendError as error:
        print(error)
    print("in a scope:", rx.has_strategy())
    """
    *errors, last = in_a_process_of_its_own(program, "-W", "error", KERAS_BACKEND="numpy").splitlines()
    assert len(errors) == 2
    assert all("'numpy'" in text and "KERAS_BACKEND=jax" in text for text in errors)
    assert last == "in a scope: False"


def test_keras_keeps_values_where_programs_read_them():
    """Fails when Keras renames ``_value``, the private name by which programs read and write values."""
    variable = keras.Variable(1.0, dtype="float32")
    accessor = type(bridge.keras_capture.accessor)()
    accessor.set([variable], [jnp.float32(2.0)])
    assert [float(v) for v in accessor.get([variable])] == [2.0]
    assert float(variable.value) == 2.0


# --- losses that would be R times too large -----------------------------------------------------------


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


LABELS = np.asarray([0, 1], "int32")
LOGITS = np.asarray([[1.0, 2.0], [0.5, 0.0]], "float32")


def under_a_tape(loss_object):
    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            loss = loss_object(LABELS, x)
        return tape.gradient(loss, x)

    return step


def under_jax_grad(loss_object):
    return jax.grad(lambda x: jnp.sum(loss_object(LABELS, x)))


def in_jit_under_jax_grad(loss_object):
    return jax.grad(jax.jit(lambda x: jnp.sum(loss_object(LABELS, x))))


def in_scan_under_jax_grad(loss_object):
    def total(x):
        return jax.lax.scan(lambda c, _: (c + jnp.sum(loss_object(LABELS, x)), None), 0.0, length=1)[0]

    return jax.grad(total)


DIFFERENTIATED = pytest.mark.parametrize(
    "differentiate", [under_a_tape, under_jax_grad, in_jit_under_jax_grad, in_scan_under_jax_grad]
)


@DIFFERENTIATED
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_differentiated_mean_loss_raises_with_the_lines_to_write(strategy, differentiate, reduction):
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    with pytest.raises(KerasLossError) as caught:
        strategy.run(differentiate(loss_object), args=(LOGITS,))
    message = str(caught.value)
    assert "loss_object = keras.losses.SparseCategoricalCrossentropy(..., reduction=None)" in message
    assert "loss = rx.nn.compute_average_loss(loss_object(labels, predictions))" in message
    assert "2 times too large" in message
    assert f"called at {__file__}:" in message


@DIFFERENTIATED
@pytest.mark.parametrize("reduction", [None, "none", "sum"])
def test_other_reductions_are_allowed(strategy, differentiate, reduction):
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    gradient = strategy.run(differentiate(loss_object), args=(LOGITS,))
    expected = jax.grad(
        lambda x: jnp.sum(keras.losses.sparse_categorical_crossentropy(LABELS, x, from_logits=True))
    )(LOGITS)
    np.testing.assert_allclose(gradient.values[0], expected, rtol=1e-5)


def test_a_mean_loss_is_allowed_in_evaluation(strategy):
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    value = strategy.run(lambda x: loss_object(LABELS, x), args=(LOGITS,))
    np.testing.assert_allclose(value.values[0], loss_object(LABELS, LOGITS), rtol=1e-6)


def test_a_mean_loss_is_allowed_after_the_tape_and_with_one_replica(strategy):
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x * 2
        return tape.gradient(y, x), loss_object(LABELS, y)

    strategy.run(step, args=(LOGITS,))
    gradient = rx.OneDeviceStrategy("cpu:0").run(under_a_tape(loss_object), args=(LOGITS,))
    np.testing.assert_allclose(gradient, jax.grad(lambda x: loss_object(LABELS, x))(LOGITS), rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_mean_loss_in_inner_functions_of_an_evaluation_is_allowed(strategy, wrap):
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @wrap
    def evaluate(x):
        return jax.lax.scan(lambda total, _: (total + loss_object(LABELS, x), None), 0.0, length=2)[0]

    value = strategy.run(evaluate, args=(LOGITS,))
    np.testing.assert_allclose(value.values[0], 2 * loss_object(LABELS, LOGITS), rtol=1e-6)


def test_a_mean_loss_beside_a_stop_gradient_is_allowed(strategy):
    """Its value weighs another loss, and is not differentiated."""
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    gradient = strategy.run(
        jax.grad(lambda x: jnp.sum(x) * jax.lax.stop_gradient(loss_object(LABELS, jax.lax.stop_gradient(x)))),
        args=(LOGITS,),
    )
    np.testing.assert_allclose(gradient.values[0], np.full((2, 2), loss_object(LABELS, LOGITS)), rtol=1e-6)


def test_losses_outside_replica_functions_are_keras_own():
    loss_object = keras.losses.MeanSquaredError()
    gradient = jax.grad(lambda x: loss_object(jnp.zeros(2), x))(jnp.asarray([1.0, 2.0]))
    np.testing.assert_allclose(gradient, [1.0, 2.0])


def test_keras_optimizer_says_which_variables_it_accepts(strategy):
    with strategy.scope():
        v = rx.Variable(jnp.float32(1.0), name="w")
        optimizer = keras.optimizers.SGD(0.1)

    def step():
        with rx.GradientTape() as tape:
            loss = v * v
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])

    for call in (lambda: strategy.run(step), lambda: optimizer.apply([jnp.float32(1.0)], [v])):
        message(VariableError, call, "variable 'w', which is an rx.Variable", "keras.Variable(initial_value)")


@pytest.mark.rest
def test_a_scope_in_which_keras_is_imported_ends_with_an_error():
    """Otherwise the model would be trained on one device without an error. The next scope works."""
    program = """
    import replicax as rx
    rx.config.set_local_devices(2)
    strategy = rx.MirroredStrategy()
    try:
        with strategy.scope():
            import keras
            import numpy as np
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    except rx.errors.KerasScopeError as error:
        print("import keras" in str(error).lower())
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((5, 3)), np.ones(5), verbose=0)
    print(len(model.weights[0].value.sharding.device_set))
    """
    printed = in_a_process_of_its_own(program, "-W", "error", KERAS_BACKEND="jax")
    assert printed.split() == ["True", "2"]


@pytest.mark.rest
def test_keras_may_be_imported_between_a_scope_and_the_next():
    program = """
    import sys
    import replicax as rx
    rx.config.set_local_devices(2)
    finders = list(sys.meta_path)
    scope = rx.MirroredStrategy().scope()
    with scope:
        rx.Variable(1.0)
    assert sys.meta_path == finders, "replicax looks on at imports"
    import keras
    with scope:
        layer = keras.layers.Dense(1)
        layer.build((None, 3))
    print(len(layer.kernel.value.sharding.device_set))
    """
    assert in_a_process_of_its_own(program, "-W", "error", KERAS_BACKEND="jax").strip() == "2"


def test_missing_framework_raises_import_error():
    program = """
    import sys
    import replicax as rx
    with rx.OneDeviceStrategy("cpu:0").scope():
        pass
    sys.modules["keras"] = None
    try:
        import keras
    except ImportError as error:
        print(type(error).__name__)
    assert "replicax._src.keras.bridge" not in sys.modules
    """
    assert (
        in_a_process_of_its_own(program, "-W", "error", KERAS_BACKEND="jax").strip() == "ModuleNotFoundError"
    )


def test_learning_rate_set_by_its_name_in_keras_2_warns_once_for_a_line(caplog):
    class Own(keras.optimizers.SGD):
        def __init__(self, lr):
            super().__init__(0.1)
            self.lr = lr

    with rx.MirroredStrategy(2).scope():
        optimizer = keras.optimizers.SGD(0.1)
        Own(0.2)
    optimizer.learning_rate = 0.5
    assert not caplog.messages
    for _ in range(2):
        optimizer.lr = 0.01
    (told,) = caplog.messages
    assert "test_bridge.py" in told
    assert "optimizer.learning_rate = value" in told
    assert float(optimizer.learning_rate) == 0.5


def test_a_layer_that_is_frozen_after_training_needs_a_new_optimizer():
    x = np.ones((4, 2), np.float32)
    with rx.MirroredStrategy(2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], verbose=0)
    model.layers[0].trainable = False
    message(
        VariableError,
        lambda: model.fit(x, x[:, :1], verbose=0),
        f"Optimizer {model.optimizer.name!r}",
        "4 variables",
        "compile",
    )
    frozen = np.asarray(model.layers[0].kernel.value)
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1], verbose=0)
    np.testing.assert_array_equal(model.layers[0].kernel.value, frozen)
