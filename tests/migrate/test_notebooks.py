"""Notebooks, cell by cell; lines for IPython stay unchanged."""

import json

import pytest

from replicax._migrate.notebooks import Notebook, NotebookError
from replicax._migrate.source_files import File, migrate


def notebook(*cells, as_text=False, indent=1, **metadata):
    document = {
        "cells": [
            {
                "cell_type": "code",
                "execution_count": 3,
                "metadata": {},
                "outputs": [{"text": "é"}],
                "source": cell if as_text else cell.splitlines(keepends=True),
            }
            for cell in cells
        ],
        "metadata": metadata,
        "nbformat": 4,
        "nbformat_minor": 2,
    }
    document["cells"].insert(
        1, {"cell_type": "markdown", "metadata": {}, "source": ["import tensorflow as tf"]}
    )
    return json.dumps(document, indent=indent, ensure_ascii=False) + "\n"


def migrated(tmp_path, text):
    path = tmp_path / "notebook.ipynb"
    path.write_text(text)
    file = File(path, tmp_path)
    migrate([file])
    return file


def cells_of(file):
    return ["".join(c["source"]) for c in json.loads(file.new)["cells"] if c["cell_type"] == "code"]


IPYTHON = [
    "!pip install tensorflow \\\n  tensorflow-datasets",
    "%load_ext tensorboard\n%tensorboard --logdir logs",
    "%%bash\nimport tensorflow as tf\nls",
    "files = !ls\nfor file in files:\n  !cat {file}\n  print(file)",
    "tf.function?",
    "elapsed = %timeit -o step()",
    "",
    "# a comment only",
]


def test_lines_for_ipython_stay_as_they_are(tmp_path):
    text = notebook("import tensorflow as tf\n%matplotlib inline\nprint(tf.function)", *IPYTHON)
    file = migrated(tmp_path, text)
    first, *others = cells_of(file)
    assert others == IPYTHON
    assert first == "import replicax as rx\n%matplotlib inline\nprint(rx.function)"
    assert not file.failure


def test_names_keep_their_meaning_from_cell_to_cell(tmp_path):
    text = notebook(
        "import tensorflow as tf",
        "def parse(x):\n  return tf.square(x)",
        "dataset = tf.data.Dataset.range(3).map(parse)",
        "%%time\n@tf.function\ndef step(x):\n  return x",
    )
    cells = cells_of(migrated(tmp_path, text))
    assert "tf.square" in cells[1]
    assert cells[3] == "%%time\n@rx.function\ndef step(x):\n  return x"


@pytest.mark.parametrize("indent", [None, 1, 2])
@pytest.mark.parametrize("as_text", [False, True])
def test_only_changed_cells_change(tmp_path, indent, as_text):
    text = notebook("import os\n", "import tensorflow as tf\ntf.function", as_text=as_text, indent=indent)
    file = migrated(tmp_path, text)
    before, after = json.loads(text), json.loads(file.new)
    changed = after["cells"][2].pop("source")
    assert isinstance(changed, str) == as_text
    assert "rx.function" in "".join(changed)
    assert before["cells"][2].pop("source")
    assert before == after
    unchanged = [
        line for line in file.new.decode().splitlines() if "tensorflow" not in line and "rx" not in line
    ]
    assert indent is None or set(unchanged) <= set(text.splitlines())


def test_a_notebook_without_tensorflow_is_the_same_to_the_byte(tmp_path):
    text = notebook("x = 1\n!ls", "y = 2", indent=2)
    file = migrated(tmp_path, text)
    assert file.new == file.old == text.encode()


def test_cell_that_is_not_python_is_reported_and_unchanged(tmp_path):
    file = migrated(tmp_path, notebook("import tensorflow as tf", "def f(:", "tf.function"))
    assert cells_of(file)[1:] == ["def f(:", "rx.function"]
    assert file.failure == "cell 2 is no Python module on its own, and is left alone"


def test_places_are_cells_and_lines(tmp_path):
    file = migrated(tmp_path, notebook("import tensorflow as tf", "x = 1\n\ntf.no_such_name(1)"))
    (mark,) = file.marks
    assert file.place(mark.line).endswith("notebook.ipynb: cell 2, line 4"), "below its mark"
    assert [line for line in file.diff() if line.startswith("+++")] == [
        f"+++ b/{str(file.path).lstrip('/')} (cell 2)\n"
    ]


