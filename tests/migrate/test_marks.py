"""Code that is marked, and code that is not."""

import pytest

from migrated import becomes, marks, rewritten
from replicax._migrate.source_files import find_files, migrate

HEAD = "import tensorflow as tf\nimport numpy as np\nimport time\nstrategy = tf.distribute.get_strategy()\n"


def rules(text):
    return [rule for rule, _ in marks(HEAD + text)]


RUN = "strategy.run(step, args=(x,))\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("strategy.reduce(tf.distribute.ReduceOp.MEAN, x, axis=None)\n", "mean"),
        ("strategy.reduce('MEAN', x, axis=None)\n", "mean"),
        ("def step(x):\n  loss = tf.reduce_mean(x)\n" + RUN, "mean"),
        (
            "def step(x):\n  with tf.GradientTape() as t:\n    cost = tf.reduce_mean(x)\n    t.gradient(cost, v)\n"
            + RUN,
            "mean",
        ),
        (
            "def cost(x):\n  y = tf.reduce_mean(x)\n  return y\ndef step(x):\n  with tf.GradientTape() as t:\n"
            "    a = cost(x) + 1\n  t.gradient(a, v)\n" + RUN,
            "mean",
        ),
        ("bce = tf.keras.losses.BinaryCrossentropy()\ndef step(x):\n  return bce(x, x)\n" + RUN, "mean"),
        ("tf.reduce_mean(tf.constant([1, 2]))\n", "integers"),
        ("i = tf.cast(x, tf.int32)\ntf.reduce_mean(i, axis=0)\n", "integers"),
        ("count = 0\ndef step(x):\n  global count\n  count += 1\n" + RUN, "side effect"),
        (
            "class A:\n  def step(self, x):\n    self.n += 1\n  def go(self): strategy.run(self.step, args=(x,))\n",
            "side effect",
        ),
        ("def step(x):\n  print(x)\n" + RUN, "side effect"),
        ("def step(x):\n  return x + np.random.normal()\n" + RUN, "side effect"),
        ("def step(x):\n  return time.time()\n" + RUN, "side effect"),
        ("seen = []\ndef step(x):\n  seen.append(x)\n" + RUN, "side effect"),
        ("v = tf.Variable(0.0)\ndef step(x):\n  v.assign_add(x)\n" + RUN, "scope"),
        ("x = tf.ones((2,), tf.int64)\nx *= 0x9E3779B1\n", "int64"),
        (
            "try:\n  r = tf.distribute.cluster_resolver.TPUClusterResolver('local')\nexcept Exception:\n  pass\n",
            "fallback",
        ),
        ("s = tf.distribute.MirroredStrategy()\no = tf.keras.optimizers.Adam(clipnorm=1.0)\n", "clipping"),
        (
            "s = tf.distribute.experimental.TPUStrategy(r)\no = tf.optimizers.SGD(0.1, global_clipnorm=1)\n",
            "clipping",
        ),
        ("x = tf.ones((2,), tf.int64)\nx += 1 << 40\n", "int64"),
        ("x = tf.ones((2,), tf.int64)\nx %= 2**31\n", "int64"),
        ("with tf.GradientTape() as tape:\n  y = x * x\nprint(tape.gradient(y, x))\n", "tape"),
        ("def train(x):\n  with tf.GradientTape() as tape:\n    print(x)\ntrain(1)\n", "tape"),
        ("def loss(x):\n  print(x)\nwith tf.GradientTape() as tape:\n  loss(x)\n", "side effect"),
        ("@tf.function\ndef step(x):\n  if tf.reduce_any(x):\n    x = 1\n  return x\n", "condition"),
        (
            "class S(tf.keras.optimizers.schedules.LearningRateSchedule):\n  def __call__(self, step):\n    return 1.0 if step < 3 else 2.0\n",
            "condition",
        ),
        (
            "class S(tf.keras.optimizers.schedules.LearningRateSchedule):\n  def __call__(self, step):\n    number = tf.cast(step, tf.float32)\n    if number < 3: return 1.0\n",
            "condition",
        ),
        (
            "class S(tf.keras.optimizers.schedules.LearningRateSchedule):\n  def __call__(self, step):\n    number = float(step)\n    if number < 3: return 1.0\n",
            "condition",
        ),
        ("@tf.function\ndef step(x):\n  y = tf.reduce_sum(x)\n  while y > 0:\n    y = 0\n", "condition"),
        (
            "@tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32)])\ndef step(x): pass\n",
            "sizes",
        ),
        (
            "signature = [tf.TensorSpec(shape=[None, 3, None], dtype=tf.float32), tf.TensorSpec([])]\n"
            "class A(tf.Module):\n  @tf.function(input_signature=signature)\n  def step(self, x, n): pass\n",
            "sizes",
        ),
        ("step = tf.function(f, input_signature=(tf.TensorSpec(None, tf.float32),))\n", "sizes"),
        (
            "table = tf.lookup.StaticHashTable(a, 0)\n@tf.function\ndef step(x): return table.lookup(x)\n",
            "tf.lookup",
        ),
        (
            "class M(tf.keras.Model):\n  def __init__(self): self.table = tf.lookup.StaticHashTable(a, 0)\n"
            "  def call(self, x): return self.table.lookup(x)\n",
            "tf.lookup",
        ),
        ("from tensorflow.nn import *\n", "star"),
        ("tf.no_such_name\n", "unknown"),
    ],
)
def test_marked_code(text, rule):
    assert rule in rules(text)


