"""The command line: its output, files and exit codes."""

import json
import os
import sys

import pytest

from replicax.__main__ import main
from replicax._migrate import syntax_error
from replicax._src.packaging.extras import EXTRAS

BEFORE = "import tensorflow as tf\n\n\n@tf.function\ndef step(x):\n    return x\n"
AFTER = "import replicax as rx\n\n\n@rx.function\ndef step(x):\n    return x\n"
MARKED = BEFORE + "\n\ntf.no_such_name()\n"


@pytest.fixture
def program(tmp_path):
    folder = tmp_path / "program"
    (folder / "models").mkdir(parents=True)
    (folder / "train.py").write_text(BEFORE)
    (folder / "models" / "net.py").write_text(BEFORE)
    (folder / "notes.txt").write_text("import tensorflow as tf\n")
    (folder / ".hidden.py").mkdir()
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.py").write_text(BEFORE)
    return folder


def test_diff_writes_nothing(program, capsys):
    assert main(["migrate", str(program)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("-import tensorflow as tf\n+import replicax as rx\n") == 2
    assert (program / "train.py").read_text() == BEFORE
    assert printed.err == "replicax migrate: 2 of 2 files would change: 2 names.\n"


def test_in_place_twice(program, capsys):
    os.chmod(program / "train.py", 0o755)
    assert main(["migrate", "--in-place", str(program)]) == 0
    for name in ("train.py", "models/net.py"):
        assert (program / name).read_text() == AFTER
    assert (program / "train.py").stat().st_mode & 0o777 == 0o755
    assert (program / "notes.txt").read_text() == "import tensorflow as tf\n"
    assert sorted(path.name for path in program.iterdir()) == sorted(
        [".hidden.py", "__pycache__", "models", "notes.txt", "train.py"]
    )
    written = (program / "train.py").stat().st_mtime_ns
    assert main(["migrate", "--in-place", str(program)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "replicax migrate: 0 of 2 files changed: 0 names."
    assert (program / "train.py").stat().st_mtime_ns == written


def test_output_is_a_complete_program(program, tmp_path):
    (program / "plain.py").write_text("x = 1\n")
    assert main(["migrate", str(program), "--output", str(tmp_path / "new")]) == 0
    written = {str(p.relative_to(tmp_path / "new")): p.read_text() for p in (tmp_path / "new").rglob("*.py")}
    assert written == {"train.py": AFTER, "models/net.py": AFTER, "plain.py": "x = 1\n"}
    assert (program / "train.py").read_text() == BEFORE


def test_two_directories_have_separate_outputs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(BEFORE)
    assert main(["migrate", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "a" / "train.py").read_text() == AFTER
    assert (tmp_path / "new" / "b" / "train.py").read_text() == AFTER


def test_marks_are_counted_and_change_the_exit_code(program, capsys):
    (program / "train.py").write_text(MARKED)
    assert main(["migrate", "--in-place", str(program)]) == 3
    text = (program / "train.py").read_text()
    assert "# replicax migrate: the table has no row for tf.no_such_name.\ntf.no_such_name()" in text
    assert "1 place to look at: 1 unknown." in capsys.readouterr().err
    assert main(["migrate", "--in-place", str(program)]) == 3
    assert (program / "train.py").read_text() == text
    looked_at = text.replace("the table has no row for tf.no_such_name.", "ok")
    (program / "train.py").write_text(looked_at)
    assert main(["migrate", "--in-place", str(program)]) == 0
    assert (program / "train.py").read_text() == looked_at


@pytest.mark.parametrize("name", ["report.md", "report.json"])
def test_a_report(program, tmp_path, name):
    (program / "train.py").write_text(MARKED)
    assert main(["migrate", str(program), "--report", str(tmp_path / name)]) == 3
    text = (tmp_path / name).read_text()  # the places are those of the new files
    if name == "report.md":
        assert f"- `{program / 'train.py'}:15`: the table has no row for tf.no_such_name." in text
        assert "| `tf.function` | `rx.function` |" in text
        assert "2 of 2 files changed" in text
    else:
        found = json.loads(text)
        (entry,) = found["to_look_at"]
        assert entry["place"] == f"{program / 'train.py'}:15"
        assert entry["rule"] == "unknown"
        assert entry["why"] == "The table has no row for the name."
        assert found["names_changed"] == 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("broken.py", b"def f(:\n", "left alone: it cannot be parsed: line 1: invalid syntax."),
        (
            "old.py",
            b'import os\nprint "loss", 1.0\n',
            "left alone: it cannot be parsed: line 2: Missing parentheses in call to 'print'. Did you mean print(...)? The "
            "line is Python 2: convert the file to Python 3 first (2to3 -w old.py",
        ),
        ("broken.ipynb", b"{", "left alone: it is not a notebook of format 4"),
        ("binary.py", b"\xff\xfe\x00", "left alone: it is not text"),
        ("odd.ipynb", b"\xff", "left alone: it is not text"),
    ],
)
def test_skipped_file_does_not_stop_the_others(program, capsys, name, content, says):
    (program / name).write_bytes(content)
    assert main(["migrate", "--in-place", str(program)]) == 1
    assert f"{program / name}: {says}" in capsys.readouterr().err
    assert (program / name).read_bytes() == content
    assert (program / "train.py").read_text() == AFTER


def test_a_file_that_cannot_be_read(program, capsys):
    (program / "gone.py").symlink_to(program / "nothing.py")
    assert main(["migrate", "--in-place", str(program)]) == 1
    assert f"{program / 'gone.py'}: left alone: [Errno 2]" in capsys.readouterr().err
    assert (program / "train.py").read_text() == AFTER


def test_a_link_stays_one_and_its_file_changes_once(program, capsys):
    (program / "link.py").symlink_to(program / "train.py")
    assert main(["migrate", "--in-place", str(program)]) == 0
    assert (program / "link.py").is_symlink()
    assert (program / "train.py").read_text() == AFTER
    assert "2 of 2 files changed" in capsys.readouterr().err


def test_failure_of_one_file_names_it(program, capsys, monkeypatch):
    from replicax._migrate import source_files

    def fails(source, *_, **__):
        if source.path.name == "net.py":
            raise RuntimeError("unheard of")
        return rewrite(source, *_, **__)

    rewrite = source_files.rewrite
    monkeypatch.setattr(source_files, "rewrite", fails)
    assert main(["migrate", "--in-place", str(program)]) == 1
    assert (
        "net.py: left alone: it could not be rewritten: RuntimeError: unheard of" in capsys.readouterr().err
    )
    assert (program / "models" / "net.py").read_text() == BEFORE
    assert (program / "train.py").read_text() == AFTER


def test_nothing_is_half_written(program, monkeypatch, capsys):
    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fails)
    assert main(["migrate", "--in-place", str(program)]) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert (program / "train.py").read_text() == BEFORE
    assert not [path for path in program.rglob(".*") if path.is_file()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["program/notes.txt"], "is neither a Python file nor a notebook"),
        (["empty"], "empty has no Python files and no notebooks"),
    ],
)
def test_paths_without_programs(program, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(program.parent)
    (program.parent / "empty").mkdir()
    assert main(["migrate", *arguments]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["program", "--output", "program/new"], "is inside of program: give a directory beside it"),
        (["program", "--output", "program"], "is inside of program"),
        (["program", "--output", "program/notes.txt"], "is inside of program"),
        (["program/train.py", "--output", "program/notes.txt"], "is a file: give a directory"),
        (["program", "--diff", "--in-place"], "not allowed with argument"),
        (["program", "--in-plac"], "Did you mean '--in-place'?"),
        ([], "required: PATH"),
    ],
)
def test_wrong_options(program, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(program.parent)
    with pytest.raises(SystemExit) as end:
        main(["migrate", *arguments])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_without_libcst(program, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["migrate", str(program)]) == 1
    assert "Run: pip install libcst (the extra migrate)" in capsys.readouterr().err


def test_the_backend_is_set_where_the_program_starts(tmp_path, capsys):
    (tmp_path / "model.py").write_text("import tensorflow as tf\n\nmodel = tf.keras.Sequential()\n")
    (tmp_path / "train.py").write_text(
        '"""Trains."""\nimport sys\nimport model\nimport os\n\nprint(model.model)\n'
    )
    (tmp_path / "other.py").write_text("import numpy\nimport tensorflow as tf\n\ntf.function\n")
    assert main(["migrate", "--in-place", str(tmp_path)]) == 0
    assert (tmp_path / "model.py").read_text() == "import keras\n\nmodel = keras.Sequential()\n"
    assert (tmp_path / "train.py").read_text() == (
        '"""Trains."""\nimport sys\nimport os\n\nos.environ.setdefault("KERAS_BACKEND", "jax")\n\n'
        "import model\nimport os\n\nprint(model.model)\n"
    )
    assert "KERAS_BACKEND" not in (tmp_path / "other.py").read_text()


@pytest.mark.parametrize(
    ("text", "packages"),
    [
        ("tf.function", ""),
        ("tf.keras.Model", "keras"),
        ("tf.data.Dataset.range(3)", "tensorflow-cpu"),
        ("tf.clip_by_global_norm(g, 1.0)", "optax"),
        ("tf.train.Checkpoint()", "tensorstore"),
        ("tf.summary.scalar('a', 1, 2)", "tensorboardX"),
        ("tf.distribute.Server(a)", "cloudpickle flatbuffers xxhash"),
        ("tf.keras.callbacks.TensorBoard('logs', write_grads=True)", "keras tensorboardX"),
        ("tf.keras.Model\nimport tensorflow_datasets as tfds", "keras tensorflow-datasets"),
    ],
)
def test_the_last_line_says_what_the_program_needs(tmp_path, capsys, text, packages):
    (tmp_path / "train.py").write_text(f"import tensorflow as tf\n{text}\n")
    main(["migrate", "--in-place", str(tmp_path), "--report", str(tmp_path / "report.md")])
    last = capsys.readouterr().err.splitlines()[-1]
    wanted = f"replicax migrate: Besides replicax, the program needs: pip install {packages}"
    assert last == wanted if packages else "pip install" not in last
    assert (f"`pip install {packages}`" in (tmp_path / "report.md").read_text()) == bool(packages)


def test_moving_statistics_in_an_evaluation_are_a_line_of_the_summary(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import tensorflow as tf\nlayer = tf.keras.layers.BatchNormalization()\n"
        "def step(x):\n    return layer(x, training=False)\nr = strategy.run(step, args=(x,))\n"
    )
    main(["migrate", "--in-place", str(script)])
    assert "reads moving statistics of BatchNormalization" in capsys.readouterr().err
    main(["migrate", "--in-place", str(script)])
    assert "moving statistics" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "step",
    [
        "def call(self, x, training=False):\n    return layer(x, training=training)\napp.run(call)\n",
        "def step(x):\n    return layer(x, training=True)  # not training=False\nstrategy.run(step, args=(x,))\n",
        "layer(x, training=False)\nstrategy.run(lambda: x)\n",
    ],
)
def test_moving_statistics_outside_of_replica_functions_are_no_line_of_the_summary(tmp_path, capsys, step):
    script = tmp_path / "train.py"
    script.write_text(f"import tensorflow as tf\nlayer = tf.keras.layers.BatchNormalization()\n{step}")
    main(["migrate", "--in-place", str(script)])
    assert "moving statistics" not in capsys.readouterr().err


