"""Which code is the user's, wherever packages lie; and the line of user code that a running program calls."""

import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from checks import path_of_programs
from replicax._src.user import user_code
from replicax._src.user.user_code import is_library, is_user_code, user_line_of_callback

PACKAGE = Path(user_code.PACKAGE)
PROGRAM = """\
    import keras
    import numpy as np
    import jax.numpy as jnp
    import replicax as rx

    rx.config.set_local_devices(2)
    strategy = rx.MirroredStrategy()

    def step(w):
        return jnp.log(w - 1.0)  # NaN

    try:
        strategy.run(step, args=(jnp.zeros(()),), options=rx.RunOptions(check_finite=True))
    except rx.errors.NotFiniteError as error:
        print(error)

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with rx.GradientTape() as tape:
                loss = keras.ops.mean((self(x) - y) ** 2)  # mean
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

    with strategy.scope():
        model = Net()
        model.compile("sgd")
    x = np.ones((8, 4), "float32")
    model.fit(x, x[:, :1], verbose=0)
"""


@pytest.mark.parametrize(
    "folder", ["libs", pytest.param("lib/python3/site-packages", marks=pytest.mark.rest)], ids=str
)
def test_messages_name_the_users_line_if_jax_and_keras_lie_in_another_folder(folder, tmp_path):
    # As with ``pip install --target``, and as with a .pth file, --user or an environment on top of another.
    packages = tmp_path / folder
    packages.mkdir(parents=True)
    for module in (jax, keras, np):
        home = Path(module.__file__).parent
        (packages / home.name).symlink_to(home)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "PYTHONPATH": path_of_programs(packages), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = textwrap.dedent(PROGRAM).splitlines()
    nan, mean = (next(i for i, line in enumerate(lines, 1) if mark in line) for mark in ("# NaN", "# mean"))
    assert f"{program}:{nan} in step" in done.stdout
    assert f"{program}:{mean} in train_step: the loss is a mean" in done.stderr
    assert f"{packages}" not in done.stdout + done.stderr


def test_code_of_packages_is_not_the_users_wherever_they_lie():
    for folder in (
        "/usr/lib/python3/dist-packages",
        "/home/me/.local/lib/python3.11/site-packages",
        sys.prefix + "/site-packages",
    ):
        assert is_library(f"{folder}/einops/einops.py")
        assert not is_user_code(f"{folder}/einops/einops.py")
    assert is_library(threading.__file__)
    assert is_library("<frozen importlib._bootstrap>")
    assert is_library(jax.__file__)
    assert not is_library(str(PACKAGE / "values" / "distributed.py"))
    assert not is_user_code(str(PACKAGE / "values" / "distributed.py"))
    for file in (
        "/home/me/train.py",
        "/home/me/site-packages.py",
        "/tmp/ipykernel_7/1.py",
        "<stdin>",
        "<string>",
        __file__,
    ):
        assert is_user_code(file)


def test_one_file_decides_which_code_is_the_users():
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "user_code.py"]
    deciding = [
        file.name
        for file in files
        if "sysconfig" in file.read_text() or "getsitepackages" in file.read_text()
    ]
    assert deciding == []


CELL = """
def diverges(x):
    v.assign(x.sum())
def decides(x):
    return x if x.sum() > 0 else -x
"""


def test_a_cell_of_a_notebook_is_named_as_the_notebook_names_it(monkeypatch, tmp_path):
    """Not by its temporary file, and its source is found."""
    file = tmp_path / "1501578675.py"
    file.write_text(CELL)
    names = {str(file): ("Cell", "In[3]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        scope = {"v": rx.Variable(1.0)}
    exec(compile(CELL, str(file), "exec"), scope)
    (x,) = strategy.experimental_distribute_dataset([np.ones(4, np.float32)])
    for name, place in (
        ("diverges", r"Cell In\[3\]:3 in diverges"),
        ("decides", r"Cell In\[3\]:5 in decides, in `x"),
    ):
        with pytest.raises(rx.errors.ReplicaxError, match=place) as caught:
            strategy.run(scope[name], args=(x,))
        assert str(file) not in str(caught.value)
    assert (
        user_code.source_at(user_code.place_of(str(file), 5, "decides")).strip()
        == "return x if x.sum() > 0 else -x"
    )
    assert user_code.source_at(user_code.place_of(__file__, 1, "here")).startswith('"""Which code')
    assert user_code.source_at(user_code.UNKNOWN) == ""


def test_callback_of_a_program_is_found_and_other_threads_are_not():
    found = []

    def called_back(x):
        thread = threading.Thread(target=lambda: found.append(user_line_of_callback()))
        thread.start()
        thread.join()
        return np.asarray(x)

    def program(x):
        return jax.pure_callback(called_back, jax.ShapeDtypeStruct((), np.float32), x)

    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        jax.block_until_ready(jax.jit(program)(np.float32(1)))
    finally:
        stop.set()
        other.join()
    (line,) = found
    assert line is not None
    assert line.endswith(" in called_back")