@pytest.mark.parametrize(
    "text",
    [
        "strategy.reduce(tf.distribute.ReduceOp.SUM, x, axis=None)\n",
        "def step(x):\n  loss = tf.reduce_mean(x, axis=-1)\n" + RUN,
        "def step(x):\n  accuracy = tf.reduce_mean(x)\n  t.gradient(x, v)\n" + RUN,
        "def step(x):\n  n = 0\n  n += 1\n" + RUN,
        "bce = tf.keras.losses.BinaryCrossentropy(reduction='none')\ndef step(x):\n  return bce(x, x)\n"
        + RUN,
        "bce = tf.keras.losses.BinaryCrossentropy()\nbce(1, 1)\n",
        "@tf.function\ndef step(x):\n  print('tracing')\n" + RUN,
        "def step(x):\n  local = []\n  local.append(x)\n" + RUN,
        "print('host')\n",
        "class S(tf.keras.optimizers.schedules.LearningRateSchedule):\n  def __call__(self, step):\n    if self.steps > 3: return 1.0\n    return step\n",
        "class S(tf.keras.optimizers.schedules.LearningRateSchedule):\n  def __call__(self, step):\n    if step is None: return 1.0\n    return step\n",
        "with strategy.scope():\n  v = tf.Variable(0.0)\ndef step(x):\n  v.assign_add(x)\n" + RUN,
        "v = tf.Variable(0.0)\nprint(v)\n",
        "tf.data.Dataset.range(3).map(lambda x: tf.cast(x, tf.int64))\n",
        "r = tf.distribute.cluster_resolver.TPUClusterResolver('local')\n",
        "try:\n  r = tf.distribute.cluster_resolver.TPUClusterResolver()\nexcept ValueError:\n  pass\n",
        "try:\n  r = tf.distribute.cluster_resolver.TPUClusterResolver(tpu='')\nexcept ValueError:\n  pass\n",
        "try:\n  r = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)\nexcept ValueError:\n  pass\n",
        "s = tf.distribute.MirroredStrategy()\no = tf.keras.optimizers.Adam(clipnorm=None)\n",
        "s = tf.distribute.OneDeviceStrategy('/cpu:0')\no = tf.keras.optimizers.Adam(clipnorm=1.0)\n",
        "labels = tf.ones((2,), tf.int64)\nx = 2**30 + 0x7FFFFFFF + (1 << 5)\n",
        "@tf.function\ndef step(x):\n  with tf.GradientTape() as tape:\n    pass\n",
        "@tf.function\ndef step(x, training):\n  if training:\n    x = 1\n  return x\n",
        "@tf.function\ndef step(x):\n  if tf.shape(x)[0] > 1:\n    x = 1\n  return x\n",
        "if tf.reduce_sum(x) > 0:\n  pass\n",
        "@tf.function\ndef step(x, y=None):\n  if y is None:\n    y = tf.ones(2)\n  return y\n",
        "def f(x):\n  if tf.equal(x, 1):\n    return x\n  return x\ntf.data.Dataset.range(3).map(f)\n",
        "@tf.function(input_signature=[tf.TensorSpec((None, 3)), tf.TensorSpec([])])\ndef step(x, n): pass\n",
        "@tf.function(input_signature=dataset.element_spec)\ndef step(x): pass\n",
        "@tf.function(input_signature=[tf.TensorSpec((None, None))])\ndef f(x): return x\nds = tf.data.Dataset.range(3).map(f)\n",
    ],
)
def test_unmarked_code(text):
    assert not {
        "mean",
        "sizes",
        "side effect",
        "scope",
        "int64",
        "clipping",
        "tape",
        "condition",
        "integers",
    } & set(rules(text))


