"""The functions that run in a step, and those that run in a dataset."""

import libcst as cst
import pytest

from migrated import sources
from replicax._migrate.reach import Reach


def contexts(**texts):
    """The names of functions by context; lambdas are named by their line."""
    program = sources(**texts)
    reach = Reach(program)

    def name(function):
        if isinstance(function, cst.FunctionDef):
            return function.name.value
        source = next(source for source in program.sources if function in source.functions)
        return f"lambda {source.line_of(function)}"

    return {word: {name(f) for f in getattr(reach, word)} for word in ("step", "data", "replica", "traced")}


def of(text):
    return contexts(program="import tensorflow as tf\n" + text)


FUNCTIONS = "def g(x): return x\ndef f(x): return g(x)\ndef other(x): return x\n"


@pytest.mark.parametrize(
    "use",
    [
        "tf.data.Dataset.range(3).map(f)",
        "ds = tf.data.Dataset.range(3)\nds = ds.batch(2)\nds.filter(f)",
        "tf.data.Dataset.from_generator(f, tf.int32)",
        "def load(ds): return ds.interleave(f, cycle_length=2)",
        "import tensorflow_datasets as tfds\ntfds.load('x')['train'].map(f)",
        "import functools\ntf.data.Dataset.range(3).map(functools.partial(f, y=1))",
        "tf.data.Dataset.range(3).map(lambda x: f(x))",
        "tf.data.Dataset.range(3).reduce(0, f)",
        "strategy.distribute_datasets_from_function(f)",
        "coordinator.create_per_worker_dataset(f)",
        "def make():\n  return f\ntf.data.Dataset.range(3).map(make())",
        "h = f\ntf.data.Dataset.range(3).map(h)",
        "class A:\n  def m(self, x): return f(x)\na = A()\ntf.data.Dataset.range(3).map(a.m)",
        "class A:\n  def __call__(self, x): return f(x)\ntf.data.Dataset.range(3).map(A())",
        "def make(ds, parse): return ds.map(parse)\nmake(1, f)",
        "tf.compat.v1.data.Dataset.range(3).map(f)",
        "import tensorflow.compat.v1 as tf1\nds = tf1.data.Dataset.range(3)\nds.map(f)",
        "tfd = tf.data\ntfd.Dataset.range(3).map(f)",
        "from tensorflow.data import Dataset as D\nD.range(3).map(f)",
        "ds = tf.keras.utils.image_dataset_from_directory('a')\nds.map(f)",
        "import keras\nkeras.preprocessing.text_dataset_from_directory('a').map(f)",
        "import tensorflow_datasets as tfds\nb = tfds.builder('x')\nb.as_dataset().map(f)",
        "s = tf.distribute.MirroredStrategy()\ns.experimental_make_numpy_dataset(1).map(f)",
        "def make(): return tf.data.Dataset.range(3)\nds = make()\nds.map(f)",
        "tf.data.Dataset.range(3).map(lambda x: tf.py_function(f, [x], tf.int32))",
        "class P:\n  def __init__(self, parse): self.p = parse\n  def m(self, ds): return ds.map(self.p)\nP(parse=f)",
    ],
)
def test_functions_of_datasets(use):
    found = of(FUNCTIONS + use)
    assert {"f", "g"} <= found["data"]
    assert "other" not in found["data"]
    assert not {"f", "g"} & found["step"]


@pytest.mark.parametrize(
    "use",
    [
        "jax.lax.map(f, x)",
        "import multiprocessing\npool = multiprocessing.Pool()\npool.map(f, x)",
        "import multiprocessing\nmultiprocessing.Pool().map(f, x)",
        "map(f, x)",
        "import absl.app\nabsl.app.run(f)",
        "strategy.reduce(tf.distribute.ReduceOp.SUM, f(x), axis=None)",
    ],
)
def test_other_functions_named_map_are_not_datasets(use):
    found = of("import jax\n" + FUNCTIONS + use)
    assert not found["data"]
    assert not found["step"]