def test_files_that_cells_write_are_modules(tmp_path):
    cells = [
        "%%writefile setup.py\nimport tensorflow as tf\n\ndef parse(x):\n  return tf.square(x)\n\ndef model():\n"
        "  return tf.keras.Sequential([])\n",
        "import tensorflow as tf\nimport setup\ndataset = tf.data.Dataset.range(3).map(setup.parse)",
        "%%writefile ./main.py\nimport tensorflow as tf\nimport setup\n\nmade = setup.model()\ntf.no_such_name(1)",
        "%%writefile notes.txt\nimport tensorflow as tf",
        "!python main.py",
    ]
    file = migrated(tmp_path, notebook(*cells))
    setup, first, main, *others = cells_of(file)
    assert "tf.square(x)" in setup, "a dataset calls it"
    assert setup.startswith("%%writefile setup.py\n")
    assert "return keras.Sequential([])" in setup
    assert "setup.parse" in first
    assert 'setdefault("KERAS_BACKEND", "jax")' in main, "it is run first"
    assert others == cells[3:]
    (mark,) = file.marks
    assert file.place(mark.line).endswith("cell 3, line 11")
    assert main.splitlines()[10] == "tf.no_such_name(1)"
    again = migrated(tmp_path, file.new.decode())
    assert again.new == again.old
    assert not file.failure


@pytest.mark.parametrize(
    "cells",
    [
        ["%%writefile -a more.py\nimport tensorflow as tf\ntf.function"],
        ["%%writefile a.py\nimport tensorflow as tf\ntf.function", "%%writefile a.py\nx = 1", "import a"],
    ],
)
def test_incomplete_module_is_reported(tmp_path, cells):
    file = migrated(tmp_path, notebook(*cells))
    assert cells_of(file) == cells
    assert file.failure.startswith("cell 1 ")


def test_versions_of_a_script_and_lines_of_windows(tmp_path):
    script = "%%writefile main.py\r\nimport tensorflow as tf\r\ntf.function\r\n"
    file = migrated(tmp_path, notebook(script, script))
    assert (
        cells_of(file) == [script.replace("tensorflow as tf", "replicax as rx").replace("tf.f", "rx.f")] * 2
    )
    assert not file.failure


def test_written_file_that_is_not_python_is_reported(tmp_path):
    file = migrated(tmp_path, notebook("%%writefile main.py\ndef f(:"))
    assert cells_of(file) == ["%%writefile main.py\ndef f(:"]
    assert file.failure == "cell 1 is no Python module on its own, and is left alone"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("%time x = tf.function(f)", "%time x = rx.function(f)"),
        ("if True:\n  %timeit -n 10 -r2 tf.function(f)", "if True:\n  %timeit -n 10 -r2 rx.function(f)"),
        ("%timeit -n 10", "%timeit -n 10"),
        ("%time !ls tf.function", "%time !ls tf.function"),
        ("%time for i in x: tf.function", "%time for i in x: tf.function"),
    ],
)
def test_the_rest_of_a_timed_line_is_python(tmp_path, before, after):
    assert cells_of(migrated(tmp_path, notebook("import tensorflow as tf", before)))[1] == after


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"cells": 3}',
        '{"worksheets": []}',
        '{"cells": [1]}',
        '{"cells": ' + "[" * 300 + "]" * 300 + "}",
        "[" * 9000,
    ],
)
def test_invalid_notebooks(text):
    with pytest.raises(NotebookError, match="format 4"):
        Notebook(text)


def test_a_notebook_in_another_language():
    with pytest.raises(NotebookError, match="its language is R"):
        Notebook(notebook("x <- 1", kernelspec={"language": "R"}))


@pytest.mark.parametrize("text", [json.dumps({"cells": [], "metadata": {}, "nbformat": 4}), notebook()])
def test_a_notebook_without_code_stays(tmp_path, text):
    file = migrated(tmp_path, text)
    assert file.new == file.old
    assert Notebook(text).text(Notebook(text).code) == text


def test_a_program_without_tensorflow_stays(tmp_path):
    file = File(tmp_path / "program.py", tmp_path)
    file.path.write_text(
        "import torch\nn = []\ndef f(x): n.append(x)\npool.run(f)\nprint(torch.ones(3).numpy())\n"
    )
    migrate([file])
    assert file.new == file.old
    assert not file.marks
