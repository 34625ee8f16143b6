"""The backend that Keras selects, replicax's message if that is not JAX, and that programs without Keras are not
affected."""

import json
import os
import subprocess
import sys

import pytest

import replicax as rx
from checks import in_a_process_of_its_own, message, path_of_programs
from replicax._src.keras import backend
from replicax._src.keras.backend import KerasBackend, check_keras, chosen_backend


def test_the_environment_chooses_before_the_file(tmp_path):
    home = {"KERAS_HOME": str(tmp_path)}
    assert chosen_backend(home).name == "tensorflow"
    assert "KERAS_BACKEND is not set" in chosen_backend(home).source
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "torch"}))
    assert chosen_backend(home).name == "torch"
    assert str(tmp_path / "keras.json") in chosen_backend(home).source
    assert chosen_backend({**home, "KERAS_BACKEND": "jax"}) == KerasBackend("jax", "KERAS_BACKEND=jax")
    assert chosen_backend({**home, "KERAS_BACKEND": ""}).name == "torch", "as Keras takes it"
    (tmp_path / "keras.json").write_text("{")
    assert chosen_backend(home).name == "tensorflow"


@pytest.mark.rest
@pytest.mark.parametrize("environment", [{}, {"KERAS_BACKEND": "numpy"}, {"KERAS_BACKEND": ""}])
@pytest.mark.parametrize("file", [None, {"backend": "numpy"}, {"backend": "jax"}])
def test_keras_takes_the_same(tmp_path, environment, file):
    if file is not None:
        (tmp_path / "keras.json").write_text(json.dumps(file))
    left = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment = {**left, "KERAS_HOME": str(tmp_path), "PYTHONPATH": path_of_programs(), **environment}
    expected = chosen_backend(environment).name
    program = "import keras; print(keras.backend.backend())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    if expected == "tensorflow":  # which is not installed
        assert "No module named 'tensorflow'" in done.stderr
    else:
        assert done.stdout.strip() == expected


@pytest.mark.parametrize(("backend", "missing"), [(None, "tensorflow"), ("torch", "torch")])
def test_an_import_of_keras_that_fails_says_what_to_write_if_replicax_came_first(tmp_path, backend, missing):
    """Keras's own error names only the package that its backend lacks. An import that is tried again says it again."""
    script = f"""
import replicax, importlib, sys
for _ in range(2):
    try:
        import keras
    except ModuleNotFoundError as error:
        assert error.name == {missing!r}, error
        print(*error.__notes__)
    for name in [name for name in sys.modules if name.partition(".")[0] == "keras"]:
        del sys.modules[name]
"""
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environment |= {"KERAS_HOME": str(tmp_path), "PYTHONPATH": path_of_programs()}
    environment |= {} if backend is None else {"KERAS_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert f"Keras would run on the {missing!r} backend" in line
        assert 'Write import os; os.environ["KERAS_BACKEND"] = "jax" above the first import of keras' in line


def test_an_import_of_keras_that_works_is_unchanged():
    script = (
        "import replicax, sys; import keras, inspect; "
        "print(type(keras.__loader__).__name__, keras.__spec__.loader is keras.__loader__, "
        "any('replicax' in type(each).__module__ for each in sys.meta_path), "
        "len(inspect.getsource(keras)) > 0)"
    )
    environment = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["SourceFileLoader", "True", "False", "True"], done.stderr


def test_code_that_needs_keras_says_what_to_write(monkeypatch):
    check_keras("This")
    wrong = KerasBackend("tensorflow", "KERAS_BACKEND is not set")
    monkeypatch.setattr(backend, "backend_now", lambda: wrong)
    text = message(
        rx.errors.KerasBackendError,
        lambda: rx.keras.callbacks.CheckpointCallback,
        "Keras would run on the 'tensorflow' backend (KERAS_BACKEND is not set), and rx.keras.callbacks.CheckpointCallback",
        'Write import os; os.environ["KERAS_BACKEND"] = "jax" above the first import of keras',
        "of tensorflow, which imports keras",
    )
    assert "\n" not in text
    monkeypatch.setitem(sys.modules, "keras", None)
    message(rx.errors.MissingExtraError, lambda: rx.keras.callbacks.CheckpointCallback, "pip install keras")


def without_backend(tmp_path):
    """A process whose Keras would select TensorFlow, which is not installed."""
    return {"KERAS_BACKEND": "", "KERAS_HOME": str(tmp_path)}


def test_programs_without_keras_are_not_affected(tmp_path):
    program = """
    import os, sys
    before = dict(os.environ)
    import replicax as rx
    strategy = rx.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        variable = rx.Variable(1.0)
    assert float(strategy.reduce("SUM", strategy.run(lambda: variable + 1), axis=None)) == 2
    assert rx.is_chief()
    assert "keras" not in sys.modules
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    print(sorted(name for name in changed if not name.startswith(("TPU_", "XLA_"))))  # JAX's
    """
    assert in_a_process_of_its_own(program, "-W", "error", **without_backend(tmp_path)).strip() == "[]"
