"""What stays TensorFlow's stays whole: its arguments, what it reads, and what the host computes from its results."""

import pytest

from migrated import becomes, marks, sources
from replicax._migrate.decisions import decide
from replicax._migrate.reach import Reach
from replicax._migrate.rewrite import rewrite

HEAD = "import tensorflow as tf\nfrom tensorflow import keras\n"
STEP = "@tf.function\ndef step(x): return tf.square(x)\n"
# The texts below are the same after the migration.
STAYS = [
    # Arguments of what stays, by whatever name.
    "files = tf.constant(names())\nds = tf.data.Dataset.from_tensor_slices(files)\n",
    "files = tf.constant(names())\nshuffled = tf.random.shuffle(files)\nds = tf.data.TFRecordDataset(shuffled)\n",
    "def make(files): return tf.data.TFRecordDataset(files)\nds = make(tf.constant(names()))\n",
    "def make(*, files): return tf.data.TFRecordDataset(files)\nds = make(files=tf.constant(names()))\n",
    "def make(files):\n  files = tf.convert_to_tensor(files)\n  return tf.data.TFRecordDataset(files)\nds = make(names())\n",
    "def files(): return tf.constant(names())\nds = tf.data.TFRecordDataset(files())\n",
    "def data():\n  x = tf.random.normal([8, 2])\n  return x, tf.reduce_sum(x, 1)\n"
    "x, y = data()\nds = tf.data.Dataset.from_tensor_slices((x, y))\n",
    "class P:\n  def __init__(self, words): self.words = tf.constant(words)\n"
    "  def make(self): return tf.data.Dataset.from_tensor_slices(self.words)\nds = P(names()).make()\n",
    # What functions of datasets read.
    "mean = tf.constant([0.5])\ndef f(x): return x - mean\nds = tf.data.Dataset.range(3).map(f)\n",
    "class P:\n  def __init__(self): self.pad = tf.zeros([3], tf.int64)\n  def f(self, x): return x + self.pad\n"
    "  def make(self, ds): return ds.map(self.f)\n",
    "keys = tf.constant(words())\ntable = tf.lookup.StaticHashTable(\n"
    "  tf.lookup.KeyValueTensorInitializer(keys, tf.range(tf.size(keys))), 0)\n"
    "ds = tf.data.Dataset.range(3).map(lambda x: table.lookup(x))\n",
    "import functools\ndef f(x, n): return x[:n]\n"
    "ds = tf.data.Dataset.range(3).map(functools.partial(f, n=tf.constant(3)))\n",
    # Calls of such functions on the host, with their arguments and what is computed from the results.
    "def f(x): return tf.strings.split(x)\nds = tf.data.Dataset.range(3).map(f)\nprint(f(tf.constant(texts())))\n",
    "def f(x): return tf.size(x)\nds = tf.data.Dataset.range(3).map(f)\nn = f(1)\nprint(tf.stack([n, n]), tf.add(n, 1))\n",
    "raw = tf.io.read_file('a')\nimage = tf.image.resize(tf.io.decode_png(raw), [2, 2])\nprint(tf.shape(image))\n",
    "table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)\n"
    "ids = table.lookup(tf.constant([2, 3]))\nprint(tf.reduce_sum(ids), table.size())\n",
    "class P:\n  def __init__(self): self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)\n"
    "  def add(self, words): self.table.insert(tf.constant(words), tf.range(len(words), dtype=tf.int64))\n",
    # A value of TensorFlow is recognised as one.
    "def feature(value):\n  if isinstance(value, type(tf.constant(0))): value = 1\n"
    "  return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))\n",
    "ds = tf.compat.v1.data.Dataset.range(3).filter(lambda x: tf.greater(x, tf.constant(1, tf.int64)))\n",
]


@pytest.mark.parametrize("keras", [True, False], ids=["keras", "jax"])
@pytest.mark.parametrize("text", STAYS)
def test_what_stays_tensorflows_stays_whole(text, keras):
    text = (HEAD + "keras.Model\n" if keras else "import tensorflow as tf\n") + text
    code = becomes(text)
    assert code.partition("keras.Model\n")[2] == text.partition("keras.Model\n")[2]
    assert keras or code == text
    assert marks(text) == []


