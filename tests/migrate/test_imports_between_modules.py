"""Names from another module of the program: by `import *`, or because that module imports them itself."""

from replicax._migrate.source_files import find_files, migrate


def migrated(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    files = find_files([folder])
    migrate(files)
    assert not any(file.failure for file in files)
    return {file.path.stem: file.new.decode() for file in files}


def test_module_imports_names_that_came_by_import_star(tmp_path):
    new = migrated(
        tmp_path,
        helpers="import tensorflow as tf\n\n\ndef half(x):\n    return tf.cast(x, tf.float32) / 2\n",
        middle="from helpers import *\n",
        model="import math\nfrom middle import *\n\n\ndef f(x):\n    return tf.square(half(x)) * math.pi\n",
    )
    assert new["middle"] == "from helpers import *\n"
    assert new["model"] == (
        "import math\nfrom middle import *\nimport jax.numpy as jnp\n\n\n"
        "def f(x):\n    return jnp.square(half(x)) * math.pi\n"
    )


def test_imported_and_unused_names_are_left(tmp_path):
    own = "from helpers import *\nimport tensorflow as tf\n\nx = tf.data.Dataset.range(3)\n"
    unused = "from helpers import *\n\nprint(np.pi)\n"
    new = migrated(tmp_path, helpers="import numpy as np\nimport tensorflow as tf\n", own=own, unused=unused)
    assert new["own"] == own
    assert new["unused"] == unused


def test_backend_is_set_if_tensorflow_stays_beside_replicax(tmp_path):
    before = (
        "import tensorflow as tf\n\nstrategy = tf.distribute.get_strategy()\nd = tf.data.Dataset.range(3)\n"
    )
    new = migrated(tmp_path, program=before)
    assert 'os.environ.setdefault("KERAS_BACKEND", "jax")\n' in new["program"].split("import tensorflow")[0]


def test_functions_that_come_by_import_star_are_followed(tmp_path):
    new = migrated(
        tmp_path,
        steps="import tensorflow as tf\n\n\ndef parse(x):\n    return tf.square(x)\n",
        middle="from steps import *\n",
        train="import tensorflow as tf\nfrom middle import *\n\ntf.data.Dataset.range(3).map(parse)\n",
    )
    assert "return tf.square(x)" in new["steps"]


COMMON = "import tensorflow as tf\nfrom tensorflow import keras\n\nK = keras.backend\n"


def test_module_imports_names_passed_on_by_another(tmp_path):
    new = migrated(
        tmp_path,
        common=COMMON,
        model="from common import keras, tf, os\n\n\ndef f(x):\n    return keras.layers.Dense(1)(tf.square(x))\n",
        data="from common import tf\n\nd = tf.data.Dataset.range(3)\n",
        train="import model\nimport data\n",
    )
    assert "tensorflow" not in new["model"]
    assert "from common import os\nimport keras\nfrom keras import ops\n" in new["model"]
    assert "keras.layers.Dense(1)(ops.square(x))" in new["model"]
    assert new["data"] == "import tensorflow as tf\n\nd = tf.data.Dataset.range(3)\n"
    assert "import tensorflow" not in new["common"]


def test_names_below_another_module_are_followed_and_stay_there_while_they_are_used(tmp_path):
    new = migrated(
        tmp_path,
        common="import tensorflow as tf\n",
        model="import common\n\n\ndef f(x):\n    return common.tf.square(x)\n",
    )
    assert new["common"].strip() == ""
    assert new["model"].endswith("import common\n\n\ndef f(x):\n    return jnp.square(x)\n")
    kept = "import common\n\nd = common.tf.data.Dataset.range(3)\n"
    new = migrated(tmp_path, common="import tensorflow as tf\n", model=kept)
    assert new == {"common": "import tensorflow as tf\n", "model": kept}


def test_modules_that_import_each_other_end(tmp_path):
    texts = {
        "a": "from b import *\nfrom b import tf\n\ntf.square(1)\n",
        "b": "from a import *\nfrom a import tf\n",
    }
    assert migrated(tmp_path, **texts) == texts


def test_a_second_run_changes_nothing(tmp_path):
    texts = {"common": COMMON, "model": "from common import keras, tf\n\nkeras.Model, tf.square, tf.data\n"}
    first = migrated(tmp_path, **texts)
    assert first != texts
    assert migrated(tmp_path, **first) == first