TAPE = "@tf.function\ndef step(x):\n  with tf.GradientTape() as t: y = f(x)\n  grads = t.gradient(y, vs)\n"
EMBEDDING = "layer = tf.keras.layers.Embedding(3, 2)\n"
CLIP = "  grads, _ = tf.clip_by_global_norm(grads, 1.0)\n"
EACH = "  grads = [tf.clip_by_norm(g, 1.0) for g in grads]\n"


@pytest.mark.parametrize(
    "text",
    [
        EMBEDDING + TAPE + CLIP,
        EMBEDDING + TAPE + EACH,
        EMBEDDING + TAPE + "  grads = [tf.clip_by_norm(g, 1.0) if g is not None else None for g in grads]\n",
        EMBEDDING + TAPE + "  return tf.linalg.global_norm(grads)\n",
        EMBEDDING
        + TAPE
        + "  return tf.compat.v1.global_norm(grads), tf.compat.v1.clip_by_norm(grads[0], 1.0)\n",
        EMBEDDING + TAPE + "  pairs = [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in zip(grads, vs)]\n",
        EMBEDDING
        + TAPE
        + "  for g, v in zip(grads, vs): o.apply_gradients([(tf.clip_by_norm(g, 1.0), v)])\n",
        EMBEDDING + TAPE + "  grads = tf.distribute.get_replica_context().all_reduce('SUM', grads)\n" + CLIP,
        EMBEDDING
        + "def clip(values): return tf.clip_by_global_norm(values, 1.0)[0]\n"
        + TAPE
        + "  return clip(grads)\n",
        EMBEDDING + "def clip(gradients): return tf.clip_by_global_norm(gradients, 1.0)[0]\n",
        "class E(tf.keras.layers.Embedding): pass\n" + TAPE + CLIP,
        "table = tf.Variable(tf.ones([3, 2]))\ndef f(x): return tf.gather(table, x)\n" + TAPE + CLIP,
        "table = tf.Variable(tf.ones([3, 2]))\ndef f(x): return tf.gather(table.read_value(), x, axis=0)\n"
        + TAPE
        + CLIP,
        "table = tf.Variable(tf.ones([3, 2]))\ndef f(x): return tf.gather_nd(table, x)\n" + TAPE + CLIP,
        "def f(x, table): return tf.nn.embedding_lookup(table, x)\n" + TAPE + CLIP,
        "class L(tf.keras.layers.Layer):\n  def build(self, shape): self.table = self.add_weight(shape=(3, 2))\n"
        "  def call(self, x): return tf.gather(self.table, x)\n" + TAPE + CLIP,
    ],
)
def test_a_clipped_gradient_of_a_table_that_is_looked_up_is_marked_once(text):
    assert rules(text).count("clipping") == 1


@pytest.mark.parametrize(
    "text",
    [
        TAPE + CLIP + EACH,
        "layer = tf.keras.layers.Embedding(3, 2, trainable=False)\n" + TAPE + CLIP,
        EMBEDDING + TAPE + "  grads = [tf.convert_to_tensor(g) for g in grads]\n" + CLIP,
        EMBEDDING + TAPE + "  grads = [tf.clip_by_norm(tf.convert_to_tensor(g), 1.0) for g in grads]\n",
        EMBEDDING + TAPE + "  return tf.clip_by_value(x, 0.0, 1.0), tf.clip_by_norm(x * grads[0], 1.0)\n",
        EMBEDDING + TAPE + "  for v in vs: v.assign(tf.clip_by_value(v, -0.01, 0.01))\n",
        EMBEDDING + "ds = tf.data.Dataset.range(3).map(lambda grad: tf.clip_by_value(grad, 0, 1))\n",
        "table = tf.Variable(tf.ones([3, 2]), trainable=False)\ndef f(x): return tf.gather(table, x)\n" + TAPE + CLIP,
        "table = tf.constant([1.0])\ndef f(x): return tf.nn.embedding_lookup(table, x)\n" + TAPE + CLIP,
        "w = tf.Variable(tf.ones([3, 2]))\ndef f(x):\n  y = tf.matmul(x, w)\n  return tf.gather(y, x)\n" + TAPE + CLIP,
        "class L(tf.keras.layers.Layer):\n  def build(self, shape): self.table = self.add_weight(shape=(3, 2))\n"
        "  def call(self, x): return tf.nn.embedding_lookup(self.table, x)\n"
        "  def logits(self, x): return tf.matmul(x, self.table, transpose_b=True)\n" + TAPE + CLIP,
        "w = tf.Variable(tf.ones([3, 2]))\ndef f(x): return tf.gather(w, x, axis=1)\n" + TAPE + CLIP,
        "w = tf.Variable(tf.ones([3, 2]))\ndef f(x): return tf.gather(w * 2, x)\n" + TAPE + CLIP,
        "w = tf.Variable(tf.ones([3, 2]))\nds = tf.data.Dataset.range(3).map(lambda x: tf.nn.embedding_lookup(w, x))\n"
        + TAPE + CLIP,
    ],
)  # fmt: skip
def test_other_clipping_is_not_marked(text):
    assert "clipping" not in rules(text)