CHANGES = [
    # A step reads the value.
    ("mean = tf.ones([3])\nds = tf.data.Dataset.range(3).map(lambda x: x - mean)\n", "def step(): return mean\n", "ops.ones"),
    # The value goes nowhere near a dataset.
    ("x = tf.ones([3])\ny = tf.square(x)\nds = tf.data.Dataset.range(3)\n", "def step(): return 1\n", "ops.square(x)"),
    # A dataset gets a number, not the variable that it is read from; what else holds the variable changes, too.
    ("epoch = tf.Variable(0)\nds = tf.data.Dataset.range(3).skip(int(epoch.numpy()))\n", "def step(): return 1\n",
     "epoch = rx.Variable(0)"),
    ("epoch = tf.Variable(0)\nn = int(epoch + 1)\nds = tf.data.Dataset.range(3).skip(n)\n", "def step(): return 1\n",
     "epoch = rx.Variable(0)"),
    ("size = tf.Variable([0, 1])\nds = tf.data.Dataset.range(3).batch(size.shape[0])\n", "def step(): return 1\n",
     "size = rx.Variable([0, 1])"),
    ("epoch = tf.Variable(0)\nsaved = tf.train.Checkpoint(epoch=epoch)\n"
     "ds = tf.data.Dataset.range(3).skip(int(epoch))\n", "def step(): return 1\n", "rx.Checkpoint(epoch"),
    ("saved = tf.train.Checkpoint(epoch=tf.Variable(0))\nds = tf.data.Dataset.range(3).skip(int(saved.epoch))\n",
     "def step(): return 1\n", "rx.Checkpoint(epoch=rx.Variable(0))"),
    ("m = tf.train.CheckpointManager(tf.train.Checkpoint(), 'a', 2)\n"
     "ds = tf.data.Dataset.range(3).skip(int(m.latest_checkpoint[-1]))\n", "def step(): return 1\n",
     "rx.CheckpointManager(rx.Checkpoint()"),
    # A checkpoint saves models, too, so it never stays.
    ("n = tf.Variable(1, dtype=tf.int64)\nds = tf.data.Dataset.range(3).map(lambda x: x + n)\n"
     "saved = tf.train.Checkpoint(n=n)\n", "def step(): return 1\n", "rx.Checkpoint(n=n)"),
    # Methods of arrays: the value may be one of JAX.
    ("tf.compat.v1.logging.info('%f', loss.numpy())\n", "def step(): return 1\n", "'%f', np.asarray(loss)[()])"),
    ("ds = tf.data.Dataset.range(3).take(int(loss.numpy()))\n", "def step(): return 1\n", "int(np.asarray(loss)[()])"),
    # Keras and distribution have one name everywhere.
    ("n = tf.distribute.get_strategy().num_replicas_in_sync\nds = tf.data.Dataset.range(3).batch(n)\n", "def step(): return 1\n",
     "rx.get_strategy().num"),
    ("layer = tf.keras.layers.Dense(1, activation=tf.nn.relu)\nds = tf.data.Dataset.range(3).map(lambda x: layer(x))\n",
     "def step(): return 1\n", "keras.layers.Dense(1, activation=ops.relu)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "step", "now"), CHANGES)
def test_other_values_change(text, step, now):
    code = becomes(f"{HEAD}keras.Model\n{text}@tf.function\n{step}")
    assert now in code


def test_a_value_is_followed_to_other_modules():
    program = sources(
        paths="import tensorflow as tf\nFILES = tf.constant(open('list').readlines())\n"
        "def more(): return tf.constant(open('more').readlines())\n",
        main="import tensorflow as tf\nimport keras\nfrom paths import FILES, more\n"
        "ds = tf.data.TFRecordDataset(FILES).concatenate(tf.data.TFRecordDataset(more()))\n",
    )
    (paths, _) = program.sources
    code = rewrite(paths, decide(paths, Reach(program))).code.decode()
    assert code == paths.code


@pytest.mark.parametrize(
    "call",
    [
        "tf.while_loop(go_on, body, [tf.constant(0), tf.zeros([2])])",
        "tf.norm(tf.square(x), ord=tf.constant(1))",
    ],
)
@pytest.mark.parametrize("place", ["@tf.function\ndef step(x): return ", "y = "])
def test_a_marked_call_keeps_its_arguments(call, place):
    code = becomes(f"{HEAD}{place}{call}\n")
    assert code.endswith(f"{call}\n")


def test_files_of_records_of_tensorflow_1_are_not_marked():
    text = "v1 = tf.compat.v1\nwith v1.python_io.TFRecordWriter('a') as w: w.write(b'')\n"
    text += "ds = v1.data.TFRecordDataset('a').map(lambda r: v1.parse_single_example(r, {}))\n"
    assert marks(HEAD + text) == []


def test_int64_that_stays_is_not_marked():
    text = "FEATURES = {'ids': tf.io.VarLenFeature(tf.int64)}\nkeys = tf.range(3, dtype=tf.int64)\n"
    text += "ds = tf.data.Dataset.from_tensor_slices(keys)\n"
    assert marks(HEAD + text) == []


def test_datasets_of_arrays_have_the_methods_of_tf_data():
    head = "import replicax as rx\nstrategy = rx.MirroredStrategy()\n"
    code = becomes(
        head + "ds = strategy.experimental_make_numpy_dataset(x).shuffle(9).with_options(options)\n"
    )
    assert "import tensorflow as tf\n" in code
    assert code.endswith("ds = tf.data.Dataset.from_tensor_slices(x).shuffle(9).with_options(options)\n")
    code = becomes(
        "import tensorflow as tf1\ndef make(strategy): return strategy.make_experimental_numpy_dataset((x, y))\n"
    )
    assert (
        code
        == "import tensorflow as tf1\ndef make(strategy): return tf1.data.Dataset.from_tensor_slices((x, y))\n"
    )
