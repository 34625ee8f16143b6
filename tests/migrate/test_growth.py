"""The work of the command grows with the length of a program, not with its square. Counted in calls, not in seconds."""

import cProfile
from pathlib import Path

import pytest

from replicax._migrate import source_files

# The beginning, what is repeated, and the end.
PROGRAMS = {
    "a dataset that is assigned again": (
        "ds = tf.data.Dataset.range(10)\n",
        "ds = ds.map(lambda x: x + {i})\n",
        "for x in ds:\n  print(tf.square(x))\n",
    ),
    "an object of unknown kind that is assigned again": (
        "x = make()\n",
        "x = x.map(f)\n",
        "print(tf.square(x))\n",
    ),
    "layers called one after another": (
        "x = i = tf.keras.Input((3,))\n",
        "x = tf.keras.layers.Dense(3)(x)\n",
        "m = tf.keras.Model(i, x)\nm.compile('sgd', 'mse')\nm.save('a.h5')\n",
    ),
    "files of models": (
        "m = tf.keras.Sequential()\n",
        "m.save('x{i}')\n",
        "print(m)\n",
    ),
    "conditions in a step": (
        "@tf.function\ndef step(x):\n",
        "  if x is None:\n    x = tf.square(x)\n",
        "  return x\n",
    ),
    "classes": (
        "",
        "class A{i}(tf.keras.Model):\n  def __init__(self):\n    self.d = tf.keras.layers.Dense(3)\n"
        "  def call(self, x):\n    return self.d(x)\na{i} = A{i}()\na{i}.compile('sgd', 'mse')\n",
        "print(a1)\n",
    ),
    "tapes": (
        "",
        "w{i} = tf.Variable(3.0)\nwith tf.GradientTape() as tape:\n  loss = w{i} * 2\nprint(tape.gradient(loss, w{i}))\n",
        "",
    ),
}


def num_calls(path: Path, parts: tuple[str, str, str], num_repeats: int) -> int:
    """The calls of functions of the command for a program."""
    before, each, after = parts
    repeated = "".join(each.replace("{i}", str(i)) for i in range(num_repeats))
    path.write_text(f"import tensorflow as tf\n{before}{repeated}{after}")
    return calls_of_migrate(path)


def calls_of_migrate(path: Path) -> int:
    """The calls of functions of the command for a path."""
    profile = cProfile.Profile(subcalls=False, builtins=False)
    profile.runcall(source_files.migrate, source_files.find_files([path]))
    entries = [entry for entry in profile.getstats() if "migrate" in entry.code.co_filename]
    return sum(entry.callcount for entry in entries)


def num_calls_of_files(folder: Path, num_files: int) -> int:
    """The calls of functions of the command for files that do not import each other."""
    before, each, _ = PROGRAMS["classes"]
    folder.mkdir()
    for number in range(num_files):
        text = f"import tensorflow as tf\n{before}{each}"
        (folder / f"m{number}.py").write_text(text.replace("{i}", str(number)))
    return calls_of_migrate(folder)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_twice_the_program_is_twice_the_work(tmp_path, kind):
    num_calls(tmp_path / "warm.py", PROGRAMS[kind], 1)  # reads the tables
    small, large = (num_calls(tmp_path / "program.py", PROGRAMS[kind], number) for number in (25, 50))
    assert large < 2.3 * small


def test_twice_the_files_are_twice_the_work(tmp_path):
    num_calls_of_files(tmp_path / "warm", 1)  # reads the tables
    small, large = (num_calls_of_files(tmp_path / str(number), number) for number in (30, 60))
    assert large < 2.1 * small