@pytest.mark.parametrize(
    "use",
    [
        "strategy.run(f, args=(x,))",
        "tf.function(f)",
        "@tf.function\ndef h(x): return f(x)",
        "@tf.function(jit_compile=True)\ndef h(x): return f(x)",
        "coordinator.schedule(f, args=(x,))",
        "class L(tf.keras.layers.Layer):\n  def call(self, x): return f(x)",
        "class B(tf.keras.Model): pass\nclass M(B):\n  def train_step(self, x): return f(x)",
        "from keras import Metric\nclass M(Metric):\n  def update_state(self, x): f(x)",
        "model.compile('sgd', f)",
        "model.compile(optimizer='sgd', loss='mse', metrics=['mae', f])",
        "class T:\n  def step(self, x): return f(x)\n  def train(self): strategy.run(self.step, args=(1,))",
        "class T:\n  def step(self, x): return f(x)\nt = T()\nstrategy.run(t.step)",
        "import functools\nstrategy.run(functools.partial(f, 1))",
        "def make():\n  def inner(x): return f(x)\n  return inner\ninner = make()\nstrategy.run(inner)",
    ],
)
def test_functions_of_steps(use):
    found = of(FUNCTIONS + use)
    assert {"f", "g"} <= found["step"]
    assert "other" not in found["step"]
    assert not found["data"]


def test_configuring_a_layer_is_not_a_step():
    assert (
        of(FUNCTIONS + "class L(tf.keras.layers.Layer):\n  def get_config(self): return f(1)")["step"]
        == set()
    )


def test_callback_is_not_a_step():
    assert not of("class C(tf.keras.callbacks.Callback):\n  def on_epoch_end(self, e): pass")["step"]


def test_names_are_followed_to_other_files():
    found = contexts(
        package__model="import tensorflow as tf\ndef loss(x): return tf.square(x)\ndef parse(x): return x",
        package__train="from .model import loss\nfrom package import model\nstrategy.run(lambda x: loss(x))\n"
        "import tensorflow as tf\ntf.data.Dataset.range(2).map(model.parse)",
    )
    assert found["step"] == {"loss", "lambda 3"}
    assert found["data"] == {"parse"}


def test_a_shadowed_name_is_another_function():
    found = of("def f(x): return x\ndef g():\n  def f(x): return x + 1\n  strategy.run(f)\n")
    program_step = found["step"]
    assert program_step == {"f"}
    program = sources(program="def f(x): return x\ndef g():\n  def f(x): return x + 1\n  strategy.run(f)\n")
    (step,) = Reach(program).step
    assert program.sources[0].line_of(step) == 3


def test_all_functions_of_one_name_are_steps():
    text = "def make(a):\n  if a:\n    def f(x): return x\n  else:\n    def f(x): return g(x)\n  strategy.run(f)\n"
    program = sources(program="def g(x): return x\n" + text)
    assert {program.sources[0].line_of(step) for step in Reach(program).step} == {1, 4, 6}


def test_eager_code_of_tensorflow_is_recognised():
    found = of(
        FUNCTIONS + "strategy.run(f)\n@tf.function\ndef step(x): return strategy.run(other, args=(x,))"
    )
    assert found["replica"] == {"f", "g", "other"}
    assert found["traced"] == {"step", "other"}


def test_a_function_that_is_only_given_to_a_dataset_is_not_reached_from_a_step():
    found = of(
        FUNCTIONS + "@tf.function\ndef step():\n  return tf.data.Dataset.range(3).map(f).map(lambda x: x)\n"
    )
    assert found["step"] == {"step"}
    assert found["data"] == {"f", "g", "lambda 7"}


@pytest.mark.timeout(60)
def test_a_name_that_is_assigned_many_times_is_followed_in_reasonable_time():
    lines = ["ds = tf.data.Dataset.range(3)"]
    lines += [f"def f{i}(x): return x\nds = ds.map(f{i})\ny = y.map(g{i})" for i in range(150)]
    assert of("\n".join(lines))["data"] >= {f"f{i}" for i in range(150)}