@pytest.mark.parametrize(
    "text",
    [
        "tf.reduce_mean(tf.constant([1.0, 2.0]))\n",
        "tf.reduce_mean(tf.constant([1, 2], dtype=tf.float32))\n",
        "tf.reduce_mean(tf.cast(tf.range(3), tf.float32))\n",
        "tf.data.Dataset.range(3).map(lambda x: tf.reduce_mean(tf.constant([1, 2])))\n",
    ],
)
def test_means_of_floats_are_not_marked(text):
    assert "integers" not in rules(text)


def test_mark_is_above_its_statement_and_wraps():
    code = becomes(
        "import tensorflow as tf\n"
        "def f(x):\n"
        "    # mine\n"
        "    y = [\n"
        "        tf.no_such_name_with_a_long_name_that_goes_on_and_on_and_on.and_on_and_on_and_on_and_on(x),\n"
        "    ]\n"
    )
    assert code.splitlines()[2:6] == [
        "    # mine",
        "    # replicax migrate: the table has no row for",
        "    #   tf.no_such_name_with_a_long_name_that_goes_on_and_on_and_on.and_on_and_on_and_on_and_on.",
        "    y = [",
    ]
    assert all(len(line) <= 110 for line in code.splitlines())


@pytest.mark.parametrize(
    "ok",
    [
        "# replicax migrate: ok\ntf.no_such_name(1)\n",
        "# mine\n# replicax migrate: OK, it is not reached\n# more\ntf.no_such_name(1)\n",
        "tf.no_such_name(1)  # replicax migrate: ok\n",
    ],
)
def test_ok_silences_the_marks_of_a_statement(ok):
    assert marks("import tensorflow as tf\n" + ok) == []
    assert becomes("import tensorflow as tf\n" + ok).endswith(ok)
    assert marks("import tensorflow as tf\n" + ok + "tf.no_such_name(2)\n")


def test_ok_above_the_first_statement():
    assert marks("# head\n# replicax migrate: ok\nfrom tensorflow import *\n") == []