def test_int64_without_large_numbers_is_a_line_of_the_summary_and_no_mark(tmp_path, capsys):
    script, report = tmp_path / "train.py", tmp_path / "report.md"
    script.write_text("import tensorflow as tf\nlabels = tf.zeros([4], tf.int64)\n")
    assert main(["migrate", "--in-place", str(script), "--report", str(report)]) == 0
    assert "int64 is int32 in JAX" in capsys.readouterr().err
    assert "int64 is int32 in JAX" in report.read_text()
    assert "replicax migrate" not in script.read_text()
    assert main(["migrate", "--in-place", str(script), "--report", str(report)]) == 0
    assert "int64 is int32" not in capsys.readouterr().err


def test_each_package_of_the_last_line_is_one_of_an_extra():
    from replicax._migrate import packages

    assert {extra for _, extra, _ in packages._FEATURES} <= EXTRAS.keys()
    for _, extra, names in packages._FEATURES:
        assert set(names) <= {package.name for package in EXTRAS[extra]}
    needs_all = {extra: names for _, extra, names in packages._FEATURES}["ps"]
    assert needs_all == tuple(package.name for package in EXTRAS["ps"])


@pytest.mark.parametrize(
    ("line", "is_python_2"),
    [
        ("print >>log, 'loss', 1.0, 'at'; x y", True),
        ("print 'loss'", True),
        ("exec 'x = 1'", True),
        ("raise ValueError, 'no rows'", True),
        ("x = 0777", True),
        ("x = 10L", True),
        ("if x <> 1: pass", True),
        ("x = `y`", True),
        ("x = ur'text'", True),
        ("print('loss', x", False),
        ("def f(:", False),
        ("x = (1 2)", False),
    ],
)
def test_a_line_of_python_2_is_named_as_such(line, is_python_2):
    said = syntax_error.words_of(f"import os\n{line}\n", "train.py")
    assert said.startswith("line 2: ")
    assert ("is Python 2: convert the file to Python 3 first (2to3 -w train.py" in said) == is_python_2


def test_a_notebook_of_python_2_is_not_sent_to_2to3():
    said = syntax_error.words_of("print 'loss'\n", "train.ipynb")
    assert "convert the file to Python 3 first, then" in said


def test_code_that_python_reads_has_no_syntax_error():
    assert syntax_error.words_of("x = '\\d'\n", "train.py") is None
