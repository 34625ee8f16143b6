"""Names of older versions: TensorFlow 2.0 to 2.3, tf.compat.v1, and aliases such as tf.losses."""

import pytest

import replicax as rx
from migrated import becomes, marks, rewritten
from replicax._migrate import reach, table

HEAD = "import tensorflow as tf\n"
KERAS = "from tensorflow import keras\nimport tensorflow as tf\n"
OWNERS = [
    *(rx.Strategy, rx.StrategyExtended, rx.ReplicaContext, rx.coordinator.ClusterCoordinator, rx),
    *(rx.ParameterServerStrategy,),
]


def is_known(name):
    """True for a name that replicax has, or that the table replaces or explains."""
    return any(hasattr(owner, name) for owner in OWNERS) or table.find(f".{name}") is not None


def test_each_method_that_makes_a_step_or_a_dataset_is_in_replicax_or_in_the_tables():
    makers = reach.DATASET_MAKERS - {"DatasetCreator"}
    assert [name for name in sorted(makers | reach.STEP_METHODS) if not is_known(name)] == []
    assert table.find("tf.keras.utils.experimental.DatasetCreator")
    names = [*reach.STEP_DECORATORS, *(base.rstrip(".") for base in reach.STEP_BASES)]
    assert [name for name in names if table.find(name) is None and not is_module(name)] == []


def is_module(name):
    return any(row.name.startswith(f"{name}.") for row in table.rows())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("strategy.experimental_run_v2(step, args=(x,))", "strategy.run(step, args=(x,))"),
        ("strategy.experimental_run_v2(step, (x,))", "strategy.run(step, args=(x,))"),
        ("strategy.experimental_run_v2(fn=step, args=(x,))", "strategy.run(step, args=(x,))"),
        ("tf.losses.MSE(x, y)", "keras.losses.mean_squared_error(x, y)"),
        (
            "tf.losses.MeanSquaredError(reduction=tf.losses.Reduction.NONE)",
            "keras.losses.MeanSquaredError(reduction=None)",
        ),
        ("tf.losses.Reduction.SUM", '"sum"'),
        ("tf.metrics.Mean('loss')", "keras.metrics.Mean('loss')"),
        ("tf.metrics.mean_squared_error(x, y)", "keras.metrics.mean_squared_error(x, y)"),
        ("tf.optimizers.Adam(lr=0.1)", "keras.optimizers.Adam(learning_rate=0.1)"),
        (
            "tf.optimizers.schedules.ExponentialDecay(1, 2, 3)",
            "keras.optimizers.schedules.ExponentialDecay(1, 2, 3)",
        ),
        ("tf.initializers.GlorotUniform()", "keras.initializers.GlorotUniform()"),
        ("tf.compat.v1.losses.mean_squared_error(x, y)", "ops.mean(ops.square(y - x))"),
        (
            "tf.compat.v1.reduce_sum(x, reduction_indices=[1], keep_dims=True)",
            "ops.sum(x, axis=(1,), keepdims=True)",
        ),
        ("tf.compat.v1.log(x)", "ops.log(x)"),
        ("tf.log(x)", "ops.log(x)"),
        ("tf.compat.v1.to_float(x)", 'ops.cast(x, "float32")'),
        ("tf.compat.v1.Variable(1.0)", "rx.Variable(1.0)"),
        ("tf.compat.v1.assign_add(v, 1.0)", "v.assign_add(1.0)"),
        ("tf.compat.v1.nn.xw_plus_b(x, w, b)", "ops.matmul(x, w) + b"),
        ("tf.compat.v1.set_random_seed(3)", "keras.utils.set_random_seed(3)"),
        ("tf.compat.v1.logging.info('a')", "logging.info('a')"),
        (
            "tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)",
            "logging.getLogger().setLevel(logging.INFO)",
        ),
        (
            "tf.compat.v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True)",
            "keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)",
        ),
        ("tf.compat.v1.train.AdamOptimizer()", "keras.optimizers.Adam(0.001, epsilon=1e-08)"),
        ("tf.keras.mixed_precision.experimental.set_policy(p)", "keras.mixed_precision.set_global_policy(p)"),
        ("m.fit_generator(data, 5, epochs=2, workers=4)", "m.fit(data, steps_per_epoch=5, epochs=2)"),
        ("m.predict_generator(data, steps=5)", "m.predict(data, steps=5, verbose=0)"),
    ],
)
def test_old_names(before, after):
    assert becomes(f"{KERAS}r = {before}\n").endswith(f"\nr = {after}\n")
    assert not marks(f"{KERAS}r = {before}\n")


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("from tensorflow import losses\nlosses.MSE", "keras.losses.mean_squared_error"),
        ("from tensorflow.optimizers import Adam\nAdam(1)", "from keras.optimizers import Adam\nAdam(1)"),
        ("import tensorflow.compat.v1 as tf\ntf.square(x)", "import jax.numpy as jnp\njnp.square(x)"),
    ],
)
def test_imports_of_old_names(line, after):
    assert becomes(line).endswith(after)