def test_mark_of_an_import_stays_with_it_when_others_are_added(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("# mine\nfrom tensorflow.raw_ops import *\nimport tensorflow as tf\ntf.keras.Model\n")
    for is_first in (True, False):
        (file,) = files = find_files([path])
        migrate(files)
        assert (file.new == file.old) == (not is_first)
        path.write_bytes(file.new)
    text = path.read_text()
    assert text.startswith("# mine\nimport os\n\nos.environ.setdefault(")
    assert "Import each by name.\nfrom tensorflow.raw_ops import *\nimport keras\n" in text


def test_existing_mark_is_counted_once_and_keeps_its_place():
    first = becomes("import tensorflow as tf\n\ntf.no_such_name(1)\nwith tf.GradientTape():\n  print(1)\n")
    assert marks(first) == [("unknown", 4), ("standing", 6)]
    assert marks(first.replace("import tensorflow", "x = 1\nimport tensorflow")) == [
        ("unknown", 5),
        ("standing", 7),
    ]


def test_one_mark_for_a_function_of_both_contexts():
    text = (
        "def f(x):\n  return tf.square(tf.cast(x, tf.float32))\n"
        "tf.data.Dataset.range(3).map(f)\n@tf.function\ndef step(x): return f(x)\n"
    )
    assert rules(text) == ["both"]
    assert "return tf.square(tf.cast(x, tf.float32))" in becomes(HEAD + text)
    plain = text.replace("tf.square(tf.cast(x, tf.float32))", "x * 2")
    assert rules(plain) == []


SERVER = "server = tf.distribute.Server(spec)\n"


@pytest.mark.parametrize(
    "call", ["tf.no_such_name()", "tf.compat.v1.get_variable('a')", "tf.gather(x, i, batch_dims=2)"]
)
def test_what_stays_of_tensorflow_is_imported_by_each_server_and_its_mark_says_so(call):
    says = "ntil then each server imports TensorFlow and Keras besides JAX"
    (mark,) = rewritten(f"import tensorflow as tf\n{SERVER}{call}\n").marks
    assert says in mark.text
    (mark,) = rewritten(f"import tensorflow as tf\n{call}\n").marks
    assert says not in mark.text


def test_a_mark_of_int64_comes_once_also_where_a_later_line_keeps_it():
    text = "import tensorflow as tf\nx = tf.cast(y, tf.int64) * 2**40\nspec = tf.io.FixedLenFeature([], tf.int64)\n"
    assert [rule for rule, _ in marks(text)] == ["int64"]  # and a second run has it once, too


MODEL_OF_TWO = """
import tensorflow as tf
class M(tf.keras.Model):
    def call(self, x):
        return self.a(x), self.b(x)
    def train_step(self, data):
        y_pred, other = self(data[0])
        loss = self.compiled_loss(data[1], y_pred)
"""


def test_one_of_several_outputs_for_the_compiled_loss_is_marked():
    assert marks(MODEL_OF_TWO) == [("keras", 8)]
    assert marks(MODEL_OF_TWO.replace("self.a(x), self.b(x)", "self.a(x)")) == []


MADE_OUTSIDE = """
import numpy as np
import tensorflow as tf
def initial(shape):
    return np.random.RandomState(0).normal(size=shape)
class Net:
    def __init__(self):
        self.w = tf.Variable(initial([2]))
    def __call__(self, x):
        return x * self.w
with strategy.scope():
    net = Net()
def step(x):
    return net(x)
strategy.run(step, args=(x,))
"""


def test_what_makes_an_object_outside_of_the_step_is_no_step():
    assert marks(MADE_OUTSIDE) == []
    assert marks(MADE_OUTSIDE.replace("return net(x)", "return Net()(x)")) == [("side effect", 5)]
    assert marks(MADE_OUTSIDE.replace("x * self.w", "x * np.random.normal()")) == [("side effect", 10)]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("@tf.function\ndef rate(step):\n    if float(step) < 3: return 1.0\n    return 2.0\n", "condition"),
        ("rate = tf.Variable(0.1)\ntf.compat.v1.train.MomentumOptimizer(rate, 0.9)\n", "argument"),
    ],
)
def test_values_that_are_no_numbers_of_python(text, rule):
    assert [found for found, _ in marks(f"import tensorflow as tf\n{text}")] == [rule]


def test_numbers_of_python_are_not_marked():
    text = "import tensorflow as tf\ndef rate(step):\n    if float(step) < 3: return 1.0\n    return 2.0\n"
    assert marks(text) == []
    assert marks("import tensorflow as tf\ntf.compat.v1.train.MomentumOptimizer(flags.rate, 0.9)\n") == []


def test_texts_for_a_model_are_marked():
    """StringLookup in a model runs in TensorFlow only, and Keras on JAX ends in an error without its line."""
    text = "import tensorflow as tf\nx = tf.keras.Input((1,), dtype={})\nm = tf.keras.Model(x, x)\n"
    assert ("text", 2) in marks(text.format("'string'") + "m.fit(y)\n")
    assert ("text", 2) in marks(text.format("tf.string") + "m.fit(y)\n")
    assert marks(text.format("'int32'") + "m.fit(y)\n") == []
    lambda_ = "import tensorflow as tf\nf = lambda a: tf.constant(a.tolist()) if a.dtype == {} else tf.constant(a)\n"
    assert marks(lambda_.format("object")) == [("text", 2)]
    assert marks(lambda_.format("float")) == []
    kind = "import tensorflow as tf\nf = lambda a: tf.constant(a.tolist()) if a.dtype.kind {} else tf.constant(a)\n"
    assert [marks(kind.format(test)) for test in ("== 'U'", "in 'SU'", "in ('O', 'U')")] == [
        [("text", 2)]
    ] * 3
    assert [marks(kind.format(test)) for test in ("== 'f'", "in 'iu'", "in ('i', 'u')")] == [[]] * 3