def test_each_name_of_compat_v1_without_a_counterpart_is_marked_at_its_line():
    text = "import tensorflow.compat.v1 as tf\nx = tf.square(2.0)\nw = tf.get_variable('w')\nwith tf.variable_scope('a'): pass\n"
    assert marks(text) == [("tf.compat.v1", 3), ("tf.compat.v1", 4)]


def test_dropout_of_tensorflow_1_is_not_that_of_2():
    """Its second argument was the probability to keep."""
    assert [rule for rule, _ in marks(HEAD + "x = tf.compat.v1.nn.dropout(x, 0.9)\n")] == ["tf.compat.v1"]


@pytest.mark.parametrize(
    "text",
    [
        "optimizer = keras.optimizers.SGD(0.1)\noptimizer.get_weights()",
        "optimizer = keras.optimizers.SGD(0.1)\noptimizer.get_slot(v, 'm')",
        "model = keras.Sequential()\nmodel.predict_classes(x)",
        "model = keras.Sequential()\nmodel.reset_states()",
        "class C(keras.layers.Layer):\n    def call(self, x):\n        self.add_metric(x, name='x')",
    ],
)
def test_methods_that_keras_3_does_not_have_are_marked(text):
    assert [rule for rule, _ in marks(f"{KERAS}{text}\n")] == ["keras"]


@pytest.mark.parametrize("alias", ["v1 = tf.compat.v1", "compat = tf.compat\nv1 = compat.v1"])
def test_a_name_of_the_package_of_tensorflow_1_is_not_marked(alias):
    """It stays while something below it stays, and goes with the last name that changes."""
    stays = rewritten(
        f"import tensorflow as tf\n{alias}\nwith v1.gfile.GFile('a') as f:\n  print(f.read())\n"
    )
    assert not stays.marks
    assert alias in stays.code.decode()
    goes = rewritten(f"import tensorflow as tf\n{alias}\nx = v1.to_float(3)\ny = v1.arg_max(x, 0)\n")
    assert not goes.marks
    assert "v1" not in goes.code.decode()


def test_reductions_of_tensorflow_1_are_read_through_any_alias():
    code = (
        "import tensorflow as tf\nimport tensorflow.compat.v1 as tf1\n"
        "a = tf1.losses.mean_squared_error(x, y, reduction=tf1.losses.Reduction.NONE)\n"
        "b = tf.compat.v1.losses.absolute_difference(x, y, reduction=tf.compat.v1.losses.Reduction.SUM)\n"
        "c = tf1.losses.mean_squared_error(x, y, reduction=tf1.losses.Reduction.MEAN)\n"
    )
    done = rewritten(code)
    assert not done.marks
    assert done.code.decode().splitlines()[-3:] == [
        "a = jnp.square(y - x)",
        "b = jnp.sum(jnp.abs(y - x))",
        "c = jnp.mean(jnp.square(y - x))",
    ]
